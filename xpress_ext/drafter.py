"""DFlashDrafter: the block-diffusion drafter whose blocks XPress refines (docs/method.md, 7).

One forward pass fills a block of `B` slots. Its keys and values come from two places: the
*context*, hidden states of several target layers of every committed token before the anchor, and
the *block* itself, embeddings of the anchor and of `B-1` mask tokens, attended in both directions.
The drafter owns neither an embedding nor an LM head; it borrows the target's, frozen.
Module and parameter names are those of the public dFlash checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xpress_ext.config import is_int

Rotary = tuple[Tensor, Tensor]  # cos and sin, [N, T, 1, head_dim/2]
KeysValues = tuple[Tensor, Tensor]  # each [N, kv_heads, T, head_dim], keys rotated


def default_target_layer_ids(target_layers: int, draft_layers: int) -> list[int]:
    """Plain ids of the target layers that feed the context; `hidden_states` index is id + 1."""
    if draft_layers == 1:
        return [target_layers // 2]
    step = (target_layers - 4) / (draft_layers - 1)
    return [round(1 + i * step) for i in range(draft_layers)]


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a drafter; `from_dict` and `to_dict` use the keys of format B's config.json.

    hidden_size H must be the target's width (embedding and LM head are the target's);
    vocab_size is the target's, draft_vocab_size that of the base logits, smaller where reduced.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    qk_norm: bool = True
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "head_dim",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "num_target_layers",
            "block_size",
            "max_position_embeddings",
        ):
            _require_size(name, getattr(self, name))
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            valid = isinstance(value, float) or is_int(value)
            _require(valid and 0 < value < math.inf, name, value, "a positive number")
        _require(is_int(self.mask_token_id), "mask_token_id", self.mask_token_id, "an integer")
        _require_layer_ids(self.target_layer_ids)
        _require(2 <= self.block_size <= 32, "block_size", self.block_size, "2 to 32")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_attention_heads",
            self.num_attention_heads,
            f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
        )
        _require(
            all(0 <= i < self.num_target_layers for i in self.target_layer_ids),
            "target_layer_ids",
            list(self.target_layer_ids),
            f"ids from 0 to num_target_layers - 1 = {self.num_target_layers - 1}",
        )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"an id below vocab_size = {self.vocab_size}",
        )
        if self.draft_vocab_size is not None:
            _require(
                is_int(self.draft_vocab_size) and 1 <= self.draft_vocab_size <= self.vocab_size,
                "draft_vocab_size",
                self.draft_vocab_size,
                f"1 to vocab_size = {self.vocab_size}",
            )

    @classmethod
    def from_dict(cls, keys: Mapping[str, Any]) -> DFlashConfig:
        """Read format B's config keys; unrelated keys are ignored, unsupported values refused."""
        _refuse_unsupported(keys)
        dflash = keys.get("dflash_config", {})
        _require(isinstance(dflash, Mapping), "dflash_config", dflash, "an object")
        needed = [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
        ]
        missing = [name for name in needed if name not in keys]
        missing += [
            f"dflash_config.{name}"
            for name in ("mask_token_id", "target_layer_ids")
            if name not in dflash
        ]
        if missing:
            raise ValueError(f"the drafter's config lacks {', '.join(missing)}")
        layer_ids, heads = dflash["target_layer_ids"], keys["num_attention_heads"]
        # What the defaults below are computed from; the rest is checked by the constructor.
        _require_layer_ids(layer_ids)
        _require_size("num_attention_heads", heads)
        _require_size("hidden_size", keys["hidden_size"])
        return cls(
            hidden_size=keys["hidden_size"],
            intermediate_size=keys["intermediate_size"],
            num_hidden_layers=keys["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=keys.get("num_key_value_heads", heads),
            head_dim=keys.get("head_dim") or keys["hidden_size"] // heads,
            vocab_size=keys["vocab_size"],
            num_target_layers=keys.get("num_target_layers", max(layer_ids) + 1),
            target_layer_ids=tuple(layer_ids),
            mask_token_id=dflash["mask_token_id"],
            block_size=keys.get("block_size", 16),
            rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(keys),
            max_position_embeddings=keys.get("max_position_embeddings", 40960),
            qk_norm=dflash.get("qk_norm", True),
            draft_vocab_size=keys.get("draft_vocab_size"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of format B's config.json that describe the drafter."""
        keys: dict[str, Any] = {
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "vocab_size": self.vocab_size,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "qk_norm": self.qk_norm,
            },
        }
        if self.draft_vocab_size is not None:
            keys["draft_vocab_size"] = self.draft_vocab_size
        return keys


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value}, expected {expected}")


def _require_size(name: str, value: Any) -> None:
    valid = is_int(value) and 1 <= value < 2**31
    _require(valid, name, value, "a positive integer below 2^31")


def _require_layer_ids(value: Any) -> None:
    valid = isinstance(value, list | tuple) and len(value) > 0 and all(is_int(i) for i in value)
    _require(valid, "target_layer_ids", value, "a list of integers")


def _rope_theta(keys: Mapping[str, Any]) -> Any:
    rope = keys.get("rope_parameters") or {}
    return keys.get("rope_theta", rope.get("rope_theta", 1e6))


def _refuse_unsupported(keys: Mapping[str, Any]) -> None:
    """A checkpoint that asks for something else would load and draft nonsense."""
    rope = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(kind == "default", "rope_type", kind, "default (no scaled rotary positions)")
    _require(not keys.get("attention_bias"), "attention_bias", True, "false")
    activation = keys.get("hidden_act", "silu")
    _require(activation == "silu", "hidden_act", activation, "silu")
    others = sorted(set(keys.get("layer_types") or ()) - {"full_attention"})
    _require(not others, "layer_types", others, "full_attention only")


class DraftCache:
    """Rotated keys and values of the committed context, for each layer of the drafter.

    Buffers [N, kv_heads, capacity, head_dim] grow by doubling. A block's own rows are written
    behind the context, attended, and overwritten by the next context: `length` never counts them.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new rows [N, kv_heads, T, head_dim] at `length`; return all rows up to their end."""
        end = self.length + keys.shape[2]
        buffers = self._with_room(layer, keys, end)
        for buffer, rows in zip(buffers, (keys, values), strict=True):
            buffer[:, :, self.length : end] = rows
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def _with_room(self, layer: int, like: Tensor, end: int) -> tuple[Tensor, Tensor]:
        old = self._buffers[layer]
        if old is not None and old[0].shape[2] >= end:
            return old
        batch, heads, _, width = like.shape
        shape = (batch, heads, max(64, 2 * end), width)
        new = (like.new_empty(shape), like.new_empty(shape))
        if old is not None:
            for target, source in zip(new, old, strict=True):
                target[:, :, : self.length] = source[:, :, : self.length]
        self._buffers[layer] = new
        return new


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DFlashMLP(nn.Module):
    """SwiGLU: down( silu(gate x) * (up x) )."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashAttention(nn.Module):
    """Queries of the block over keys and values of [context ; block]."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, query, key = (
            config.hidden_size,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, key, bias=False)
        self.o_proj = nn.Linear(query, width, bias=False)
        if config.qk_norm:
            self.q_norm: nn.Module = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm: nn.Module = RMSNorm(self.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def keys_values(self, x: Tensor, rotary: Rotary) -> KeysValues:
        """x [N, T, H] -> rotated keys and values, each [N, kv_heads, T, head_dim]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = _rotate(self.k_norm(self.k_proj(x).view(shape)), rotary)
        return keys.transpose(1, 2), self.v_proj(x).view(shape).transpose(1, 2)

    def attend(
        self,
        x: Tensor,
        rotary: Rotary,
        keys: Tensor,
        values: Tensor,
        allowed: Tensor | None,
    ) -> Tensor:
        """x [N, B, H] over keys, values [N, kv_heads, S, head_dim] -> [N, B, H].

        allowed [N, 1, 1, S] bool, or None for all. The query heads that share a key head become
        extra rows of one attention, so keys and values are never repeated.
        """
        batch, block, _ = x.shape
        query = _rotate(self.q_norm(self.q_proj(x).view(batch, block, -1, self.head_dim)), rotary)
        group = self.heads // self.kv_heads
        query = query.view(batch, block, self.kv_heads, group, self.head_dim)
        query = query.permute(0, 2, 3, 1, 4).reshape(batch, self.kv_heads, -1, self.head_dim)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed)
        mixed = mixed.view(batch, self.kv_heads, group, block, self.head_dim)
        return self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(batch, block, -1))


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary positions, halves paired; x [N, T, heads, head_dim], cos and sin [N, T, 1, half]."""
    cos, sin = rotary
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class DFlashLayer(nn.Module):
    """Pre-norm attention over [context ; block], then a pre-norm SwiGLU MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        before: Rotary,
        inside: Rotary,
        join: Callable[[KeysValues, KeysValues], KeysValues],
        allowed: Tensor | None = None,
    ) -> Tensor:
        """x [N, B, H] and the context's features [N', T, H] -> [N, B, H].

        before, inside: rotary positions of context and block; join puts the context's keys and
        values and the block's own together as the block may see them.
        """
        normed, attention = self.input_layernorm(x), self.self_attn
        keys, values = join(
            attention.keys_values(context, before), attention.keys_values(normed, inside)
        )
        x = x + attention.attend(normed, inside, keys, values, allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nn.Module):
    """The drafter: context features and a masked block in, one hidden state per slot out.

    The hidden states are those after the final norm: the target's LM head turns them into base
    logits, and the refiner reads them.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Plain ids of the target layers whose outputs form the context, in order."""
        return self.config.target_layer_ids

    def new_cache(self) -> DraftCache:
        """An empty context for one batch of sequences of equal length."""
        return DraftCache(self.config.num_hidden_layers)

    def block_embeddings(self, embedding: Tensor, anchor: Tensor) -> Tensor:
        """Input of a block: the anchor's embedding, then B-1 times the mask token's.

        embedding [V_t, d]; anchor [N] -> [N, B, d].
        """
        ids = anchor.new_full((len(anchor), self.config.block_size), self.config.mask_token_id)
        ids[:, 0] = anchor
        return embedding[ids]

    def draft(
        self, block_embeds: Tensor, new_context: Tensor, cache: DraftCache, start_position: int
    ) -> Tensor:
        """Draft one block per sequence, after adding the newly committed tokens to the context.

        block_embeds [N, B, d] (`block_embeddings`); new_context [N, T_new, L*d]: the target's
        hidden states of the tokens committed since the last call, the new anchor excluded;
        start_position: the anchor's position, which is the length of the context before it.
        Returns hidden [N, B, H] after the final norm. Raises ValueError where the lengths do not
        meet.
        """
        new_tokens = new_context.shape[1]
        if start_position != cache.length + new_tokens:
            raise ValueError(
                f"start_position is {start_position}, expected {cache.length + new_tokens}: "
                f"{cache.length} tokens of context cached and {new_tokens} new ones"
            )
        block = block_embeds.shape[1]
        context = self.hidden_norm(self.fc(new_context))
        positions = torch.arange(cache.length, start_position + block, device=context.device)
        before = self._rotary(positions[None, :new_tokens])
        inside = self._rotary(positions[None, new_tokens:])
        x = block_embeds
        for index, layer in enumerate(self.layers):
            x = layer(x, context, before, inside, partial(_append, cache, index))
        cache.length += new_tokens
        return self.norm(x)

    def draft_anchors(
        self, block_embeds: Tensor, context: Tensor, sequence: Tensor, anchor: Tensor
    ) -> Tensor:
        """Draft M independent blocks of N known sequences at once: training, and evaluation.

        block_embeds [M, B, d]; context [N, T, L*d], padded on the right; sequence [M]: which of
        the N a block belongs to; anchor [M]: the anchor's position, so the block sees positions
        below it. Returns hidden [M, B, H], equal to what `draft` returns at that anchor.
        """
        features = self.hidden_norm(self.fc(context))
        blocks, block = block_embeds.shape[:2]
        columns = torch.arange(context.shape[1], device=context.device)
        before = self._rotary(columns[None])
        slots = torch.arange(block, device=context.device)
        inside = self._rotary(anchor[:, None] + slots)
        seen = columns[None] < anchor[:, None]
        allowed = torch.cat([seen, seen.new_ones(blocks, block)], 1)[:, None, None]
        join = partial(_gather, sequence)
        x = block_embeds
        for layer in self.layers:
            x = layer(x, features, before, inside, join, allowed)
        return self.norm(x)

    def _rotary(self, positions: Tensor) -> Rotary:
        """positions [N, T] -> cos and sin, [N, T, 1, head_dim/2] fp32."""
        half = self.config.head_dim // 2
        exponent = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        angles = positions[..., None, None].float() * self.config.rope_theta**-exponent
        return angles.cos(), angles.sin()


def _append(cache: DraftCache, layer: int, old: KeysValues, own: KeysValues) -> KeysValues:
    """Everything cached so far, the new context and the block behind it."""
    return cache.write(layer, torch.cat([old[0], own[0]], 2), torch.cat([old[1], own[1]], 2))


def _gather(sequence: Tensor, old: KeysValues, own: KeysValues) -> KeysValues:
    """For each block the context of its sequence, and the block behind it."""
    keys, values = (torch.cat([o[sequence], b], 2) for o, b in zip(old, own, strict=True))
    return keys, values
