"""Ids outside their range on a GPU, where no call may wait for a check of them.

They spoil their own block's results (tokens and passes -1, floats NaN) and nothing else, and
nothing is read or written out of bounds: on the emulator that would be a fault.
"""

from __future__ import annotations

import backends
import pytest
import torch
from backends import Problem, random_problem
from torch import Tensor

N, SPOILED = 3, 1
OPTIONS = ({}, {"top_c": 5}, {"top_c": 5, "exact": True})

pytestmark = pytest.mark.parametrize(
    "backend", [name for name in backends.COMPILED if name != "cpu"]
)


@pytest.fixture(autouse=True)
def _no_checks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends.get(backend)  # that of a real GPU asks for checks when it is imported
    monkeypatch.setenv("XPRESS_CHECK", "0")


def small_problem() -> Problem:
    return random_problem(1, N=N, V=97, weight=torch.bfloat16)


def with_a_bad_id(ids: Tensor, bad: int) -> Tensor:
    """`ids` [N,...], of which the last one of a block is `bad`."""
    spoiled = ids.clone()
    spoiled[SPOILED].view(-1)[-1] = bad
    return spoiled


def assert_others_equal(got: Tensor, expected: Tensor) -> None:
    others = [n for n in range(N) if n != SPOILED]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("bad", [-1, 97, -(2**63)])
@pytest.mark.parametrize("name", ["anchor", "predecessor", "seed_tokens"])
def test_a_bad_id_ends_its_own_block(backend: str, name: str, bad: int) -> None:
    problem = small_problem()
    seeds = problem.random_seeds(1)
    for options in OPTIONS:
        expected = problem.refine(backend, seed_tokens=seeds, **options)
        for schedule in backends.schedules(backend, 2):
            with schedule:
                if name == "seed_tokens":
                    spoiled = with_a_bad_id(seeds, bad)
                    got = problem.refine(backend, seed_tokens=spoiled, **options)
                else:
                    spoiled = with_a_bad_id(getattr(problem, name)[:, None], bad)[:, 0]
                    other = problem.with_(**{name: spoiled})
                    got = other.refine(backend, seed_tokens=seeds, **options)
            assert (got[0][SPOILED] == -1).all(), options
            assert got[1][SPOILED] == -1, options
            for one, wanted in zip(got, expected, strict=True):
                assert_others_equal(one, wanted)


@pytest.mark.parametrize("bad", [-40, 97 - 39, 2**40])
def test_an_offset_that_leaves_the_table_ends_the_blocks_that_meet_it(
    backend: str, bad: int
) -> None:
    problem = random_problem(2, N=N, V=40, V_t=97, weight=torch.bfloat16)
    base_logits, d2t = problem.base_logits.clone(), problem.d2t.clone()
    base_logits[..., 39] = -1000.0
    base_logits[SPOILED, :, 39] = 1000.0
    problem = problem.with_(base_logits=base_logits)
    d2t[39] = bad
    for options in OPTIONS:
        got = problem.with_(d2t=d2t).refine(backend, **options)
        assert (got[0][SPOILED] == -1).all(), options
        assert got[1][SPOILED] == -1, options
        for one, wanted in zip(got, problem.refine(backend, **options), strict=True):
            assert_others_equal(one, wanted)


@pytest.mark.parametrize("bad", [-1, 97, -(2**63)])
def test_operators_give_nan_and_minus_1_for_a_bad_id(backend: str, bad: int) -> None:
    problem, operators = small_problem(), backends.get(backend)
    prev = torch.randint(97, (N, 8))
    context = torch.randn(N, 8, 32)
    latent = (problem.token_table, problem.mixer)
    got = operators.fuse_mix(context, with_a_bad_id(prev, bad), *latent)
    assert got[SPOILED].isnan().all()
    assert_others_equal(got, operators.fuse_mix(context, prev, *latent))

    z = torch.randn(N, 7, 32).bfloat16()
    candidates = torch.randint(97, (N, 7, 4))
    readout = (z, problem.base_logits, problem.readout)
    index, value = operators.readout_argmax(*readout, with_a_bad_id(candidates, bad))
    assert index[SPOILED, -1] == -1
    assert value[SPOILED, -1].isnan()
    expected = operators.readout_argmax(*readout, candidates)
    for one, wanted in zip((index, value), expected, strict=True):
        assert_others_equal(one, wanted)
        assert torch.equal(one[SPOILED, :-1], wanted[SPOILED, :-1])
