"""The CUDA half of the torch layer without a GPU: runs `emulated_gpu.py`, which see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / "emulator" / "libxpress_ops_emulated.so"


@pytest.mark.skipif(
    not LIBRARY.exists() and not os.environ.get("XPRESS_EMULATOR"),
    reason="the emulator is not built: run `make test`",
)
def test_the_torch_layer_of_cuda_over_the_emulator(tmp_path: Path) -> None:
    package = tmp_path / "xpress_ext"
    package.mkdir()
    for file in (ROOT / "xpress_ext").glob("*.py"):
        shutil.copy(file, package)
    (package / "libxpress_ops.so").symlink_to(LIBRARY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = str(ROOT / "python_tests" / "emulated_gpu.py")
    result = subprocess.run(
        [*command, "-o", f"pythonpath={tmp_path}", "--rootdir", str(ROOT), tests],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
