"""The training objective, term by term (docs/method.md, 6).

All terms work on rows: one row is one slot of one block, `logits [R, S]` over the scored
vocabulary, `target [R, S]` the target's distribution over the same, `label [R]` the index of the
data's token among the S, `weight [R]` the slot's weight (0 for masked slots).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LossWeights:
    """Coefficients of the objective; `total_variation` counts TV = |p - p_t|_1 / 2."""

    cross_entropy: float = 0.1
    total_variation: float = 1.8
    gamma: float = 4.0


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """w_k = exp(-(k-1)/gamma) for slots k = 1..B-1: [B-1] fp32."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def valid_slots(anchor: Tensor, length: Tensor, block_size: int) -> Tensor:
    """Which slots hold a token of the data: anchor [M], length [M] -> [M, B-1] bool.

    Slot k stands at position anchor + k; slots past the sequence's end are masked, and with them
    all later ones.
    """
    slots = torch.arange(1, block_size, device=anchor.device)
    return anchor[:, None] + slots < length[:, None]


def total_variation(probabilities: Tensor, target: Tensor) -> Tensor:
    """TV(p, p_t) = 1/2 |p - p_t|_1, which is 1 - the chance of acceptance: [R, S] -> [R]."""
    return 0.5 * (probabilities - target).abs().sum(-1)


def distribution_loss(
    logits: Tensor, label: Tensor, target: Tensor, weight: Tensor, weights: LossWeights
) -> Tensor:
    """loss(p) = a_ce CE(token of the data) + a_tv TV(p, p_t), averaged by the slots' weights."""
    log_probabilities = F.log_softmax(logits, dim=-1)
    cross_entropy = -log_probabilities.gather(1, label[:, None])[:, 0]
    variation = total_variation(log_probabilities.exp(), target)
    per_row = weights.cross_entropy * cross_entropy + weights.total_variation * variation
    return (weight * per_row).sum() / weight.sum().clamp(min=1e-6)


def base_coefficient(progress: float, first: float = 0.6, last: float = 0.2) -> float:
    """lambda, falling linearly over the joint training; progress from 0 to 1."""
    return first + (last - first) * min(max(progress, 0.0), 1.0)


def fed_back(prev: Tensor, tokens: Tensor) -> Tensor:
    """The refiner's input when it reads its own block: prev [M, B], tokens [M, B-1] -> [M, B].

    The predecessor and the anchor are known; prev_k = token_{k-1} from slot 2 on.
    """
    return torch.cat([prev[:, :2], tokens[:, :-1]], dim=1)


def objective(
    refined: Tensor, base: Tensor, consistency: list[Tensor], lambda_base: float, beta: float
) -> Tensor:
    """loss(p_r) + lambda loss(p_b) + beta * mean over the rounds fed with own tokens."""
    total = refined + lambda_base * base
    if consistency:
        total = total + beta * torch.stack(consistency).mean()
    return total
