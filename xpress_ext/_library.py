"""Loading of the operator library, ``libxpress_ops.so``, which lies beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

LIBRARY_PATH = Path(__file__).with_name("libxpress_ops.so")


@cache
def load_library() -> None:
    """Register the operators of ``libxpress_ops.so`` as ``torch.ops.xpress.*``, once.

    Raises:
        ImportError: the library was not built, or torch is older than its stable ABI.
    """
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"xpress_ext: the operator library {LIBRARY_PATH} is missing: build it with "
            "`make build` or `pip install .` in the project's folder"
        )
    try:
        torch.ops.load_library(str(LIBRARY_PATH))
    except OSError as error:
        raise ImportError(
            f"xpress_ext: {LIBRARY_PATH} does not load under torch {torch.__version__} "
            f"(torch>=2.10 is needed): build it again with `pip install .` ({error})"
        ) from error
