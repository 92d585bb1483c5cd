"""The XPress head as modules: `XPressRefiner` to train, `FoldedRefiner` to draft with.

Everything in the head up to its causal mix is linear, so training's small matrices fold once per
checkpoint into two (docs/method.md, sections 2 and 3). The folded head is what the operators take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from xpress_ext import reference
from xpress_ext.config import CHANNEL_MULTIPLE, XPressConfig
from xpress_ext.head_checks import check_block, check_d2t, check_ids, check_logits

_INIT_STD = 0.02
_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PART_PARAMETERS = {
    "hidden": ("down_h.weight", "down_g.weight"),
    "mean": ("down_g.weight",),
    "mixer": ("mix.L",),
    "mlp": ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
}


class RefineOutput(NamedTuple):
    """What `FoldedRefiner.refine` returns.

    Attributes:
        tokens: [N,B-1] int64 target ids of slots 1..B-1.
        passes: [N] int32, the passes executed, one that found no change included.
        full_readouts: [N] int32, full readouts of exact top-C; 0 unless exact.
    """

    tokens: Tensor
    passes: Tensor
    full_readouts: Tensor


class CausalMixer(nn.Module):
    """Residual causal mix over slots, per channel: `c_k = a_k + sum_{j<=k} L[:,k,j] * a_j`."""

    def __init__(self, config: XPressConfig) -> None:
        super().__init__()
        self.L = nn.Parameter(torch.zeros(config.rank, config.block_size, config.block_size))

    def forward(self, a: Tensor) -> Tensor:
        """a [N,B,r] -> c [N,B,r], in the type of `a`."""
        return a + torch.einsum("ckj,njc->nkc", self.L.tril(), a)


class RefinerMLP(nn.Module):
    """SwiGLU r -> m -> r with its residual: `z = c + W_down(silu(W_gate c) * (W_up c))`."""

    def __init__(self, config: XPressConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.rank, config.mlp_hidden, bias=False)
        self.up_proj = nn.Linear(config.rank, config.mlp_hidden, bias=False)
        self.down_proj = nn.Linear(config.mlp_hidden, config.rank, bias=False)

    def forward(self, c: Tensor) -> Tensor:
        """c [N,B,r] -> z [N,B,r], in the type of `c`."""
        return c + self.down_proj(silu(self.gate_proj(c)) * self.up_proj(c))


class XPressRefiner(nn.Module):
    """The head unfolded and trainable (docs/method.md, section 2).

    Linear and embedding weights start from N(0, 0.02), the mixer from zeros. Parameters carry the
    names of the serving format, without its `xpress_head.` prefix. Those of the parts that the
    config switches off are zeros and do not learn.

    Args:
        config: the head's sizes.
        d2t: [V] int64 offsets of a reduced draft vocabulary, target id = v + d2t[v]. Needed where
            config.draft_vocab_size < config.vocab_size.

    Raises:
        ValueError: d2t is missing, has another length than the draft vocabulary, or leads to ids
            outside the token table.
    """

    d2t: Tensor | None

    def __init__(self, config: XPressConfig, d2t: Tensor | None = None) -> None:
        super().__init__()
        check_d2t(config, d2t)
        self.config = config
        rank = config.rank
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = CausalMixer(config)
        self.mlp = RefinerMLP(config)
        self.w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", d2t)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every linear and embedding weight from N(0, 0.02) and zeros the mixer.

        What the config switches off becomes zeros that do not learn.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)
        nn.init.zeros_(self.mix.L)
        for name in self.parameters_left_out():
            nn.init.zeros_(self.get_parameter(name).requires_grad_(False))

    def parameters_left_out(self) -> tuple[str, ...]:
        """Names of the parameters that belong to the parts that the config switches off."""
        names = (name for part in self.config.left_out for name in _PART_PARAMETERS[part])
        return tuple(dict.fromkeys(names))

    @property
    def readout(self) -> Tensor:
        """W_r [V,r]: logits are `base + latent @ readout^T`."""
        return self.w2.weight

    def latent(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """Fuses, mixes and transforms: the latent that the readout turns into logits.

        Args:
            hidden: [N,B,H] in the parameters' type, the drafter's last hidden states.
            prev: [N,B] int64 target ids: predecessor, anchor, token_1, ..., token_{B-2}.

        Returns:
            z [N,B,r] in the parameters' type.

        Raises:
            ValueError: hidden or prev does not have the head's shapes, or prev another type.
            IndexError: an id in prev is outside the token table (seen on the CPU only: on a GPU
                the look would wait for it).
        """
        check_block("hidden", hidden, (self.config.block_size, self.config.hidden_size))
        check_block("prev", prev, (self.config.block_size,))
        check_ids("prev", prev, self.config.vocab_size)
        h = self.down_h(hidden)
        g = self.down_g(hidden.mean(dim=1, keepdim=True)).expand_as(h)
        fused = self.in_proj(torch.cat([h, g, self.w1(prev)], dim=-1))
        return self.mlp(self.mix(fused))

    def forward(self, base_logits: Tensor, hidden: Tensor, prev: Tensor) -> Tensor:
        """Refined logits of slots 1..B-1, teacher-forced by `prev`: `l_k = s_k + W_r z_k`.

        Args:
            base_logits: [N,B-1,V] in the parameters' type, slots 1..B-1.
            hidden: [N,B,H], as in `latent`.
            prev: [N,B], as in `latent`.

        Returns:
            logits [N,B-1,V].

        Raises:
            ValueError: an argument does not have the head's shapes.
        """
        check_logits(self.config, base_logits, hidden)
        return base_logits + self.w2(self.latent(hidden, prev)[:, 1:])

    @torch.no_grad()
    def fold(self, dtype: torch.dtype = torch.bfloat16) -> FoldedRefiner:
        """Folds the linear part in fp64, rounds each result once, and pads it to the operators.

        Args:
            dtype: the weight type: fp32, bf16 or fp16. The mixer is fp32 always.

        Returns:
            The head for inference, on the same device.

        Raises:
            ValueError: another type.
        """
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
        rank = self.config.rank
        w_h, w_g, w_e = self.in_proj.weight.double().split(rank, dim=1)
        hidden_proj = torch.stack(
            [w_h @ self.down_h.weight.double(), w_g @ self.down_g.weight.double()]
        )
        mixer = self.mix.L.double().tril().permute(1, 2, 0)
        identity = torch.eye(self.config.block_size, dtype=mixer.dtype, device=mixer.device)
        r, m = _padding(rank), _padding(self.config.mlp_hidden)
        gate, up = self.mlp.gate_proj.weight, self.mlp.up_proj.weight
        return FoldedRefiner(
            self.config,
            hidden_proj=pad(hidden_proj, (0, _padding(self.config.hidden_size), 0, r)).to(dtype),
            token_table=pad(self.w1.weight.double() @ w_e.T, (0, r)).to(dtype),
            mixer=pad(mixer + identity.unsqueeze(-1), (0, r)).float().contiguous(),
            mlp_gate_up=torch.cat([pad(gate, (0, r, 0, m)), pad(up, (0, r, 0, m))]).to(dtype),
            mlp_down=pad(self.mlp.down_proj.weight, (0, m, 0, r)).to(dtype),
            readout=pad(self.w2.weight, (0, r)).to(dtype),
            d2t=None if self.d2t is None else self.d2t.clone(),
        )


class FoldedRefiner(nn.Module):
    """The head folded for inference (docs/method.md, section 3); made by `XPressRefiner.fold`.

    The buffers hold the operators' arguments, with r, H and m padded with zeros to multiples of
    32. Choose their type in `fold`: casting this module would cast the mixer too, which stays
    fp32.

    Args:
        config: the head's sizes, before padding, and its defaults for `refine`.
        hidden_proj: [2,r,H] weight type.
        token_table: [V_t,r] weight type.
        mixer: [B,B,r] fp32.
        mlp_gate_up: [2m,r] weight type, gate rows first.
        mlp_down: [r,m] weight type.
        readout: [V,r] weight type.
        d2t: [V] int64 offsets of a reduced draft vocabulary, or None.

    Raises:
        ValueError: a weight or d2t does not have the shape or the type that belongs to the config.
    """

    hidden_proj: Tensor
    token_table: Tensor
    mixer: Tensor
    mlp_gate_up: Tensor
    mlp_down: Tensor
    readout: Tensor
    d2t: Tensor | None

    def __init__(
        self,
        config: XPressConfig,
        *,
        hidden_proj: Tensor,
        token_table: Tensor,
        mixer: Tensor,
        mlp_gate_up: Tensor,
        mlp_down: Tensor,
        readout: Tensor,
        d2t: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_d2t(config, d2t)
        self.config = config
        _check_weights(
            config,
            hidden_proj=hidden_proj,
            token_table=token_table,
            mixer=mixer,
            mlp_gate_up=mlp_gate_up,
            mlp_down=mlp_down,
            readout=readout,
        )
        self.register_buffer("hidden_proj", hidden_proj)
        self.register_buffer("token_table", token_table)
        self.register_buffer("mixer", mixer)
        self.register_buffer("mlp_gate_up", mlp_gate_up)
        self.register_buffer("mlp_down", mlp_down)
        self.register_buffer("readout", readout)
        self.register_buffer("d2t", d2t)

    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The six weights in the order in which the operators take them."""
        return (
            self.hidden_proj,
            self.token_table,
            self.mixer,
            self.mlp_gate_up,
            self.mlp_down,
            self.readout,
        )

    def pad_hidden(self, hidden: Tensor) -> Tensor:
        """hidden [N,B,H] with zeros up to the width that `hidden_proj` reads.

        Raises:
            ValueError: hidden does not have the head's block size or width.
        """
        if hidden.dim() == 3 and hidden.shape[1] != self.config.block_size:
            raise ValueError(
                f"hidden has {hidden.shape[1]} slots a block, but the mixer was trained for "
                f"block_size={self.config.block_size}; draft blocks of that size"
            )
        check_block("hidden", hidden, (self.config.block_size, self.config.hidden_size))
        missing = self.hidden_proj.shape[-1] - hidden.shape[-1]
        return pad(hidden, (0, missing)) if missing else hidden

    @torch.no_grad()
    def refine(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        predecessor: Tensor | None = None,
        num_passes: int | None = None,
        top_c: int | None = None,
        exact: bool = False,
        seed_tokens: Tensor | None = None,
        backend: str = "ops",
    ) -> RefineOutput:
        """Refines a batch of drafts, greedily (docs/method.md, section 4).

        Args:
            base_logits: [N,B-1,V] fp32, bf16 or fp16, of slots 1..B-1. A holder of [N,B,V] logits
                passes `logits[:, 1:]`.
            hidden: [N,B,H] fp32, bf16 or fp16, slot 0 included.
            anchor: [N] int64 target ids, the last verified token.
            predecessor: [N] int64 target ids, the token before it. Without it the anchor stands
                in, which changes the draft a little; pass the true one where it is known.
            num_passes: the cap on passes; None for the config's, or for B-1 if exact.
            top_c: candidates per slot, 0 for the whole vocabulary; None for the config's.
            exact: prove the result of top_c candidates over the whole vocabulary.
            seed_tokens: [N,B-1] int64 target ids to start from; None for the argmax of
                base_logits.
            backend: "ops" for the compiled operators, "reference" for plain torch.

        Returns:
            RefineOutput(tokens [N,B-1] int64 target ids, passes [N], full_readouts [N] int32).

        Raises:
            ValueError: a shape, type or device does not fit, or an option is out of range.
            IndexError: an id is outside its table.
        """
        config = self.config
        if self.mixer.dtype != torch.float32:
            raise ValueError(
                f"the mixer must stay float32, got {self.mixer.dtype}: do not cast a "
                "FoldedRefiner, fold(dtype) gives its weights a type"
            )
        check_block("base_logits", base_logits, (config.num_drafted, config.draft_vocab_size))
        if num_passes is None:
            num_passes = config.num_drafted if exact else config.num_passes
        output = _backend(backend)(
            base_logits,
            self.pad_hidden(hidden),
            anchor,
            anchor if predecessor is None else predecessor,
            *self.weights(),
            num_passes,
            config.top_c if top_c is None else top_c,
            exact,
            seed_tokens,
            self.d2t,
        )
        return RefineOutput(*output)


def _backend(name: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`jacobi_refine` of that backend."""
    if name == "reference":
        return reference.jacobi_refine
    if name == "ops":
        # Imported late: folding, training and the reference need no compiled library.
        from xpress_ext import ops

        return ops.jacobi_refine
    raise ValueError(f'backend must be "ops" or "reference", got {name!r}')


def _padding(size: int) -> int:
    """What is missing to the next multiple that the operators take."""
    return -size % CHANNEL_MULTIPLE


def _check_weights(config: XPressConfig, **weights: Tensor) -> None:
    r, H, m = (n + _padding(n) for n in (config.rank, config.hidden_size, config.mlp_hidden))
    B = config.block_size
    shapes = {
        "hidden_proj": (2, r, H),
        "token_table": (config.vocab_size, r),
        "mixer": (B, B, r),
        "mlp_gate_up": (2 * m, r),
        "mlp_down": (r, m),
        "readout": (config.draft_vocab_size, r),
    }
    weight_type = weights["readout"].dtype
    if weight_type not in _WEIGHT_TYPES:
        raise ValueError(f"readout must be float32, bfloat16 or float16, got {weight_type}")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} for this config, "
                f"got {list(weights[name].shape)}"
            )
        dtype = torch.float32 if name == "mixer" else weight_type
        if weights[name].dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {weights[name].dtype}")
