"""Settings of all tests."""

import os

from hypothesis import settings

# The ordinary run is the same every time; `make test-long` and `make fuzz` draw more examples.
settings.register_profile("test", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=300, print_blob=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("XPRESS_TEST_PROFILE", "test"))
