"""The launchers' choice of tiles and grids: csrc/cuda/plan_test.cpp passes."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "build" / "emulator" / "plan_test"


def test_tiles_and_grids_cover_and_fit() -> None:
    """For all sizes that the operators take, on a large, a small and a tiny GPU."""
    process = subprocess.run([PROGRAM], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-4000:]
