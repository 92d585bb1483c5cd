"""The Domino head: a GRU over the tokens drafted so far (docs/method.md, 8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from xpress_ext.config import check_range
from xpress_ext.heads.serial import HeadConfig, SerialHead

_INIT_STD = 0.02


@dataclass(frozen=True)
class DominoConfig(HeadConfig):
    """Sizes of a Domino head; the names are those of the public configs (`dflash_config`).

    Args:
        gru_hidden_dim: G, width of the GRU's state.
        emb_dim: E, width between state and vocabulary.
        pure_draft_prefix_len: so many drafted slots at the block's start keep their base logits.
        shift_label: the shift layout, in which every slot predicts the next token, so that all B
            slots draft.
        others: as in `HeadConfig`.
    """

    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    pure_draft_prefix_len: int = 1
    shift_label: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("gru_hidden_dim", self.gru_hidden_dim, 1)
        check_range("emb_dim", self.emb_dim, 1)
        if not isinstance(self.shift_label, bool):
            raise ValueError(f"shift_label must be True or False, got {self.shift_label!r}")
        check_range("pure_draft_prefix_len", self.pure_draft_prefix_len, 0, self.num_drafted)

    @property
    def num_drafted(self) -> int:
        """D: B-1, in the shift layout B."""
        return self.block_size if self.shift_label else self.block_size - 1


class DominoHead(SerialHead):
    """`l_k = s_k + W_b silu(W_a [h_k ; state])`, the GRU's state after token_{k-1}.

    The GRU, without biases, reads the target's embeddings of anchor, token_1, ... in order. They
    are borrowed: `attach_embedding` hands them in, and they are no part of the head's parameters,
    type or device. Parameters carry their public names: `prefix_gru.weight_ih_l0` [3G,H],
    `prefix_gru.weight_hh_l0` [3G,G], `embed_proj.0.weight` W_a [E,H+G], `embed_proj.2.weight` W_b
    [V,E]. The GRU starts as torch's does, the others from N(0, 0.02). Arguments as in
    `SerialHead`.
    """

    def __init__(self, config: DominoConfig, d2t: Tensor | None = None) -> None:
        super().__init__(config, d2t)
        width, state = config.hidden_size, config.gru_hidden_dim
        self._prefix = config.pure_draft_prefix_len
        self.prefix_gru = nn.GRU(width, state, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + state, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
        )
        self._embed: Callable[[Tensor], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the GRU as torch does, and both projections from N(0, 0.02)."""
        self.prefix_gru.reset_parameters()
        for name in ("embed_proj.0.weight", "embed_proj.2.weight"):
            nn.init.normal_(self.get_parameter(name), std=_INIT_STD)

    def attach_embedding(self, embedding: Tensor | nn.Module) -> None:
        """Borrow the target's embedding: its weight [V_t,H], or the module.

        Raises:
            ValueError: the weight does not have the head's sizes.
        """
        weight = embedding if isinstance(embedding, Tensor) else embedding.weight
        assert isinstance(weight, Tensor)
        expected = (self.config.vocab_size, self.config.hidden_size)
        if weight.dim() != 2 or len(weight) < expected[0] or weight.shape[1] != expected[1]:
            raise ValueError(
                f"embedding must be [{expected[0]},{expected[1]}] for this head, "
                f"got {list(weight.shape)}"
            )
        # Behind a function, so that it becomes neither a parameter nor a submodule of the head.
        if isinstance(embedding, Tensor):
            self._embed = lambda ids: functional.embedding(ids, weight)
        else:
            self._embed = lambda ids: embedding(ids)

    @property
    def readout(self) -> Tensor:
        """W_b [V,E]."""
        return self.get_parameter("embed_proj.2.weight")

    @property
    def serial_steps(self) -> int:
        """The slots behind the pure prefix."""
        return self.config.num_drafted - self._prefix

    def latent(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """silu(W_a [h_k ; state]) [N,B,E], zeros in slots that keep their base logits.

        In the fill-in layout slot 0 drafts nothing, and the GRU begins with the anchor, prev_1.
        """
        self._check_inputs(hidden, prev)
        first = self.config.block_size - self.config.num_drafted
        states, _ = self.prefix_gru(self._embedded(prev[:, first:]))
        pure = first + self._prefix
        z = self._project(hidden[:, pure:], states[:, self._prefix :])
        return functional.pad(z, (0, 0, pure, 0))

    def step(
        self, state: Tensor | None, token: Tensor, hidden: Tensor, index: int
    ) -> tuple[Tensor, Tensor | None]:
        """The state [1,N,G] after `token`, and z [N,E] behind the pure prefix."""
        outputs, state = self.prefix_gru(self._embedded(token[:, None]), state)
        return state, None if index < self._prefix else self._project(hidden, outputs[:, 0])

    def _embedded(self, ids: Tensor) -> Tensor:
        """ids [...] -> the target's embeddings [...,H] in the parameters' type."""
        if self._embed is None:
            raise RuntimeError(
                "a DominoHead reads the target's embeddings: call attach_embedding first"
            )
        return self._embed(ids).to(self.readout.dtype)

    def _project(self, hidden: Tensor, states: Tensor) -> Tensor:
        joined = torch.cat([hidden, states], dim=-1)
        return functional.silu(functional.linear(joined, self.get_parameter("embed_proj.0.weight")))
