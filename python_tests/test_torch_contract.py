"""What torch asks of an operator: schemas, fakes, autograd, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import backends
import pytest
import torch
from torch import Tensor, nn

from xpress_ext import ops
from xpress_ext.config import XPressConfig
from xpress_ext.refiner import FoldedRefiner, XPressRefiner


def samples(weight: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """One valid call of every operator."""
    problem = backends.random_problem(1, V=40, V_t=60, weight=weight)
    tokens = problem.random_seeds(1)
    prev = torch.cat([problem.predecessor[:, None], problem.anchor[:, None], tokens[:, :-1]], 1)
    x = torch.randn(2, 8, 32)
    z = torch.randn(2, 7, 32).to(weight)
    candidates = torch.randint(40, (2, 7, 5))
    rows = (z[0], problem.base_logits[0], problem.readout)
    refine = (*problem.tensors, 7)
    return {
        "project_hidden": (problem.hidden, problem.hidden_proj),
        "causal_mix": (x, problem.mixer),
        "causal_mix_backward": (x.flip(0), x, problem.mixer),
        "fuse_mix": (x, prev, problem.token_table, problem.mixer),
        "refiner_mlp": (x, problem.mlp_gate_up, problem.mlp_down),
        "top_candidates": (problem.base_logits, 5),
        "readout_argmax": (z, problem.base_logits, problem.readout, None),
        "readout_argmax of candidates": (z, problem.base_logits, problem.readout, candidates),
        "refined_logits": rows,
        "jacobi_refine": (*refine, 0, False, None, problem.d2t),
        "jacobi_refine from seeds": (*refine, 0, False, tokens, problem.d2t),
        "jacobi_refine of candidates": (*refine, 5, False, None, problem.d2t),
        "jacobi_refine, exact": (*refine, 5, True, None, problem.d2t),
    }


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", samples(torch.float32))
def test_opcheck(name: str, weight: torch.dtype) -> None:
    operator = getattr(torch.ops.xpress, name.replace(",", "").split()[0])
    torch.library.opcheck(operator.default, samples(weight)[name])


def test_opcheck_of_causal_mix_with_gradients() -> None:
    x = torch.randn(2, 8, 32, requires_grad=True)
    mixer = torch.randn(8, 8, 32, requires_grad=True)
    torch.library.opcheck(torch.ops.xpress.causal_mix.default, (x, mixer))


def test_opcheck_of_the_out_forms() -> None:
    rows = samples(torch.float32)["refined_logits"]
    out = torch.empty(7, 40)
    torch.library.opcheck(torch.ops.xpress.refined_logits.out, rows, {"out": out})
    outputs = {
        "tokens": torch.empty(2, 7, dtype=torch.int64),
        "passes": torch.empty(2, dtype=torch.int32),
        "full_readouts": torch.empty(2, dtype=torch.int32),
        "workspace": torch.empty(ops.jacobi_workspace(2, 8, 32, 32, 64), dtype=torch.uint8),
    }
    call = samples(torch.float32)["jacobi_refine"]
    torch.library.opcheck(torch.ops.xpress.jacobi_refine.out, call, outputs)


def test_the_out_forms_write_what_the_others_return() -> None:
    calls = samples(torch.bfloat16)
    rows = calls["refined_logits"]
    out = torch.full((7, 40), float("nan"))
    assert ops.refined_logits(*rows, out=out) is out
    assert torch.equal(out, ops.refined_logits(*rows))
    for name, (top_c, exact) in {
        "jacobi_refine": (0, False),
        "jacobi_refine, exact": (5, True),
    }.items():
        size = ops.jacobi_workspace(2, 8, 32, 32, 64, top_c, exact)
        guard = 4096  # bytes past the workspace that must stay as they are
        workspace = torch.full((size + guard,), 0xA5, dtype=torch.uint8)
        outputs = (
            torch.full((2, 7), -7),
            torch.full((2,), -7, dtype=torch.int32),
            torch.full((2,), -7, dtype=torch.int32),
        )
        torch.ops.xpress.jacobi_refine.out(
            *calls[name],
            **dict(zip(("tokens", "passes", "full_readouts"), outputs, strict=True)),
            workspace=workspace[:size],
        )
        for got, expected in zip(outputs, ops.jacobi_refine(*calls[name]), strict=True):
            assert torch.equal(got, expected)
        assert workspace[size:].eq(0xA5).all()


@pytest.mark.parametrize("B", [2, 5])
def test_gradients_of_causal_mix(B: int) -> None:
    x = torch.randn(2, B, 32, dtype=torch.float64, requires_grad=True)
    mixer = torch.randn(B, B, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.causal_mix, (x, mixer))
    # One argument alone, and a gradient that arrives strided.
    assert torch.autograd.gradcheck(lambda y: ops.causal_mix(y, mixer.detach()), x)
    assert torch.autograd.gradcheck(lambda m: ops.causal_mix(x.detach(), m), mixer)
    ops.causal_mix(x, mixer).sum().backward()
    assert mixer.grad is not None
    assert mixer.grad[torch.ones(B, B).triu(1).bool()].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_of_causal_mix_equal_the_reference_s(dtype: torch.dtype) -> None:
    def gradients(causal_mix: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        x, mixer, weight = (
            torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()
            for shape in ((3, 16, 64), (16, 16, 64), (3, 16, 64))
        )
        return list(torch.autograd.grad((causal_mix(x, mixer) * weight).sum(), (x, mixer)))

    compiled = gradients(ops.causal_mix)
    expected = gradients(backends.get("reference").causal_mix)
    plain = gradients(backends.get("plain").causal_mix)
    for name, *results in zip(("x", "mixer"), compiled, expected, plain, strict=True):
        backends.assert_close_as_torch(f"gradient of {name}", *results)


class DecoderStep(nn.Module):
    """A step of somebody's decoder: hidden states -> logits -> refined draft -> its embeddings."""

    def __init__(self, refiner: FoldedRefiner) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = refiner.config
        self.refiner = refiner
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, anchor: Tensor, predecessor: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(hidden))
        logits = self.lm_head(hidden)[:, 1:]
        tokens, passes, _ = self.refiner.refine(logits, hidden, anchor, predecessor, num_passes=7)
        drafted = nn.functional.embedding(tokens, self.lm_head.weight)
        return drafted.mean(1) + passes[:, None]


@torch.no_grad()
def test_a_decoder_step_compiles_in_one_graph() -> None:
    config = XPressConfig(vocab_size=50, hidden_size=48, rank=16, block_size=8)
    torch.manual_seed(1)
    step = DecoderStep(XPressRefiner(config).fold(torch.float32))
    compiled = torch.compile(step, fullgraph=True)
    for N in (2, 3):  # the second size makes the graph dynamic
        hidden, ids = torch.randn(N, 8, 48), torch.randint(50, (2, N))
        torch.testing.assert_close(compiled(hidden, *ids), step(hidden, *ids))


def test_training_through_causal_mix_compiles_in_one_graph() -> None:
    def loss(x: Tensor, mixer: Tensor) -> Tensor:
        return torch.tanh(ops.causal_mix(x * 2, mixer)).square().mean()

    x, mixer = torch.randn(2, 8, 32, requires_grad=True), torch.randn(8, 8, 32, requires_grad=True)
    expected = torch.autograd.grad(loss(x, mixer), (x, mixer))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x, mixer), (x, mixer))
    for got, wanted in zip(compiled, expected, strict=True):
        torch.testing.assert_close(got, wanted)
