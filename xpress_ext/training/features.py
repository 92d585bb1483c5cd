"""The target's side of the training data: greedy answers in batches, and the features of them.

One lean forward pass of a Llama-shaped target over left-padded batches serves both uses. It is
about three times as fast on a CPU as one `generate` per prompt: the weights are read once for the
whole batch, and grouped queries are attended as extra query rows instead of repeating the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Example:
    """A prompt with its answer, and what the target computed on it, row for row.

    tokens [T] int64; features [T, L*d]: hidden states after the L chosen layers, concatenated;
    final [T, d]: the hidden state after the final norm, which the LM head reads.
    """

    tokens: Tensor
    prompt_length: int
    features: Tensor
    final: Tensor


@dataclass
class _State:
    """Keys and values of a running batch, [b, kv_heads, capacity, head_dim] for each layer."""

    keys: list[Tensor]
    values: list[Tensor]
    padding: Tensor  # [b] how many positions on the left hold nothing
    length: int = 0

    def keep(self, rows: Tensor) -> None:
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]
        self.padding = self.padding[rows]


@dataclass
class BatchedTarget:
    """Batched forward passes of a `LlamaForCausalLM`, with the hidden states of chosen layers.

    `layer_ids` are plain layer ids: the hidden state *after* that layer is taken.
    """

    model: Any
    layer_ids: Sequence[int]
    _layers: list[dict[str, Tensor]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        config = self.model.config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.eps = config.rms_norm_eps
        theta = config.rope_parameters["rope_theta"]
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        self.inverse_frequency = (theta**-exponent).float()
        for layer in self.model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            self._layers.append(
                {
                    "qkv": torch.cat([p.weight for p in projections]),
                    "out": attention.o_proj.weight,
                    "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
                    "down": mlp.down_proj.weight,
                    "norm1": layer.input_layernorm.weight,
                    "norm2": layer.post_attention_layernorm.weight,
                }
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.model.lm_head.weight.dtype

    def new_state(self, batch: int, capacity: int, padding: Tensor) -> _State:
        shape = (batch, self.kv_heads, capacity, self.head_dim)
        layers = len(self._layers)
        return _State(
            [torch.zeros(shape, dtype=self.dtype) for _ in range(layers)],
            [torch.zeros(shape, dtype=self.dtype) for _ in range(layers)],
            padding,
        )

    @torch.inference_mode()
    def forward(self, ids: Tensor, state: _State) -> tuple[Tensor, Tensor]:
        """ids [b, t] -> features [b, t, L*d] and final hidden states [b, t, d]; advances `state`.

        Rows of padding hold arbitrary finite values.
        """
        start, end = state.length, state.length + ids.shape[1]
        columns = torch.arange(end)
        rows = torch.arange(start, end)
        allowed = columns[None, None, :] >= state.padding[:, None, None]
        allowed = allowed & (columns[None, None, :] <= rows[None, :, None])
        allowed = allowed | (columns[None, None, :] == rows[None, :, None])  # no empty row
        positions = (rows[None] - state.padding[:, None]).clamp(min=0)
        angles = positions[..., None].float() * self.inverse_frequency
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
        x = self.model.model.embed_tokens.weight[ids]
        taken = {}
        for index, layer in enumerate(self._layers):
            x = x + self._attention(x, layer, index, state, allowed, cos, sin, start, end)
            gate, up = F.linear(self._norm(x, layer["norm2"]), layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
            if index in self.layer_ids:
                taken[index] = x
        state.length = end
        features = torch.cat([taken[index] for index in self.layer_ids], dim=-1)
        return features, self._norm(x, self.model.model.norm.weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _attention(
        self,
        x: Tensor,
        layer: dict[str, Tensor],
        index: int,
        state: _State,
        allowed: Tensor,
        cos: Tensor,
        sin: Tensor,
        start: int,
        end: int,
    ) -> Tensor:
        batch, rows, width = x.shape
        qkv = F.linear(self._norm(x, layer["norm1"]), layer["qkv"])
        qkv = qkv.view(batch, rows, -1, self.head_dim)
        heads = qkv.shape[2] - 2 * self.kv_heads
        rotated = _rotate(qkv[:, :, : heads + self.kv_heads], cos, sin)
        state.keys[index][:, :, start:end] = rotated[:, :, heads:].transpose(1, 2)
        state.values[index][:, :, start:end] = qkv[:, :, heads + self.kv_heads :].transpose(1, 2)
        group = heads // self.kv_heads
        query = rotated[:, :, :heads].view(batch, rows, self.kv_heads, group, self.head_dim)
        query = query.permute(0, 2, 3, 1, 4).reshape(batch, self.kv_heads, -1, self.head_dim)
        mask = allowed[:, None].repeat(1, 1, group, 1) if rows > 1 else allowed[:, None]
        mixed = F.scaled_dot_product_attention(
            query, state.keys[index][:, :, :end], state.values[index][:, :, :end], attn_mask=mask
        )
        mixed = mixed.view(batch, self.kv_heads, group, rows, self.head_dim)
        return F.linear(mixed.permute(0, 3, 1, 2, 4).reshape(batch, rows, width), layer["out"])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def _pad_left(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    longest = max(len(s) for s in sequences)
    padding = torch.tensor([longest - len(s) for s in sequences])
    ids = torch.tensor([[0] * (longest - len(s)) + list(s) for s in sequences])
    return ids, padding


def teacher_forced(
    target: BatchedTarget, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Example]:
    """Features of given answers: one prefill of the whole batch."""
    sequences = [list(p) + list(a) for p, a in zip(prompts, answers, strict=True)]
    ids, padding = _pad_left(sequences)
    features, final = target.forward(ids, target.new_state(len(sequences), ids.shape[1], padding))
    return [
        Example(
            torch.tensor(s),
            len(prompts[i]),
            features[i, padding[i] :].clone(),
            final[i, padding[i] :].clone(),
        )
        for i, s in enumerate(sequences)
    ]


@torch.inference_mode()
def greedy_answers(
    target: BatchedTarget,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_id: int,
) -> list[Example]:
    """Greedy answers of a batch of prompts, with the features of every position but the last.

    The features are those of the decoding steps themselves, so they cost nothing extra. The last
    token of an answer was never fed to the target: its rows are zero, and nobody reads them.
    """
    ids, padding = _pad_left(prompts)
    state = target.new_state(len(prompts), ids.shape[1] + max_new_tokens, padding)
    features, final = target.forward(ids, state)
    alive = torch.arange(len(prompts))
    tokens: list[list[int]] = [list(p) for p in prompts]
    kept_features = [[features[i, padding[i] :].clone()] for i in range(len(prompts))]
    kept_final = [[final[i, padding[i] :].clone()] for i in range(len(prompts))]
    final = final[:, -1]
    for step in range(max_new_tokens):
        chosen = target.model.lm_head(final).argmax(-1)
        for row, token in zip(alive.tolist(), chosen.tolist(), strict=True):
            tokens[row].append(token)
        going = (chosen != eos_token_id).nonzero()[:, 0]
        if step + 1 == max_new_tokens or len(going) == 0:
            break
        if len(going) < len(alive):
            alive, chosen = alive[going], chosen[going]
            state.keep(going)
        features, final = target.forward(chosen[:, None], state)
        for place, row in enumerate(alive.tolist()):
            kept_features[row].append(features[place])
            kept_final[row].append(final[place])
        final = final[:, -1]
    return [
        _example(tokens[i], len(prompts[i]), kept_features[i], kept_final[i])
        for i in range(len(prompts))
    ]


def _example(
    tokens: list[int], prompt_length: int, features: list[Tensor], final: list[Tensor]
) -> Example:
    missing = len(tokens) - sum(len(f) for f in features)
    pad_features = features[0].new_zeros(missing, features[0].shape[1])
    pad_final = final[0].new_zeros(missing, final[0].shape[1])
    return Example(
        torch.tensor(tokens),
        prompt_length,
        torch.cat([*features, pad_features]),
        torch.cat([*final, pad_final]),
    )
