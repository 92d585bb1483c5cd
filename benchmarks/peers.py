"""What plain torch makes of the same work: the loops that XPress's operators are compared with.

Two loops over folded weights, each batched over all N blocks:

* :class:`FullLoop` scores the whole vocabulary, one matrix product a pass for all N*(B-1) rows.
* :class:`CandidateLoop` picks C candidates per slot once, gathers their readout rows once, and
  scores those: topk, gather, einsum.

Each runs eager, compiled, or compiled with autotuned matrix products, in fp32 or bf16, with or
without an early exit (stop after a pass that changed no token). They are written to be fast, not to
be an oracle: logits are rounded where torch rounds them, candidates are chosen in tiles, ties may
fall differently. Weights are converted and laid out when a peer is built, and compilation happens
on the first calls: neither belongs in a timing.

The readout comes in three forms, because no single one is fastest everywhere (2 cores, AVX-512,
V=151936, r=256, fp32, matrix product alone):

    form      what torch is asked to do                                   N=1       N=8
    plain     addmm(base, z, readout.T)                                   38 ms     90 ms
    tiles     bmm over tiles of 128 vocabulary rows, [tiles, rows, 128]   17 ms     59 ms
    columns   the same tiles transposed, [tiles, 128, rows]               32 ms     60 ms

The argmax is taken in two steps, tile maxima first: torch's ``amax`` is vectorised and its
``argmax`` is not (0.14 ms against 1.0 ms at N=1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from benchmarks.inputs import FoldedWeights

_Result = TypeVar("_Result")

FORMS = ("plain", "tiles", "columns")
MODES = ("eager", "compiled", "autotuned")
TILE = 128  # vocabulary rows; 32 to 256 measured alike


class Latent(torch.nn.Module):
    """Everything before the readout: context once per block, latent once per pass."""

    def __init__(self, weights: FoldedWeights) -> None:
        super().__init__()
        proj_h, proj_g = weights.hidden_proj
        self.proj_h, self.proj_g = proj_h.contiguous(), proj_g.contiguous()
        self.token_table = weights.token_table
        # Only the triangle counts; what lies above the diagonal may be anything.
        below = torch.ones(weights.mixer.shape[:2], device=weights.mixer.device).tril()
        self.mixer = torch.where(below[:, :, None] > 0, weights.mixer, 0.0)
        self.gate_up, self.down = weights.mlp_gate_up, weights.mlp_down

    def mix(self, x: Tensor) -> Tensor:
        """Causal mix of [N, B, r] fp32 -> [N, B, r] fp32."""
        # einsum("kjc,njc->nkc") as a product and a sum: 4 to 8 times as fast as einsum's bmm
        return (self.mixer * x[:, None]).sum(2)

    def context(self, hidden: Tensor) -> Tensor:
        """[N, B, H] -> the token-free part of the latent, [N, B, r] fp32."""
        mean = hidden.float().mean(1, keepdim=True).to(hidden.dtype)
        projected = F.linear(hidden, self.proj_h) + F.linear(mean, self.proj_g)
        return self.mix(projected.float())

    def forward(
        self, context: Tensor, tokens: Tensor, anchor: Tensor, predecessor: Tensor
    ) -> Tensor:
        """Tokens [N, B-1] -> latents of slots 1..B-1, [N*(B-1), r] in the weight type."""
        prev = torch.cat([predecessor[:, None], anchor[:, None], tokens[:, :-1]], 1)
        c = context + self.mix(F.embedding(prev, self.token_table).float())
        # Slot 0 is mixed into the later ones but never read.
        c = c[:, 1:].reshape(-1, c.shape[-1])
        gate, up = F.linear(c.to(self.gate_up.dtype), self.gate_up).chunk(2, -1)
        return c.to(self.down.dtype) + F.linear(F.silu(gate) * up, self.down)


class Readout(torch.nn.Module):
    """Argmax over the vocabulary of ``base + readout @ z``, in one of three forms."""

    def __init__(self, readout: Tensor, form: str) -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"form={form!r}: expected one of {', '.join(FORMS)}")
        # A vocabulary that is no whole number of tiles is read as one tile.
        self.tile = TILE if readout.shape[0] % TILE == 0 else readout.shape[0]
        self.form = form
        self.readout = readout
        self.tiles = readout.view(-1, self.tile, readout.shape[1])  # [V/tile, tile, r], a view

    def lay_out(self, base_logits: Tensor) -> Tensor:
        """Base logits [N, B-1, V] in the layout that ``forward`` adds to; once per block."""
        rows = base_logits.reshape(-1, base_logits.shape[-1])
        if self.form == "plain":
            return rows
        tiled = rows.view(rows.shape[0], -1, self.tile)
        if self.form == "tiles":
            return tiled.transpose(0, 1)  # [V/tile, rows, tile], a view
        return tiled.permute(1, 2, 0).contiguous()  # [V/tile, tile, rows]

    def forward(self, z: Tensor, base: Tensor) -> Tensor:
        """z [rows, r], base from ``lay_out`` -> ids [rows]."""
        if self.form == "plain":
            logits = torch.addmm(base, z, self.readout.T)
            return self._argmax(logits.view(z.shape[0], -1, self.tile).transpose(0, 1))
        count = self.tiles.shape[0]
        if self.form == "tiles":
            left = z.expand(count, *z.shape)
            return self._argmax(torch.bmm(left, self.tiles.transpose(1, 2)).add_(base))
        right = z.T.contiguous().expand(count, z.shape[1], z.shape[0])
        logits = torch.baddbmm(base, self.tiles, right)  # [V/tile, tile, rows]
        best_tile = logits.amax(1).argmax(0)
        rows = torch.arange(z.shape[0], device=z.device)
        return logits[best_tile, :, rows].argmax(-1) + best_tile * self.tile

    def _argmax(self, logits: Tensor) -> Tensor:
        """Logits [V/tile, rows, tile] -> ids [rows], tile maxima first."""
        best_tile = logits.amax(-1).argmax(0)
        rows = torch.arange(logits.shape[1], device=logits.device)
        return logits[best_tile, rows].argmax(-1) + best_tile * self.tile


def tiled_argmax(logits: Tensor) -> Tensor:
    """Argmax of [rows, V] over V, tile maxima first."""
    if logits.shape[1] % TILE:
        return logits.argmax(-1)
    tiled = logits.view(logits.shape[0], -1, TILE)
    best_tile = tiled.amax(-1).argmax(-1)
    rows = torch.arange(logits.shape[0], device=logits.device)
    return tiled[rows, best_tile].argmax(-1) + best_tile * TILE


def tiled_topk(logits: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """Top C of [rows, V]: the C tiles with the greatest maxima hold them all, up to ties."""
    V = logits.shape[1]
    if V % TILE or V // TILE <= C:
        return torch.topk(logits, C, dim=-1, sorted=False)
    tiled = logits.view(logits.shape[0], -1, TILE)
    tiles = torch.topk(tiled.amax(-1), C, dim=-1, sorted=False).indices  # [rows, C]
    inner = tiled.gather(1, tiles[..., None].expand(-1, -1, TILE)).flatten(1)  # [rows, C*TILE]
    value, place = torch.topk(inner, C, dim=-1, sorted=False)
    return value, tiles.gather(1, place // TILE) * TILE + place % TILE


def _compile(function: Callable[..., _Result], mode: str) -> Callable[..., _Result]:
    """``torch.compile`` for a fixed shape; fails rather than fall back to eager pieces."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
    # Every peer compiles the same few methods, and dynamo counts their graphs together.
    torch._dynamo.config.recompile_limit = 64
    options: dict[str, str | int | bool | Callable[..., object]] = {
        "max_autotune": mode == "autotuned",
        "autotune_num_choices_displayed": 0,  # quiet
        "max_autotune_report_choices_stats": False,
    }
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


class _Loop(torch.nn.Module):
    """The pass loop that both peers share."""

    def __init__(self, weights: FoldedWeights, dtype: torch.dtype, mode: str) -> None:
        super().__init__()
        self.dtype = dtype
        self.weights = weights.to(dtype)
        self.latent = Latent(self.weights)
        self._prepare_block, self._step = self.prepare_block, self.step
        if mode != "eager":
            # One graph a pass; the loop stays in Python, as an early exit needs it there.
            self._prepare_block = _compile(self.prepare_block, mode)
            self._step = _compile(self.step, mode)

    def prepare_block(self, base_logits: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Once per block: seed [N, B-1], then what ``step`` takes as ``prepared``."""
        raise NotImplementedError

    def step(
        self, prepared: tuple[Tensor, ...], tokens: Tensor, ids: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One pass over all slots: tokens [N, B-1] -> tokens [N, B-1]."""
        raise NotImplementedError

    @torch.inference_mode()
    def forward(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        predecessor: Tensor,
        num_passes: int,
        early_exit: bool = False,
    ) -> Tensor:
        """Refines N blocks.

        Args:
            base_logits: [N, B-1, V] in the peer's type.
            hidden: [N, B, H] in the peer's type.
            anchor: [N] int64.
            predecessor: [N] int64.
            num_passes: Passes to run.
            early_exit: Stop after a pass that changed nothing in any block.

        Returns:
            Tokens [N, B-1] int64.
        """
        tokens, *prepared = self._prepare_block(base_logits, hidden)
        state = tuple(prepared)
        for _ in range(num_passes):
            after = self._step(state, tokens, (anchor, predecessor))
            if early_exit and torch.equal(after, tokens):
                break
            tokens = after
        return tokens


class FullLoop(_Loop):
    """The batched loop over the whole vocabulary.

    Args:
        weights: Folded weights, converted to ``dtype`` here.
        dtype: Type of weights, hidden states, base logits and logits.
        form: One of FORMS.
        mode: One of MODES.
    """

    def __init__(
        self,
        weights: FoldedWeights,
        dtype: torch.dtype = torch.float32,
        form: str = "plain",
        mode: str = "eager",
    ) -> None:
        super().__init__(weights, dtype, mode)
        self.read = Readout(self.weights.readout, form)

    def prepare_block(self, base_logits: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Seed, context and laid-out base logits."""
        rows = base_logits.reshape(-1, base_logits.shape[-1])
        seed = tiled_argmax(rows).view(base_logits.shape[:2])
        return seed, self.latent.context(hidden), self.read.lay_out(base_logits)

    def step(
        self, prepared: tuple[Tensor, ...], tokens: Tensor, ids: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Latent, one matrix product, argmax."""
        context, base = prepared
        return self.read(self.latent(context, tokens, *ids), base).view(tokens.shape)


class CandidateLoop(_Loop):
    """The batched loop over C candidates per slot.

    Args:
        weights: Folded weights, converted to ``dtype`` here.
        C: Candidates per slot.
        dtype: Type of weights, hidden states, base logits and logits.
        mode: One of MODES.
    """

    def __init__(
        self,
        weights: FoldedWeights,
        C: int,
        dtype: torch.dtype = torch.float32,
        mode: str = "eager",
    ) -> None:
        super().__init__(weights, dtype, mode)
        self.C = C

    def prepare_block(self, base_logits: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Seed, context, and the candidates' ids, base logits and readout rows."""
        rows = base_logits.reshape(-1, base_logits.shape[-1])
        base, ids = tiled_topk(rows, self.C)  # [rows, C] each
        gathered = F.embedding(ids, self.weights.readout)  # [rows, C, r]
        seed = ids.gather(1, base.argmax(-1, keepdim=True)).view(base_logits.shape[:2])
        return seed, self.latent.context(hidden), base, gathered, ids

    def step(
        self, prepared: tuple[Tensor, ...], tokens: Tensor, ids: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Latent, C inner products a slot, argmax."""
        context, base, gathered, candidates = prepared
        z = self.latent(context, tokens, *ids)
        # baddbmm and a product with a sum were slower: 134 and 81 us against 51 at N=1
        scores = torch.einsum("sr,scr->sc", z, gathered) + base
        place = scores.argmax(-1, keepdim=True)
        return candidates.gather(1, place).view(tokens.shape)


class MarkovLoop(torch.nn.Module):
    """The serial Markov head: slot by slot, `base + W_2 W_1[token before]`, and its argmax.

    Not the same method: a rival that decodes B-1 slots one after another. The token table serves
    as W_1 and the readout as W_2, which have the same sizes.

    Args:
        weights: Folded weights, converted to ``dtype`` here.
        dtype: Type of weights, base logits and logits.
    """

    def __init__(self, weights: FoldedWeights, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        converted = weights.to(dtype)
        self.w1, self.w2 = converted.token_table, converted.readout

    @torch.inference_mode()
    def forward(self, base_logits: Tensor, anchor: Tensor) -> Tensor:
        """Base logits [N, B-1, V] and anchors [N] -> tokens [N, B-1]."""
        tokens, token = [], anchor
        for k in range(base_logits.shape[1]):
            token = torch.addmm(base_logits[:, k], F.embedding(token, self.w1), self.w2.T).argmax(
                -1
            )
            tokens.append(token)
        return torch.stack(tokens, dim=1)
