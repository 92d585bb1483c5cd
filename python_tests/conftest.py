"""Settings of all tests."""

import os

import pytest
from hypothesis import settings

# The ordinary run is the same every time; `make test-long` and `make fuzz` draw more examples.
settings.register_profile("test", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=300, print_blob=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("XPRESS_TEST_PROFILE", "test"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the emulator is not asked.

    A test marked `not_emulated` is of the layer above the launchers, which refuses bad arguments,
    or of a figure that takes more heads than the emulator has time for.
    """
    left_out = [
        item
        for item in items
        if item.get_closest_marker("not_emulated") and "emulator" in item.nodeid.split("[")[-1]
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
