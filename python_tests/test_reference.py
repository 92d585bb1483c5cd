"""The reference itself: against formulas written another way, and against torch's own order."""

from __future__ import annotations

import math

import backends
import pytest
import torch
from backends import random_problem

from xpress_ext import reference


def test_latent_stage_follows_the_formulas_element_by_element() -> None:
    """method.md 3 in Python's own double arithmetic, with no torch in between."""
    problem = random_problem(1, N=1, B=4, V=7, H=32, r=32, m=32)
    tokens = torch.tensor([[3, 1, 6]])
    h, table, mixer = problem.hidden[0].tolist(), problem.token_table.tolist(), problem.mixer
    a_h, a_g = problem.hidden_proj.tolist()
    gate, up = problem.mlp_gate_up[:32].tolist(), problem.mlp_gate_up[32:].tolist()
    down = problem.mlp_down.tolist()
    prev = [int(problem.predecessor[0]), int(problem.anchor[0]), 3, 1]

    def dot(left: list[float], right: list[float]) -> float:
        return math.fsum(a * b for a, b in zip(left, right, strict=True))

    g = [math.fsum(column) / 4 for column in zip(*h, strict=True)]
    xh = [[dot(a_h[c], h[k]) + dot(a_g[c], g) for c in range(32)] for k in range(4)]
    for k in range(4):
        c_k = [
            math.fsum(float(mixer[k, j, c]) * (xh[j][c] + table[prev[j]][c]) for j in range(k + 1))
            for c in range(32)
        ]
        inner = [
            dot(gate[i], c_k) / (1 + math.exp(-dot(gate[i], c_k))) * dot(up[i], c_k)
            for i in range(32)
        ]
        z_k = torch.tensor([c_k[c] + dot(down[c], inner) for c in range(32)])
        torch.testing.assert_close(problem.latent("reference", tokens)[0, k], z_k)
    logits = problem.logits("reference", tokens)[0, 2]
    expected = [
        float(problem.base_logits[0, 2, v]) + dot(problem.readout[v].tolist(), z_k.tolist())
        for v in range(7)
    ]
    torch.testing.assert_close(logits, torch.tensor(expected))


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16], ids=str)
def test_roundings_of_a_16_bit_head_are_where_the_method_puts_them(weight: torch.dtype) -> None:
    problem = random_problem(2, weight=weight, inputs=torch.float32)
    # Hidden states are rounded before the product, the mean after it was taken.
    a_h, a_g = problem.hidden_proj.float()
    mean = problem.hidden.mean(1, keepdim=True).to(weight).float()
    xh = problem.hidden.to(weight).float() @ a_h.T + mean @ a_g.T
    torch.testing.assert_close(reference.project_hidden(problem.hidden, problem.hidden_proj), xh)
    # The MLP reads rounded values; its residual does not.
    c = torch.randn(2, 8, 32)
    gate, up = (c.to(weight).float() @ problem.mlp_gate_up.float().T).chunk(2, -1)
    inner = (torch.nn.functional.silu(gate) * up).to(weight).float()
    z = (c + inner @ problem.mlp_down.float().T).to(weight)
    assert torch.equal(reference.refiner_mlp(c, problem.mlp_gate_up, problem.mlp_down), z)


def test_output_types_are_those_of_the_table() -> None:
    for weight in backends.WEIGHT_DTYPES:
        problem = random_problem(3, weight=weight)
        xh = reference.project_hidden(problem.hidden, problem.hidden_proj)
        x = reference.causal_mix(xh, problem.mixer)
        c = reference.fuse_mix(
            x, torch.zeros(2, 8, dtype=torch.int64), problem.token_table, problem.mixer
        )
        z = reference.refiner_mlp(c, problem.mlp_gate_up, problem.mlp_down)
        ids, logits = reference.top_candidates(problem.base_logits, 3)
        index, value = reference.readout_argmax(z[:, 1:], problem.base_logits, problem.readout)
        rows = reference.refined_logits(z[0, 1:], problem.base_logits[0], problem.readout)
        assert {xh.dtype, x.dtype, c.dtype, logits.dtype, value.dtype, rows.dtype} == {
            torch.float32
        }
        assert z.dtype is weight
        assert ids.dtype is index.dtype is torch.int64


def test_argmax_key_orders_as_torch_argmax_does() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4000, 9), generator=generator)
    values = bits.to(torch.int32).view(torch.float32)  # NaN of both signs and denormals included
    values[::3] = torch.randint(-2, 3, (1334, 9), generator=generator).float()
    values[1::7, 3] = -0.0
    keys = reference.argmax_key(values, torch.arange(9))
    assert torch.equal(keys.argmax(-1), values.argmax(-1))
    ordered = values.gather(-1, keys.argsort(-1, descending=True)).nan_to_num(math.inf)
    assert (ordered[:, 1:] <= ordered[:, :-1]).all()


def test_causal_mix_has_the_right_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    mixer = torch.randn(4, 4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(reference.causal_mix, (x, mixer))
    reference.causal_mix(x, mixer).sum().backward()
    assert mixer.grad is not None
    assert mixer.grad[torch.ones(4, 4).triu(1).bool()].eq(0).all()


@pytest.mark.parametrize("strength", backends.STRENGTHS)
def test_sequential_decode_is_the_walk_of_the_operators(strength: str) -> None:
    for seed in range(4):
        problem = random_problem(seed, strength=strength, V=40, V_t=97)
        candidates = reference.top_candidates(problem.base_logits, 6)[0]
        for chosen in (None, candidates):
            decoded = reference.sequential_decode(*problem.tensors, chosen, problem.d2t)
            assert torch.equal(decoded, problem.sequential("reference", chosen))


@pytest.mark.parametrize("C", [1, 3])
def test_exact_ends_even_where_the_two_readouts_never_agree(
    monkeypatch: pytest.MonkeyPatch, C: int
) -> None:
    """Settled slots stay frozen: rounding that differs between readouts could loop otherwise."""
    problem = random_problem(6)
    full, passes = problem.sequential("reference"), 0

    def disagreeing(z, base_logits, readout, candidates=None):
        nonlocal passes
        passes += 1
        assert passes < 1000, "it loops"
        if candidates is None:
            return readout_argmax(z, base_logits, readout)
        return candidates[..., 0], base_logits[..., 0].float()

    readout_argmax = reference.readout_argmax
    monkeypatch.setattr(reference, "readout_argmax", disagreeing)
    tokens, _, full_readouts = problem.refine("reference", top_c=C, exact=True)
    assert torch.equal(tokens, full)
    assert full_readouts.max() <= problem.num_drafted


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_logits", (2, 6, 97)),
        ("base_logits", (2, 7, 96)),
        ("hidden", (2, 7, 32)),
        ("hidden", (2, 8, 64)),
        ("anchor", (3,)),
        ("predecessor", (2, 1)),
        ("hidden_proj", (2, 16, 32)),
        ("token_table", (97, 31)),
        ("mixer", (8, 7, 32)),
        ("mlp_gate_up", (127, 32)),
        ("mlp_down", (31, 64)),
        ("d2t", (96,)),
    ],
)
def test_shapes_that_do_not_fit_are_named(name: str, shape: tuple[int, ...]) -> None:
    problem = random_problem(5)
    like = getattr(problem, name)
    dtype = torch.int64 if like is None else like.dtype
    spoiled = problem.with_(**{name: torch.zeros(shape, dtype=dtype)})
    with pytest.raises(ValueError, match=r"must have shape"):
        spoiled.refine("reference")


def test_more_candidates_than_the_limit_are_refused() -> None:
    logits = torch.zeros(1, 1, 2000)
    assert reference.top_candidates(logits, 1024)[0].shape == (1, 1, 1024)
    for C in (0, 1025):
        with pytest.raises(ValueError, match=f"1 to min.*1024.*got {C}"):
            reference.top_candidates(logits, C)
