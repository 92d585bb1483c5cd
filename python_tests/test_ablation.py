"""XPress without one of its parts: what is switched off computes nothing, learns nothing, folds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_refiner import random_inputs, sequential_decode
from torch import Tensor, nn

from xpress_ext.config import PARTS, XPressConfig
from xpress_ext.refiner import XPressRefiner

CONFIG = XPressConfig(vocab_size=41, hidden_size=24, rank=8, block_size=6)
WITHOUT = [(part,) for part in PARTS] + [("hidden", "mixer", "mlp")]
each_ablation = pytest.mark.parametrize("parts", WITHOUT, ids="-".join)


def without(parts: tuple[str, ...], seed: int = 0) -> XPressRefiner:
    """A head in fp64 whose learning parameters are random and of order one."""
    switches = {f"use_{part}": False for part in parts}
    refiner = XPressRefiner(dataclasses.replace(CONFIG, **switches)).double()
    torch.manual_seed(seed)
    for weight in refiner.parameters():
        if weight.requires_grad:
            fan_in = weight.shape[1] if weight.dim() == 2 else 4
            nn.init.normal_(weight, std=fan_in**-0.5)
            weight.data = weight.data.float().double()  # so that fp32 holds them exactly
    return refiner


def previous(anchor: Tensor, predecessor: Tensor, tokens: Tensor) -> Tensor:
    return torch.cat([predecessor[:, None], anchor[:, None], tokens[:, :-1]], 1)


@each_ablation
def test_latents_are_those_of_the_formula_without_the_part(parts: tuple[str, ...]) -> None:
    head = without(parts)
    _, hidden, anchor, predecessor, tokens = random_inputs(CONFIG)
    hidden, prev = hidden.double(), previous(anchor, predecessor, tokens)
    w_h, w_g, w_e = head.in_proj.weight.split(CONFIG.rank, dim=1)
    a = head.w1.weight[prev] @ w_e.T
    if "hidden" not in parts:
        a = a + hidden @ head.down_h.weight.T @ w_h.T
    if "hidden" not in parts and "mean" not in parts:
        a = a + hidden.mean(1, keepdim=True) @ head.down_g.weight.T @ w_g.T
    c = a if "mixer" in parts else head.mix(a)
    z = c if "mlp" in parts else head.mlp(c)
    torch.testing.assert_close(head.latent(hidden, prev), z, rtol=1e-12, atol=1e-12)


@each_ablation
@pytest.mark.parametrize("backend", ["ops", "reference"])
def test_the_fold_of_an_ablated_head_decodes_like_the_head(parts, backend) -> None:
    for seed in range(3):
        head = without(parts, seed)
        inputs = base_logits, hidden, anchor, predecessor, _ = random_inputs(CONFIG, seed=seed)
        expected, gap = sequential_decode(head, inputs)
        assert gap > 1e-4, "choose another seed: a near-tie would decide"
        tokens = head.fold(torch.float32).refine(
            base_logits, hidden, anchor, predecessor, num_passes=5, backend=backend
        )
        assert torch.equal(tokens.tokens, expected)


@each_ablation
def test_what_is_left_out_does_not_learn(parts: tuple[str, ...]) -> None:
    head = without(parts)
    base_logits, hidden, anchor, predecessor, tokens = random_inputs(CONFIG)
    prev = previous(anchor, predecessor, tokens)
    head(base_logits.double(), hidden.double(), prev).logsumexp(-1).sum().backward()
    left_out = set(head.parameters_left_out())
    assert left_out
    for name, weight in head.named_parameters():
        assert weight.requires_grad == (name not in left_out), name
        if name in left_out:
            assert weight.grad is None
            assert not weight.any()
        else:
            assert weight.grad.any(), name


def test_nothing_is_left_out_by_default() -> None:
    assert CONFIG.left_out == ()
    assert all(weight.requires_grad for weight in XPressRefiner(CONFIG).parameters())
