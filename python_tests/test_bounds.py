"""Nothing is read or written out of bounds: every tensor lies against an unmapped page.

Each case runs in a process of its own, which a single byte too far ends with a signal.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import backends
import pytest
import torch
from torch import Tensor

from xpress_ext import ops

PAGE = mmap.PAGESIZE
SIDES = ("before", "after")
# Vocabularies around the sizes of vectors, panels and chunks.
VOCABULARIES = (1, 2, 15, 16, 17, 31, 33, 63, 65, 257, 511, 513, 1025)
_libc = ctypes.CDLL(None, use_errno=True)
_keep_mapped: list[mmap.mmap] = []


def guarded(tensor: Tensor, side: str, align: int = 1) -> Tensor:
    """A copy with an inaccessible page right before or (up to alignment) right after it."""
    size = -(-tensor.nbytes // align) * align
    pages = max(1, -(-size // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    _keep_mapped.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * PAGE):
        assert _libc.mprotect(ctypes.c_void_p(guard), PAGE, 0) == 0, os.strerror(ctypes.get_errno())
    offset = PAGE if side == "before" else (pages + 1) * PAGE - size
    if not tensor.numel():
        return tensor
    view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return view.view(tensor.shape).copy_(tensor)


def run(side: str, weight: torch.dtype) -> None:
    """Every operator on guarded inputs, and the .out forms on guarded outputs too."""
    for V in VOCABULARIES:
        for B, r, H, m in ((2, 32, 32, 32), (7, 96, 160, 32)):
            problem = backends.random_problem(V, B=B, V=V, H=H, r=r, m=m, weight=weight)
            fences = {
                name: guarded(value, side)
                for name, value in vars(problem).items()
                if value is not None
            }
            check(problem, problem.with_(**fences), side)


def check(problem: backends.Problem, fenced: backends.Problem, side: str) -> None:
    N, D, V = problem.base_logits.shape
    C = min(V, 5)
    seeds = guarded(problem.random_seeds(0), side)
    for options in ({}, {"top_c": C}, {"top_c": C, "exact": True}):
        expected = problem.refine("cpu", seed_tokens=seeds, **options)
        for got, wanted in zip(
            fenced.refine("cpu", seed_tokens=seeds, **options), expected, strict=True
        ):
            assert torch.equal(got, wanted)
        into_guarded_outputs(fenced, seeds, expected, side, **options)
    xh = guarded(ops.project_hidden(fenced.hidden, fenced.hidden_proj), side)
    context = guarded(ops.causal_mix(xh, fenced.mixer), side)
    torch.ops.xpress.causal_mix_backward(context, xh, fenced.mixer)
    prev = guarded(torch.randint(V, (N, D + 1)), side)
    c = guarded(ops.fuse_mix(context, prev, fenced.token_table, fenced.mixer), side)
    z = guarded(ops.refiner_mlp(c, fenced.mlp_gate_up, fenced.mlp_down)[:, 1:], side)
    candidates = guarded(ops.top_candidates(fenced.base_logits, C)[0], side)
    ops.readout_argmax(z, fenced.base_logits, fenced.readout)
    ops.readout_argmax(z, fenced.base_logits, fenced.readout, candidates)
    out = guarded(torch.zeros(N * D, V), side)
    rows = (z.flatten(0, 1), fenced.base_logits.flatten(0, 1), fenced.readout)
    assert torch.equal(ops.refined_logits(*rows, out=out), ops.refined_logits(*rows))


def into_guarded_outputs(
    fenced: backends.Problem,
    seeds: Tensor,
    expected: tuple[Tensor, ...],
    side: str,
    top_c: int = 0,
    exact: bool = False,
) -> None:
    N, B, H = fenced.hidden.shape
    m, r = fenced.mlp_down.shape[1], fenced.readout.shape[1]
    outputs = [guarded(torch.zeros_like(tensor), side) for tensor in expected]
    size = ops.jacobi_workspace(N, B, H, r, m, top_c, exact, "cpu")
    workspace = guarded(torch.zeros(size, dtype=torch.uint8), side, align=64)
    names = ("tokens", "passes", "full_readouts")
    torch.ops.xpress.jacobi_refine.out(
        *fenced.tensors,
        B - 1,
        top_c,
        exact,
        seeds,
        None,
        **dict(zip(names, outputs, strict=True)),
        workspace=workspace,
    )
    for got, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(got, wanted)


def in_a_process_of_its_own(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("weight", backends.WEIGHT_DTYPES, ids=str)
def test_no_operator_leaves_its_tensors(weight: torch.dtype, side: str) -> None:
    process = in_a_process_of_its_own(
        f"import torch, test_bounds; test_bounds.run({side!r}, {weight})"
    )
    assert process.returncode == 0, f"ended with {process.returncode}: {process.stderr[-2000:]}"


@pytest.mark.parametrize(("side", "index"), [("before", -1), ("after", 1)])
def test_the_guard_catches_one_element_too_far(side: str, index: int) -> None:
    process = in_a_process_of_its_own(
        "import ctypes, torch, test_bounds as t; x = t.guarded(torch.ones(1), "
        f"{side!r}); ctypes.c_float.from_address(x.data_ptr() + 4 * {index}).value"
    )
    assert process.returncode == -11, process.stderr
