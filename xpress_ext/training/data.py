"""Shards of examples as random blocks: what one training step sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass
class Answered:
    """Views into a shard: tokens [T] int64, features [T, L*d] and final [T, d] bf16."""

    tokens: Tensor
    prompt_length: int
    features: Tensor
    final: Tensor

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass
class Blocks:
    """M blocks of N sequences.

    context [N, T, L*d] fp32, padded on the right; sequence [M]; anchor [M] positions; tokens
    [M, B+1] int64: predecessor, anchor, and the B-1 tokens of the slots (0 past the end);
    valid [M, B-1] bool; final [M, B-1, d] fp32: the target's final hidden states that predict the
    slots' tokens.
    """

    context: Tensor
    sequence: Tensor
    anchor: Tensor
    tokens: Tensor
    valid: Tensor
    final: Tensor


def load_shards(paths: Sequence[Path]) -> list[Answered]:
    """All sequences of the shards, memory-mapped, so that several processes share one copy."""
    sequences = []
    for path in paths:
        shard = torch.load(path, mmap=True, weights_only=True)
        tokens = shard["tokens"].long()
        start = 0
        for length, prompt in zip(
            shard["length"].tolist(), shard["prompt_length"].tolist(), strict=True
        ):
            rows = slice(start, start + length)
            sequences.append(
                Answered(tokens[rows], prompt, shard["features"][rows], shard["final"][rows])
            )
            start += length
    return sequences


def sample_blocks(
    sequences: Sequence[Answered], count: int, block_size: int, generator: torch.Generator
) -> Blocks:
    """`count` random anchors in the answer of each sequence (fewer where it is shorter)."""
    anchors = []
    for sequence in sequences:
        # The last token of an answer has nothing after it to draft.
        places = torch.randperm(max(sequence.answer_length - 1, 1), generator=generator)[:count]
        anchors.append(sequence.prompt_length + places.sort().values)
    return blocks_at(sequences, anchors, block_size)


def blocks_at(sequences: Sequence[Answered], anchors: Sequence[Tensor], block_size: int) -> Blocks:
    """The blocks at given anchor positions of each sequence."""
    longest = max(int(a.max()) for a in anchors)
    width = sequences[0].features.shape[1]
    context = torch.zeros(len(sequences), longest, width)
    tokens, valid, final = [], [], []
    for row, (sequence, anchor) in enumerate(zip(sequences, anchors, strict=True)):
        end = int(anchor.max())
        context[row, :end] = sequence.features[:end].float()
        length = len(sequence.tokens)
        places = anchor[:, None] + torch.arange(-1, block_size)
        inside = places < length
        tokens.append(sequence.tokens[places.clamp(max=length - 1)] * inside)
        valid.append(inside[:, 2:])
        final.append(sequence.final[places[:, 1:-1].clamp(max=length - 1)].float())
    counts = torch.tensor([len(a) for a in anchors])
    return Blocks(
        context,
        torch.arange(len(sequences)).repeat_interleave(counts),
        torch.cat(list(anchors)),
        torch.cat(tokens),
        torch.cat(valid),
        torch.cat(final),
    )


def rank_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent target ids, ascending: the draft vocabulary [V] int64.

    counts [V_t]; ties go to the lower id.
    """
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def scored_ids(
    labels: Tensor, vocabulary: int, frequent: Tensor, size: int, generator: torch.Generator
) -> Tensor:
    """Draft ids that one step scores, ascending [S]: its labels, the frequent, and random others.

    labels [R] draft ids, negative where the token is outside the draft vocabulary.
    """
    chosen = torch.zeros(vocabulary, dtype=torch.bool)
    chosen[labels[labels >= 0]] = True
    chosen[frequent] = True
    missing = min(size, vocabulary) - int(chosen.sum())
    if missing > 0:
        others = (~chosen).nonzero()[:, 0]
        chosen[others[torch.randperm(len(others), generator=generator)[:missing]]] = True
    return chosen.nonzero()[:, 0]
