"""The Markov head of DSpark: a bigram bias (docs/method.md, 8)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from xpress_ext.config import check_range
from xpress_ext.heads.serial import HeadConfig, SerialHead

_INIT_STD = 0.02


@dataclass(frozen=True)
class MarkovConfig(HeadConfig):
    """Sizes of a Markov head; hidden_size is the drafter's, which the head does not read.

    Args:
        rank: r, width of the bigram's embeddings.
        others: as in `HeadConfig`.
    """

    rank: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("rank", self.rank, 1)


class MarkovHead(SerialHead):
    """`l_k = s_k + W_2 W_1[token_{k-1}]`, slot 1 from the anchor.

    Parameters carry their public names, without the prefix `markov_head.`: `markov_w1` [V_t,r] and
    `markov_w2` [V,r]. Both start from N(0, 0.02). Arguments as in `SerialHead`.
    """

    def __init__(self, config: MarkovConfig, d2t: Tensor | None = None) -> None:
        super().__init__(config, d2t)
        self.markov_w1 = nn.Embedding(config.vocab_size, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.draft_vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws both matrices from N(0, 0.02)."""
        nn.init.normal_(self.markov_w1.weight, std=_INIT_STD)
        nn.init.normal_(self.markov_w2.weight, std=_INIT_STD)

    @property
    def readout(self) -> Tensor:
        """W_2 [V,r]."""
        return self.markov_w2.weight

    def latent(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """W_1[prev] [N,B,r]; hidden [N,B,H] gives the number of blocks only."""
        self._check_inputs(hidden, prev)
        return self.markov_w1(prev)

    def step(
        self, state: Tensor | None, token: Tensor, hidden: Tensor, index: int
    ) -> tuple[None, Tensor]:
        """W_1[token] [N,r]; there is no state."""
        return None, self.markov_w1(token)
