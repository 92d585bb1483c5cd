"""readout_argmax passes over vocabulary that its bounds rule out; that must never show.

`refined_logits` computes every logit with the same accumulation and no bounds, so the argmax over
its rows is the right value, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import backends
import pytest
import torch
from torch import Tensor

from xpress_ext import ops, reference

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Problem(NamedTuple):
    z: Tensor  # [1, D, r]
    base_logits: Tensor  # [1, D, V]
    readout: Tensor  # [V, r]


def _normal(*size: int, std: float = 1.0) -> Tensor:
    return torch.randn(size) * std


def _falling(D: int, V: int) -> Tensor:
    """Base logits that fall with rank, as a language model's do."""
    return torch.stack([-2.0 * torch.log1p(torch.randperm(V).float()) for _ in range(D)])[None]


def _ordinary(D: int, V: int, r: int) -> Problem:
    return Problem(_normal(1, D, r), _falling(D, V), _normal(V, r, std=0.05))


def _no_corrections(D: int, V: int, r: int) -> Problem:
    return Problem(torch.zeros(1, D, r), _falling(D, V), _normal(V, r))


def _flat_base(D: int, V: int, r: int) -> Problem:
    return Problem(_normal(1, D, r), torch.zeros(1, D, V), _normal(V, r))


def _large_corrections(D: int, V: int, r: int) -> Problem:
    return Problem(_normal(1, D, r, std=8.0), _falling(D, V), _normal(V, r))


def _aligned_with_the_latent(D: int, V: int, r: int) -> Problem:
    """Rows that meet their bound, up to rounding: parallel to z, of few different lengths."""
    z = _normal(1, 1, r).expand(1, D, r).contiguous()
    lengths = torch.randint(1, 4, (V, 1)).float()
    base = -lengths.T[None] * (z[0, 0] @ z[0, 0]) * 0.1
    return Problem(z, base.expand(1, D, V).contiguous(), lengths * z[0, :1] * 0.1)


def _quantised(D: int, V: int, r: int) -> Problem:
    """Many exact ties, in the logits and between them and their bounds."""
    z = torch.zeros(1, D, r)
    z[..., 0] = 1.0
    readout = torch.zeros(V, r)
    readout[:, 0] = torch.randint(-2, 3, (V,)).float()
    return Problem(z, torch.randint(-2, 3, (1, D, V)).float(), readout)


def _tiny_weights(D: int, V: int, r: int) -> Problem:
    """Squares of the weights underflow to zero, their products with the latent decide."""
    z, readout = _normal(1, D, r, std=1e17), _normal(V, r, std=1e-24)
    return Problem(z, _falling(D, V) * 1e-9, readout)


def _infinite_base(D: int, V: int, r: int) -> Problem:
    base = torch.full((1, D, V), -torch.inf)
    base[..., V // 2] = 0.0
    base[:, 0] = -torch.inf
    return Problem(_normal(1, D, r), base, _normal(V, r))


def _nan_among_weights(D: int, V: int, r: int) -> Problem:
    problem = _ordinary(D, V, r)
    problem.readout[V - 1, 3] = torch.nan
    return problem


def _infinity_among_weights(D: int, V: int, r: int) -> Problem:
    problem = _ordinary(D, V, r)
    problem.readout[V // 3, 1] = torch.inf
    problem.readout[V // 2, 1] = -torch.inf
    return problem


def _nan_in_a_latent(D: int, V: int, r: int) -> Problem:
    problem = _ordinary(D, V, r)
    problem.z[0, D // 2, r - 1] = torch.nan
    problem.z[0, 0, 0] = torch.inf
    return problem


_CASES = [
    _ordinary,
    _no_corrections,
    _flat_base,
    _large_corrections,
    _aligned_with_the_latent,
    _quantised,
    _tiny_weights,
    _infinite_base,
    _nan_among_weights,
    _infinity_among_weights,
    _nan_in_a_latent,
]


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest id of the greatest logit, NaN greatest, and that logit."""
    ids = torch.arange(logits.shape[-1])
    best = reference.argmax_key(logits, ids).amax(dim=-1)
    index = ((1 << 32) - 1) - (best & ((1 << 32) - 1))
    return index, logits.gather(-1, index[:, None])[:, 0]


@pytest.mark.parametrize("make", _CASES, ids=lambda make: make.__name__.strip("_"))
@pytest.mark.parametrize("weight", _TYPES, ids=str)
@pytest.mark.parametrize(("D", "V", "r"), [(1, 1, 32), (3, 17, 32), (5, 2049, 64), (31, 5003, 96)])
def test_bounds_never_change_the_argmax(
    make: Callable[[int, int, int], Problem], weight: torch.dtype, D: int, V: int, r: int
) -> None:
    torch.manual_seed(V)
    z, base_logits, readout = make(D, V, r)
    z, readout = z.to(weight), readout.to(weight)
    for logits_type in (torch.float32, torch.bfloat16):
        base = base_logits.to(logits_type)
        index, value = ops.readout_argmax(z, base, readout)
        expected_index, expected = _argmax(ops.refined_logits(z[0], base[0], readout))
        assert torch.equal(index[0], expected_index)
        assert torch.equal(value[0].nan_to_num(nan=1e38), (expected + 0.0).nan_to_num(nan=1e38))


def test_more_rows_than_a_tile_agree_with_each_row_alone() -> None:
    torch.manual_seed(0)
    problems = [_ordinary(31, 1500, 32) for _ in range(11)]
    readout = problems[0].readout
    z = torch.cat([p.z for p in problems])
    base = torch.cat([p.base_logits for p in problems])
    index, value = ops.readout_argmax(z, base, readout)
    for n in range(len(z)):
        alone = ops.readout_argmax(z[n : n + 1], base[n : n + 1], readout)
        assert torch.equal(index[n : n + 1], alone[0])
        assert torch.equal(value[n : n + 1], alone[1])


@pytest.mark.parametrize("seeds", ["worst", "random"])
def test_seeds_change_what_is_computed_but_not_the_decode(seeds: str) -> None:
    """Seeds are first guesses of the full readout's bounds: poor ones must only cost time."""
    V = 3001
    problem = backends.random_problem(seed=3, N=3, B=8, V=V)
    base = problem.base_logits.float()
    torch.manual_seed(3)
    given = base.argmin(dim=-1) if seeds == "worst" else torch.randint(V, base.shape[:2])
    expected = ops.jacobi_refine(*problem.tensors, 7)[0]
    assert torch.equal(ops.jacobi_refine(*problem.tensors, 7, seed_tokens=given)[0], expected)
