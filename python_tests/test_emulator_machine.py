"""The emulated GPU catches what it is there to catch: csrc/emulator/machine_test.cpp passes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("variant", ["plain", "sanitized"])
def test_planted_bugs_are_caught(variant: str) -> None:
    """As compiled for the other tests, and under AddressSanitizer and UBSan."""
    program = ROOT / "build" / "emulator" / f"machine_test_{variant}"
    # Stacks of abandoned fibers hold the only pointers to what lies on the heap.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    process = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr[-4000:]


def test_kernels_know_nothing_of_the_emulator() -> None:
    """Only the primitives have two bodies."""
    folders = ("csrc/device", "csrc/emulator")
    sources = [
        source
        for suffix in ("h", "cpp", "cu", "cuh", "txt", "cmake")
        for source in (*ROOT.glob(f"csrc/**/*.{suffix}"), *ROOT.glob(f"tools/**/*.{suffix}"))
    ]
    assert len(sources) > 50
    for source in [*sources, ROOT / "CMakeLists.txt"]:
        if source.relative_to(ROOT).as_posix().startswith(folders):
            continue
        found = re.search(r"XPRESS_EMULATE\b", source.read_text())
        assert found is None, f"{source} knows of the emulator"
