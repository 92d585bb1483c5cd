"""Settings of all tests."""

import os

from hypothesis import settings

# The ordinary run is the same every time; `make fuzz` draws many fresh examples.
settings.register_profile("test", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("fuzz" if os.environ.get("XPRESS_FUZZ") else "test")
