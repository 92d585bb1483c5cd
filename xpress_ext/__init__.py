"""XPress: Jacobi refinement of the blocks that a block-diffusion drafter proposes.

Importing the package loads the operator library, so that ``torch.ops.xpress.*`` exists.
"""

from xpress_ext._library import load_library
from xpress_ext._version import __version__
from xpress_ext.build_info import build_info

load_library()

__all__ = ["__version__", "build_info"]
