"""Temporary memory of jacobi_refine, as the kernel counts it: bounded, whatever V is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xpress_ext import ops

_SCRIPT = """
import sys
import torch
from pathlib import Path
import backends
from xpress_ext import ops

def kilobytes(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])

N, V, top_c, exact = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "exact"
weight = torch.bfloat16
problem = backends.random_problem(seed=0, N=N, B=16, V=V, H=64, r=64, m=128, weight=weight)
small = backends.random_problem(seed=0, N=1, B=16, V=64, H=64, r=64, m=128, weight=weight)
ops.jacobi_refine(*small.tensors, 15)  # threads and code are there before the count begins
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident
before = kilobytes("VmRSS")
ops.jacobi_refine(*problem.tensors, 15, top_c, exact)
print(kilobytes("VmHWM") - before)
"""


def _peak_bytes(N: int, V: int, top_c: int, exact: bool) -> int:
    here = Path(__file__).parent
    arguments = [str(N), str(V), str(top_c), "exact" if exact else "capped"]
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        cwd=here,
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return 1024 * int(result.stdout)


@pytest.mark.parametrize(("top_c", "exact"), [(0, False), (32, False), (512, True)])
def test_temporary_memory_does_not_grow_with_the_vocabulary(top_c: int, exact: bool) -> None:
    small, large = (_peak_bytes(2, V, top_c, exact) for V in (2_000, 150_000))
    assert large - small < 2**20
    assert large < 16 * 2**20


@pytest.mark.parametrize(("top_c", "exact"), [(0, False), (512, True)])
def test_temporary_memory_of_a_batch_is_the_workspace(top_c: int, exact: bool) -> None:
    workspace = ops.jacobi_workspace(64, 16, 64, 64, 128, top_c, exact)
    assert _peak_bytes(64, 2_000, top_c, exact) < workspace + 2 * 2**20
