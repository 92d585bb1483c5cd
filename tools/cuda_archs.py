"""Compile the CUDA sources for every architecture of a release; ``make cuda-archs``.

A warning of nvcc or ptxas, a spill and a use of local memory included, is an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda-archs"
ARCHITECTURES = "8.0;8.9;9.0a;10.0;12.0"

sys.path.insert(0, str(ROOT / "tools" / "build_backend"))

import xpress_build  # noqa: E402


def main() -> None:
    start = time.monotonic()
    cmake, ninja = xpress_build.find_cmake(), xpress_build.find_ninja()
    assert cmake is not None, "cmake is missing"
    assert ninja is not None, "ninja is missing"
    run(
        cmake,
        f"-S{ROOT}",
        f"-B{BUILD}",
        "-GNinja",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DXPRESS_TORCH_DIR={xpress_build.find_torch()}",
        f"-DTORCH_CUDA_ARCH_LIST={ARCHITECTURES}",
        "-DXPRESS_CUDA=1",
        "-DXPRESS_WERROR=1",
    )
    run(ninja, "-C", str(BUILD), f"-j{xpress_build.jobs(with_cuda=True)}", "-k0", "xpress_cuda")
    seconds = time.monotonic() - start
    print(f"compiled without a warning for {ARCHITECTURES} in {seconds:.0f} s")


def run(*command: str) -> None:
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": ""}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stdout}\n`{' '.join(command)}` failed: its messages are above")


if __name__ == "__main__":
    main()
