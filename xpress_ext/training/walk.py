"""Acceptance lengths without decoding: drafts at every anchor of a known greedy answer.

Greedy verification accepts a draft as far as it equals the target's own greedy answer. With that
answer known, the blocks of all anchors can be drafted at once, and the walk that decoding would
take is read off them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xpress_ext.drafter import DFlashDrafter
from xpress_ext.refiner import XPressRefiner

# base_logits [A, B-1, V], hidden [A, B, H], anchor [A], predecessor [A] -> target ids [A, B-1]
Refine = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def drafter_alone(d2t: Tensor | None) -> Refine:
    """The argmax of the base logits, as target ids."""

    def refine(base_logits: Tensor, hidden: Tensor, anchor: Tensor, predecessor: Tensor) -> Tensor:
        tokens = base_logits.argmax(-1)
        return tokens if d2t is None else tokens + d2t[tokens]

    return refine


def refined_while_training(refiner: XPressRefiner, passes: int) -> Refine:
    """`passes` Jacobi passes of the unfolded refiner: every slot in each, no early exit."""

    def refine(base_logits: Tensor, hidden: Tensor, anchor: Tensor, predecessor: Tensor) -> Tensor:
        to_target = drafter_alone(refiner.d2t)
        tokens = to_target(base_logits, hidden, anchor, predecessor)
        known = torch.stack([predecessor, anchor], 1)
        for _ in range(passes):
            prev = torch.cat([known, tokens[:, :-1]], 1)
            logits = refiner(base_logits, hidden, prev)
            tokens = to_target(logits, hidden, anchor, predecessor)
        return tokens

    return refine


@torch.no_grad()
def draft_everywhere(
    drafter: DFlashDrafter,
    embedding: Tensor,
    head: Tensor,
    tokens: Tensor,
    features: Tensor,
    anchors: Tensor,
    refiners: Sequence[Refine],
    chunk: int = 64,
) -> list[Tensor]:
    """Drafts of each refiner at each anchor position: a list of [A, B-1] target ids.

    embedding [V_t, d]; head [V, d]: the LM head's rows of the draft vocabulary; tokens [T];
    features [T, L*d]; anchors [A] positions, each at least 1.
    """
    drafts: list[list[Tensor]] = [[] for _ in refiners]
    for places in anchors.split(chunk):
        context = features[None, : int(places.max())]
        ids, before = tokens[places], tokens[places - 1]
        blocks = drafter.block_embeddings(embedding, ids)
        hidden = drafter.draft_anchors(blocks, context, torch.zeros_like(places), places)
        base_logits = hidden[:, 1:] @ head.T
        for made, refine in zip(drafts, refiners, strict=True):
            made.append(refine(base_logits, hidden, ids, before))
    return [torch.cat(made) for made in drafts]


def acceptance_lengths(tokens: Tensor, anchors: Tensor, drafts: Tensor) -> list[int]:
    """Tokens committed by each verification step, the bonus token counted, from the first anchor.

    tokens [T]: prompt and greedy answer; anchors [A]: consecutive positions up to T-2;
    drafts [A, B-1]. A draft that reaches over the end counts up to the end.
    """
    first, last = int(anchors[0]), len(tokens) - 1
    slots = anchors[:, None] + torch.arange(1, drafts.shape[1] + 1)
    right = (slots <= last) & (drafts == tokens[slots.clamp(max=last)])
    accepted = right.long().cumprod(1).sum(1)
    lengths, place = [], first
    while place < last:
        step = min(int(accepted[place - first]) + 1, last - place)
        lengths.append(step)
        place += step
    return lengths
