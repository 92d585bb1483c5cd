"""What the serial heads have in common: sizes, the teacher-forced form, and the decoding loop.

A serial head decides one slot after another, each from the token before it. Training knows all
tokens, so it computes all slots at once (`forward`); decoding walks (`decode`, `refine`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from xpress_ext.config import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE, check_int, check_range
from xpress_ext.head_checks import check_block, check_d2t, check_ids, check_logits
from xpress_ext.refiner import RefineOutput

GREEDY_BELOW = 1e-5  # a lower temperature is greedy


@dataclass(frozen=True)
class HeadConfig:
    """Sizes that every head has.

    Args:
        vocab_size: V_t, the target's vocabulary.
        hidden_size: H, width of the drafter's hidden states and of the target's embeddings.
        block_size: B, slots in a block with the anchor's, 2 to 32.
        draft_vocab_size: V, the draft's vocabulary; 0 stands for V_t.

    Raises:
        ValueError: a size is out of range; the message names it.
    """

    vocab_size: int
    hidden_size: int
    block_size: int = 16
    draft_vocab_size: int = 0

    def __post_init__(self) -> None:
        check_range("vocab_size", self.vocab_size, 1)
        check_range("hidden_size", self.hidden_size, 1)
        check_range("block_size", self.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
        check_int("draft_vocab_size", self.draft_vocab_size)
        # A frozen dataclass can only be completed through object.__setattr__.
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        check_range("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)

    @property
    def num_drafted(self) -> int:
        """D, the slots that a block drafts: the last D of B."""
        return self.block_size - 1


class DecodeOutput(NamedTuple):
    """What `SerialHead.decode` returns.

    Attributes:
        tokens: [N,D] int64 target ids.
        logits: [N,D,V] fp32 or fp64, from which each token was taken: at a temperature T a slot's
            draft distribution is `softmax(logits / T)`.
    """

    tokens: Tensor
    logits: Tensor


class SerialHead(nn.Module, ABC):
    """A head whose slot `k` reads token `k-1`: `l_k = s_k + readout z_k`.

    Subclasses give `latent` and `readout`, and `step`, the same for one slot.

    Args:
        config: the head's sizes.
        d2t: [V] int64 offsets of a reduced draft vocabulary, target id = v + d2t[v].

    Raises:
        ValueError: d2t is missing or does not map the draft's vocabulary into the target's.
    """

    d2t: Tensor | None

    def __init__(self, config: HeadConfig, d2t: Tensor | None = None) -> None:
        super().__init__()
        check_d2t(config, d2t)
        self._config = config
        self.register_buffer("d2t", d2t)

    @property
    def config(self) -> HeadConfig:
        """The head's sizes."""
        return self._config

    @property
    @abstractmethod
    def readout(self) -> Tensor:
        """[V,w]: logits are `base + latent @ readout^T`."""

    @property
    def serial_steps(self) -> int:
        """Slots of a block that the head corrects, one after another."""
        return self.config.num_drafted

    @abstractmethod
    def latent(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """All slots at once, the tokens being known.

        Args:
            hidden: [N,B,H] in the parameters' type, the drafter's last hidden states.
            prev: [N,B] int64 target ids. In the fill-in layout predecessor, anchor, token_1, ...;
                in the shift layout anchor, token_0, ....

        Returns:
            z [N,B,w] in the parameters' type; the last D slots are read.

        Raises:
            ValueError: a shape or type does not fit.
            IndexError: an id is outside the target's vocabulary (seen on the CPU only).
        """

    @abstractmethod
    def step(
        self, state: Tensor | None, token: Tensor, hidden: Tensor, index: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """One slot, the `index`-th drafted one from 0.

        Args:
            state: what the last step returned, None at first.
            token: [N] int64 target ids, the token before the slot.
            hidden: [N,H] in the parameters' type, the slot's own.

        Returns:
            The next state, and z [N,w], or None where the slot keeps its base logits.
        """

    def forward(self, base_logits: Tensor, hidden: Tensor, prev: Tensor) -> Tensor:
        """Logits of the drafted slots, teacher-forced by `prev`.

        Args:
            base_logits: [N,D,V] in the parameters' type.
            hidden: [N,B,H], as in `latent`.
            prev: [N,B], as in `latent`.

        Returns:
            logits [N,D,V].

        Raises:
            ValueError: an argument does not have the head's shapes.
        """
        check_logits(self.config, base_logits, hidden)
        z = self.latent(hidden, prev)[:, -self.config.num_drafted :]
        return base_logits + linear(z, self.readout)

    @torch.no_grad()
    def decode(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DecodeOutput:
        """Drafts slot after slot, greedily or, above a temperature of 1e-5, sampled.

        Args:
            base_logits: [N,D,V] of any floating-point type; sums are made and compared in fp32,
                or in fp64 where they come in it.
            hidden: [N,B,H] of any floating-point type.
            anchor: [N] int64 target ids.
            temperature: T, at least 0.
            generator: source of the samples, on the device of base_logits; None takes torch's own.

        Raises:
            ValueError: a shape, a type or the temperature does not fit.
            IndexError: an id is outside the target's vocabulary (seen on the CPU only).
        """
        check_logits(self.config, base_logits, hidden)
        check_block("hidden", hidden, (self.config.block_size, self.config.hidden_size))
        check_block("anchor", anchor, ())
        check_ids("anchor", anchor, self.config.vocab_size)
        if not 0.0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or a positive number, got {temperature}")
        slots = hidden[:, -self.config.num_drafted :].to(self.readout.dtype)
        wide = torch.promote_types(base_logits.dtype, torch.float32)
        logits = base_logits.to(wide, copy=True)
        token, state = anchor, None
        tokens = []
        for index in range(self.config.num_drafted):
            state, z = self.step(state, token, slots[:, index], index)
            if z is not None:
                logits[:, index] += linear(z, self.readout)
            token = self._choose(logits[:, index], temperature, generator)
            tokens.append(token)
        return DecodeOutput(torch.stack(tokens, dim=1), logits)

    def refine(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        predecessor: Tensor | None = None,
    ) -> RefineOutput:
        """The greedy draft in the form of `FoldedRefiner.refine`; the predecessor is not read.

        `passes` counts the serial steps. Arguments and exceptions as in `decode`.
        """
        tokens = self.decode(base_logits, hidden, anchor).tokens
        passes = torch.full_like(anchor, self.serial_steps, dtype=torch.int32)
        return RefineOutput(tokens, passes, torch.zeros_like(passes))

    def _choose(
        self, logits: Tensor, temperature: float, generator: torch.Generator | None
    ) -> Tensor:
        """logits [N,V] -> target ids [N]."""
        if temperature < GREEDY_BELOW:
            ids = logits.argmax(dim=-1)
        else:
            probabilities = (logits / temperature).softmax(dim=-1)
            ids = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
        return ids if self.d2t is None else ids + self.d2t[ids]

    def _check_inputs(self, hidden: Tensor, prev: Tensor) -> None:
        check_block("hidden", hidden, (self.config.block_size, self.config.hidden_size))
        check_block("prev", prev, (self.config.block_size,))
        check_ids("prev", prev, self.config.vocab_size)
        if len(prev) != len(hidden):
            raise ValueError(f"prev has N={len(prev)} blocks, expected hidden's {len(hidden)}")
