"""The drafter alone, in the face of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from xpress_ext.head_checks import check_logits
from xpress_ext.heads.serial import HeadConfig, SerialHead


class NoHead(SerialHead):
    """`l_k = s_k`: a correction of rank zero, without parameters.

    It also holds the offsets of a drafter's own reduced vocabulary. Arguments as in `SerialHead`.
    """

    def __init__(self, config: HeadConfig, d2t: Tensor | None = None) -> None:
        super().__init__(config, d2t)
        self.register_buffer("_readout", torch.empty(config.draft_vocab_size, 0), persistent=False)

    @property
    def readout(self) -> Tensor:
        """[V,0]."""
        return self.get_buffer("_readout")

    @property
    def serial_steps(self) -> int:
        """None: the slots are independent of each other."""
        return 0

    def latent(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """[N,B,0]."""
        self._check_inputs(hidden, prev)
        return hidden[..., :0].to(self.readout.dtype)

    def forward(self, base_logits: Tensor, hidden: Tensor, prev: Tensor) -> Tensor:
        """base_logits [N,D,V], as they are."""
        check_logits(self.config, base_logits, hidden)
        self._check_inputs(hidden, prev)
        return base_logits

    def step(
        self, state: Tensor | None, token: Tensor, hidden: Tensor, index: int
    ) -> tuple[None, None]:
        """Every slot keeps its base logits."""
        return None, None
