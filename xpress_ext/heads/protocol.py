"""What training and decoding ask of a draft head."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xpress_ext.refiner import FoldedRefiner, RefineOutput, XPressRefiner


class HeadSizes(Protocol):
    """The sizes that every head's config has."""

    @property
    def vocab_size(self) -> int:
        """V_t, the target's vocabulary."""

    @property
    def hidden_size(self) -> int:
        """H, width of the drafter's hidden states."""

    @property
    def block_size(self) -> int:
        """B, slots in a block with the anchor's."""

    @property
    def draft_vocab_size(self) -> int:
        """V, the draft's vocabulary."""

    @property
    def num_drafted(self) -> int:
        """D, the slots that a block drafts: the last D of B."""


class DraftHead(Protocol):
    """A head that is trained: `XPressRefiner`, `MarkovHead`, `DominoHead`, `NoHead`.

    All are modules. `latent` and `readout` give the correction in its low-rank form, for losses
    that score some rows or some ids of the vocabulary at a time.
    """

    d2t: Tensor | None

    @property
    def config(self) -> HeadSizes:
        """The head's sizes."""

    @property
    def readout(self) -> Tensor:
        """[V,w]."""

    def latent(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """hidden [N,B,H], prev [N,B] target ids -> [N,B,w], of which the last D slots are read."""

    def __call__(self, base_logits: Tensor, hidden: Tensor, prev: Tensor) -> Tensor:
        """base_logits [N,D,V] -> logits [N,D,V], teacher-forced by `prev`."""


class InferenceHead(Protocol):
    """A head that drafts: `FoldedRefiner`, `MarkovHead`, `DominoHead`, `NoHead`."""

    d2t: Tensor | None

    @property
    def config(self) -> HeadSizes:
        """The head's sizes."""

    def refine(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        predecessor: Tensor | None = None,
    ) -> RefineOutput:
        """base_logits [N,D,V], hidden [N,B,H], two ids [N] -> tokens [N,D], passes [N]."""


def for_inference(
    head: XPressRefiner | InferenceHead, dtype: torch.dtype = torch.bfloat16
) -> FoldedRefiner | InferenceHead:
    """The head that drafts: an XPressRefiner folded to `dtype`, any other as it is."""
    return head.fold(dtype) if isinstance(head, XPressRefiner) else head
