"""Every operator on every compiled backend: a table of sizes, special values, layouts, full size.

Outputs are compared with the reference's. On the emulator each case runs many times, with its
threads in other orders and on other GPUs, and all must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import backends
import pytest
import torch
from backends import Problem, assert_close_as_torch, random_problem
from torch import Tensor

from xpress_ext import reference

INF = float("inf")
NAN, NEGATIVE_NAN = (
    torch.tensor(bits, dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, -1)
)

pytestmark = pytest.mark.parametrize("backend", backends.COMPILED)
each_weight = pytest.mark.parametrize("weight", backends.WEIGHT_DTYPES, ids=str)

# Vocabularies, blocks and batches that are no multiple of any tile, and the limits.
CASES: dict[str, dict[str, Any]] = {
    "smallest": {"N": 1, "B": 2, "V": 1},
    "few ids": {"N": 9, "B": 3, "V": 7, "m": 32},
    "odd": {"N": 3, "B": 16, "V": 1021, "H": 96, "r": 96, "m": 160},
    "widest block": {"N": 3, "B": 32, "V": 333, "H": 160, "r": 64},
    "batch": {"N": 9, "B": 16, "V": 515, "H": 64, "r": 64, "m": 96},
    "widest rank": {"N": 1, "B": 5, "V": 130, "H": 512, "r": 512, "m": 544},
}
VOCABULARIES = (1, 7, 8191, 50257)
QWEN3_8B = {"N": 1, "B": 16, "V": 151936, "H": 4096, "r": 256, "m": 512}


def same_bits_from_every_schedule(backend: str, count: int, call: Callable[[], Any]) -> Any:
    """What `call` gives, having checked that every schedule gives it."""
    expected: tuple[Tensor, ...] | None = None
    for schedule in backends.schedules(backend, count):
        with schedule:
            got = call()
        outputs = got if isinstance(got, tuple) else (got,)
        if expected is None:
            first, expected = got, outputs
            continue
        for one, other in zip(outputs, expected, strict=True):
            differs = one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
            assert not differs.any(), (
                f"{schedule}: other bits at {differs.nonzero()[0].tolist()} (in bytes)"
            )
    return first


def on(backend: str, name: str, *arguments: Any, count: int = 20) -> Any:
    operator = getattr(backends.get(backend), name)
    return same_bits_from_every_schedule(backend, count, lambda: operator(*arguments))


def latent_calls(problem: Problem) -> dict[str, tuple[Tensor, ...]]:
    """Arguments of the operators that make the latents, from the reference's walk."""
    tokens = problem.random_seeds(0)
    prev = torch.cat([problem.predecessor[:, None], problem.anchor[:, None], tokens[:, :-1]], 1)
    xh = reference.project_hidden(problem.hidden, problem.hidden_proj)
    x = reference.causal_mix(xh, problem.mixer)
    c = reference.fuse_mix(x, prev, problem.token_table, problem.mixer)
    return {
        "project_hidden": (problem.hidden, problem.hidden_proj),
        "causal_mix": (xh, problem.mixer),
        "fuse_mix": (x, prev, problem.token_table, problem.mixer),
        "refiner_mlp": (c, problem.mlp_gate_up, problem.mlp_down),
    }


def latents(problem: Problem) -> Tensor:
    """[N,D,r] z of the drafted slots, strided as in [N,B,r]."""
    return reference.refiner_mlp(*latent_calls(problem)["refiner_mlp"])[:, 1:]


# ------------------------------------------------------------------------------------- the latents


@each_weight
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_latents_are_as_accurate_as_torch(
    backend: str, sizes: dict[str, Any], weight: torch.dtype
) -> None:
    # Of one small head, the greatest error is a matter of luck: of six it can be compared.
    calls = [latent_calls(random_problem(seed, weight=weight, **sizes)) for seed in range(6)]
    for name in calls[0]:
        got = torch.cat([on(backend, name, *call[name], count=4) for call in calls])
        exact = torch.cat([getattr(reference, name)(*call[name]) for call in calls])
        plain = torch.cat([getattr(backends.get("plain"), name)(*call[name]) for call in calls])
        assert_close_as_torch(name, got, exact, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_gradients_of_causal_mix_equal_those_of_autograd(
    backend: str, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    N, B, r = sizes["N"], sizes["B"], sizes.get("r", 32)
    torch.manual_seed(N)
    x, grad_out = torch.randn(2, N, B, r, dtype=dtype)
    mixer = torch.randn(B, B, r, dtype=dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (x, mixer)]
    expected = torch.autograd.grad(reference.causal_mix(*leaves), leaves, grad_out.double())

    def call() -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, mixer)]
        out = backends.get(backend).causal_mix(*leaves)
        return torch.autograd.grad(out, leaves, grad_out)

    for got, wanted in zip(same_bits_from_every_schedule(backend, 20, call), expected, strict=True):
        tolerance = 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    assert not call()[1][torch.ones(B, B).triu(1).bool()].any()  # above the diagonal


# ------------------------------------------------------------------------------------- the readout


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest id of the greatest logit, NaN greatest, and that logit."""
    keys = reference.argmax_key(logits, torch.arange(logits.shape[-1])).amax(dim=-1)
    index = ((1 << 32) - 1) - (keys & ((1 << 32) - 1))
    return index, logits.gather(-1, index[..., None])[..., 0]


def check_readouts(
    backend: str, z: Tensor, base_logits: Tensor, readout: Tensor, count: int = 20
) -> None:
    """All readouts agree bit for bit, among all ids and among candidates; logits are accurate."""
    N, D, V = base_logits.shape
    rows = [
        on(backend, "refined_logits", z[n], base_logits[n], readout, count=min(count, 3))
        for n in range(N)
    ]
    logits = torch.stack(rows)
    index, value = on(backend, "readout_argmax", z, base_logits, readout, count=count)
    best, greatest = best_of(logits)
    assert torch.equal(index, best)
    torch.testing.assert_close(value, greatest, rtol=0, atol=0, equal_nan=True)

    torch.manual_seed(V)
    candidates = torch.randint(V, (N, D, 37))
    index, value = on(backend, "readout_argmax", z, base_logits, readout, candidates, count=count)
    among = torch.full_like(logits, -INF).scatter(-1, candidates, logits.gather(-1, candidates))
    is_candidate = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, candidates, True)
    best = best_of(among.masked_fill(~is_candidate, -INF))[0]
    finite = logits.isfinite().all()
    assert torch.equal(index, best) or not finite
    torch.testing.assert_close(
        value, logits.gather(-1, index[..., None])[..., 0], rtol=0, atol=0, equal_nan=True
    )


@each_weight
@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize(("N", "B"), [(1, 2), (1, 16), (1, 32), (3, 7), (9, 3)])
def test_readouts_of_every_vocabulary(
    backend: str, N: int, B: int, V: int, weight: torch.dtype
) -> None:
    problem = random_problem(V, N=N, B=B, V=V, weight=weight)
    count = 20 if V < 5000 else 3
    check_readouts(backend, latents(problem), problem.base_logits, problem.readout, count)


@each_weight
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_logits_are_as_accurate_as_torch(
    backend: str, sizes: dict[str, Any], weight: torch.dtype
) -> None:
    calls = []
    for seed in range(6):
        problem = random_problem(seed, weight=weight, **sizes)
        rows = latents(problem).flatten(0, 1), problem.base_logits.flatten(0, 1)
        calls.append((*rows, problem.readout))
    got = torch.cat([on(backend, "refined_logits", *call, count=4) for call in calls])
    exact = torch.cat([reference.refined_logits(*call) for call in calls])
    plain = torch.cat([backends.get("plain").refined_logits(*call) for call in calls])
    assert_close_as_torch("refined_logits", got, exact, plain)


@pytest.mark.parametrize("dtype", backends.WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize(("N", "B"), [(1, 4), (9, 4)])
def test_base_logits_of_any_alignment_and_stride(
    backend: str, N: int, B: int, offset: int, dtype: torch.dtype
) -> None:
    problem = random_problem(1, N=N, B=B, V=517, weight=torch.bfloat16, inputs=dtype)
    wide = torch.full((N, B, 517 + 2 * offset + 1), NAN, dtype=dtype)
    wide[:, 1:, offset : offset + 517] = problem.base_logits
    strided = wide[:, 1:, offset : offset + 517]
    z = latents(problem)
    for count, base_logits in ((1, problem.base_logits), (20, strided)):
        got = on(backend, "readout_argmax", z, base_logits, problem.readout, count=count)
        ids = on(backend, "top_candidates", base_logits, 9, count=count)
        if count == 1:
            expected, expected_ids = got, ids
    for one, other in zip((*got, *ids), (*expected, *expected_ids), strict=True):
        assert torch.equal(one, other)
    check_readouts(backend, z, strided, problem.readout, count=3)


# Ids at the borders of lanes, fragments, warps, CTAs and of the whole vocabulary.
BORDERS = (
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    63,
    64,
    127,
    128,
    255,
    256,
    511,
    512,
    1023,
    1024,
    2047,
    2048,
    2999,
)


@each_weight
@pytest.mark.parametrize("N", [1, 9])
def test_ties_across_every_border_go_to_the_lowest_id(
    backend: str, N: int, weight: torch.dtype
) -> None:
    V, D = 3000, len(BORDERS) - 1
    base_logits = torch.zeros(N, D, V)
    for k in range(D):
        base_logits[:, k, list(BORDERS[k:])] = 5.0
    z, readout = torch.zeros(N, D, 32, dtype=weight), torch.zeros(V, 32, dtype=weight)
    index, value = on(backend, "readout_argmax", z, base_logits, readout)
    assert torch.equal(index, torch.tensor(BORDERS[:-1]).expand(N, D))
    assert (value == 5.0).all()
    ids, _ = on(backend, "top_candidates", base_logits, 3)
    for k in range(D - 1):
        assert ids[0, k].tolist() == list(BORDERS[k : k + 3])
    candidates = torch.tensor(BORDERS).flip(0).expand(N, D, -1).contiguous()
    index, _ = on(backend, "readout_argmax", z, base_logits, readout, candidates)
    assert torch.equal(index, torch.tensor(BORDERS[:-1]).expand(N, D))


@each_weight
@pytest.mark.parametrize("N", [1, 9])
def test_special_values_at_every_border(backend: str, N: int, weight: torch.dtype) -> None:
    """A NaN of either sign beats +inf, which beats numbers; -inf everywhere gives id 0."""
    V = 3000
    z, readout = torch.zeros(N, 4, 32, dtype=weight), torch.zeros(V, 32, dtype=weight)
    for at in BORDERS[1:-1]:
        base_logits = torch.full((N, 4, V), -INF)
        base_logits[:, 0, at], base_logits[:, 0, V - 1] = NAN, INF
        base_logits[:, 1, at], base_logits[:, 1, 0] = NEGATIVE_NAN, INF
        base_logits[:, 2, at] = INF
        for name in ("readout_argmax", "top_candidates"):
            arguments = (z, base_logits, readout) if name == "readout_argmax" else (base_logits, 1)
            outputs = on(backend, name, *arguments, count=2)
            index, value = (output.reshape(N, 4) for output in outputs)
            assert index.tolist() == [[at, at, at, 0]] * N, f"{name}, special values at {at}"
            assert value[0, :2].isnan().all()
            assert value[0, 2:].tolist() == [INF, -INF]


# ---------------------------------------------------------------------------------- the candidates


@pytest.mark.parametrize("dtype", backends.WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize(("N", "D"), [(1, 15), (9, 2)])
def test_candidates_of_every_vocabulary(
    backend: str, N: int, D: int, V: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(V)
    base_logits = torch.randn(N, D, V).mul(3.0).to(dtype)  # ties abound in 16 bits
    for C in sorted({1, min(V, 32), min(V, 1000), min(V, 1024)}):
        got = on(backend, "top_candidates", base_logits, C, count=20 if V < 5000 else 3)
        for one, other in zip(got, reference.top_candidates(base_logits, C), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("C", [1, 3, 32, 700])
def test_candidates_among_few_different_values(backend: str, C: int) -> None:
    """Whole digits of the logits' bits are equal, and the C-th place lies within a tie."""
    torch.manual_seed(C)
    for values in ([0.0], [-0.0, 0.0], [1.0, 1.0 + 2**-23], [NAN, -INF, INF, 0.0], [-1e-45, 1e-45]):
        base_logits = torch.tensor(values)[torch.randint(len(values), (2, 3, 701))]
        got = on(backend, "top_candidates", base_logits, C)
        expected = reference.top_candidates(base_logits, C)
        assert torch.equal(got[0], expected[0]), values
        torch.testing.assert_close(got[1], expected[1], rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------- the whole loop


@each_weight
@pytest.mark.parametrize("name", CASES)
def test_refinement_of_every_size(backend: str, name: str, weight: torch.dtype) -> None:
    """All sums are exact, so all backends agree on every token."""
    sizes = CASES[name]
    problem = backends.quantised_problem(1, weight=weight, **sizes)
    C = min(5, sizes["V"])
    count = 2 if name in ("odd", "widest block", "batch") else 20
    for options in ({}, {"num_passes": 2}, {"top_c": C}, {"top_c": C, "exact": True}):
        got = same_bits_from_every_schedule(
            backend, count, lambda options=options: problem.refine(backend, **options)
        )
        expected = problem.refine("reference", **options)
        for what, one, other in zip(("tokens", "passes", "readouts"), got, expected, strict=True):
            assert torch.equal(one, other), f"{what} with {options}"


@pytest.mark.parametrize("name", ["latents", "readouts", "candidates", "refinement"])
def test_full_size(backend: str, name: str) -> None:
    """The head for Qwen3-8B."""
    problem = random_problem(1, weight=torch.bfloat16, strength="mild", **QWEN3_8B)
    if name == "latents":
        for operator, arguments in latent_calls(problem).items():
            assert_close_as_torch(
                operator,
                on(backend, operator, *arguments, count=1),
                getattr(reference, operator)(*arguments),
                getattr(backends.get("plain"), operator)(*arguments),
            )
    elif name == "readouts":
        check_readouts(backend, latents(problem), problem.base_logits, problem.readout, count=1)
    elif name == "candidates":
        got = on(backend, "top_candidates", problem.base_logits, 32, count=1)
        expected = reference.top_candidates(problem.base_logits, 32)
        assert torch.equal(got[0], expected[0])
    else:
        tokens = problem.refine(backend, num_passes=2)[0]
        state = problem.refine(backend, num_passes=1)[0]
        assert torch.equal(problem.refine(backend, num_passes=1, seed_tokens=state)[0], tokens)
