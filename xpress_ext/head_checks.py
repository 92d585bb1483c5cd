"""Checks that every draft head makes of its offsets and inputs, with one wording."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xpress_ext.reference import target_ids


class Vocabularies(Protocol):
    """A config with the sizes of both vocabularies."""

    @property
    def vocab_size(self) -> int:
        """V_t, the target's."""

    @property
    def draft_vocab_size(self) -> int:
        """V, the draft's."""


class DraftSizes(Vocabularies, Protocol):
    """A config that tells the number of drafted slots too."""

    @property
    def num_drafted(self) -> int:
        """D, the slots that a block drafts."""


def check_d2t(config: Vocabularies, d2t: Tensor | None) -> None:
    """Raises ValueError unless `d2t` maps the draft's vocabulary into the target's.

    On the meta device, where there are no values, shape and type alone are checked.
    """
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ValueError(
                f"d2t is needed where draft_vocab_size={config.draft_vocab_size} is below "
                f"vocab_size={config.vocab_size}: [V] int64, target id = v + d2t[v]"
            )
        return
    if tuple(d2t.shape) != (config.draft_vocab_size,) or d2t.dtype != torch.int64:
        raise ValueError(
            f"d2t must be [{config.draft_vocab_size}] int64, "
            f"got {list(d2t.shape)} {str(d2t.dtype).removeprefix('torch.')}"
        )
    if d2t.is_meta:
        return
    ids = target_ids(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"d2t leads to ids {int(ids.min())} to {int(ids.max())}, expected "
            f"0 to {config.vocab_size - 1}"
        )


def check_block(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` is [N, *expected]."""
    if tuple(tensor.shape[1:]) != expected or tensor.dim() != len(expected) + 1:
        sizes = ",".join(["N", *(str(size) for size in expected)])
        raise ValueError(f"{name} must be [{sizes}] for this head, got {list(tensor.shape)}")


def check_logits(config: DraftSizes, base_logits: Tensor, hidden: Tensor) -> None:
    """Raises ValueError unless `base_logits` is [N,D,V], N as in `hidden` [N,...]."""
    if len(base_logits) != len(hidden):
        raise ValueError(
            f"base_logits has N={len(base_logits)} blocks, expected hidden's {len(hidden)}"
        )
    check_block("base_logits", base_logits, (config.num_drafted, config.draft_vocab_size))


def check_ids(name: str, ids: Tensor, limit: int) -> None:
    """Raises ValueError unless `ids` are int64, and IndexError for one outside 0..limit-1.

    The values are looked at on the CPU only: on a GPU the look would wait for it, and under
    torch.compile it would break the graph.
    """
    if ids.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {str(ids.dtype).removeprefix('torch.')}")
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= limit:
        raise IndexError(f"{name} has ids {low} to {high}, expected 0 <= id < {limit}")
