"""XPress: Jacobi refinement of the blocks that a block-diffusion drafter proposes.

Importing the package loads the operator library, so that ``torch.ops.xpress.*`` exists. Where it
was not built, a warning says how to, and what needs no operator (the reference, training) works.
"""

import warnings

from xpress_ext._library import load_library
from xpress_ext._version import __version__
from xpress_ext.build_info import build_info

try:
    load_library()
except ImportError as error:
    warnings.warn(str(error), RuntimeWarning, stacklevel=2)

__all__ = ["__version__", "build_info"]
