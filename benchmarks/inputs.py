"""Seeded inputs of known difficulty for timing the refinement loop.

How many passes a block needs depends on the data, so a latency is only worth quoting beside
inputs whose passes are known. Two kinds are made here, for any head shape, batch and dtype:

* ``worst``: pass t changes slot t and no slot below it, for t = 1 .. B-1. Every pass settles
  exactly one slot, so early exit and skipped slots help as little as they ever can.
* ``mild``: blocks settle in 2, 3 or 4 passes (the pass that finds no change counted).

How the ripple is planted. A unit vector ``u`` in the latent space carries one bit: token-table
rows of "right" tokens lean towards +u, of "wrong" tokens towards -u, and so do their readout rows.
In every block slot k has one right token y_k and one wrong token x_k; the base logit of x_k leads
by a gap smaller than the swing that the bit causes. So slot k answers y_k after a right token and
x_k after a wrong one; the seed is wrong everywhere, the anchor is right, and correctness advances
one slot a pass. Everything else (projection, mixer, MLP, all other rows) is dense random data of
the size that training starts from, kept orthogonal to u where it could blur the bit.

Both planted tokens lead the base logits, so every candidate set with C >= 2 holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

KINDS = ("worst", "mild")


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a refiner head (method.md's letters)."""

    V: int  # vocabulary
    r: int  # rank
    m: int  # MLP width
    B: int  # block size, anchor included
    H: int  # drafter width


PRESETS = {
    "qwen3-8b": HeadShape(V=151936, r=256, m=512, B=16, H=4096),
    "smollm2-135m": HeadShape(V=49152, r=64, m=128, B=16, H=576),
    "tiny": HeadShape(V=1024, r=32, m=64, B=8, H=64),
}

# The bit moves a planted token's logit by +-_SWING; the gap lies between 0 and 2 * _SWING, and so
# far from both that bf16 rounding of a logit near 20 (spacing 0.125) cannot turn a decision.
_SWING = 2.0
_GAP = 2.0
_CLOSED_GAP = 8.0  # a gap that the bit cannot cross
_TAIL = 1.2  # base logits fall by this much for each factor e of rank, as language models' do
_LEAD = 1.0  # the weaker planted token above the best other token
_DEMOTED = 6.0  # planted tokens of other slots stay this far below the best other token


@dataclass(frozen=True)
class FoldedWeights:
    """Folded refiner weights as ``jacobi_refine`` takes them (method.md 3)."""

    hidden_proj: Tensor  # [2, r, H]
    token_table: Tensor  # [V, r]
    mixer: Tensor  # [B, B, r] fp32
    mlp_gate_up: Tensor  # [2m, r]
    mlp_down: Tensor  # [r, m]
    readout: Tensor  # [V, r]

    def weights(self) -> tuple[Tensor, ...]:
        """The six weight arguments of ``jacobi_refine``, in its order."""
        return (
            self.hidden_proj,
            self.token_table,
            self.mixer,
            self.mlp_gate_up,
            self.mlp_down,
            self.readout,
        )

    def to(self, dtype: torch.dtype) -> Self:
        """The same with weights of another type; the mixer stays fp32."""
        names = ("hidden_proj", "token_table", "mlp_gate_up", "mlp_down", "readout")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


@dataclass(frozen=True)
class PlantedHead(FoldedWeights):
    """Folded weights with the planted direction, and the two pools of tokens that carry it."""

    shape: HeadShape
    wrong: Tensor  # [B-1] int64, ids that lean towards -u
    right: Tensor  # [B-1] int64, ids that lean towards +u
    anchors: Tensor  # [2] int64, ids that lean towards +u and are drafted nowhere


@dataclass(frozen=True)
class Blocks:
    """What a drafter hands over for N blocks, and the greedy answer that was planted."""

    kind: str
    base_logits: Tensor  # [N, B-1, V]
    hidden: Tensor  # [N, B, H]
    anchor: Tensor  # [N] int64
    predecessor: Tensor  # [N] int64
    answer: Tensor  # [N, B-1] int64: the sequential greedy decode
    depth: Tensor  # [N] int64: slots 1..depth are wrong in the seed, later ones right

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four data arguments of ``jacobi_refine``, in its order."""
        return self.base_logits, self.hidden, self.anchor, self.predecessor

    def first(self) -> Blocks:
        """The first block alone."""
        fields: dict[str, Any] = {k: v[:1] for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **fields)

    def to(self, dtype: torch.dtype) -> Blocks:
        """The same blocks with base logits and hidden states of another type."""
        return replace(self, base_logits=self.base_logits.to(dtype), hidden=self.hidden.to(dtype))


def planted_head(
    shape: HeadShape, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> PlantedHead:
    """Makes a head whose latent carries the planted bit.

    Args:
        shape: Sizes; V must hold the 2B planted tokens.
        dtype: Type of all weights but the mixer.
        seed: Seed of the generator; equal seeds give equal heads.

    Raises:
        ValueError: V is too small.
    """
    V, r, m, B, H = shape.V, shape.r, shape.m, shape.B, shape.H
    if V < 2 * B:
        raise ValueError(f"V={V} is too small: {2 * B} tokens are planted for B={B}")
    rng = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.empty(size).normal_(0.0, std, generator=rng)

    u = normal(r, std=1.0)
    u /= u.norm()
    pool = torch.randperm(V, generator=rng)[: 2 * B]
    wrong, right, anchors = pool.split([B - 1, B - 1, 2])

    table, readout = normal(V, r, std=0.02), normal(V, r, std=0.02)
    for rows in (table, readout):
        rows[wrong] -= _SWING**0.5 * u
        rows[torch.cat([right, anchors])] += _SWING**0.5 * u
    proj = normal(2, r, H, std=0.02 * 0.02 * r**0.5)
    proj -= u[:, None] * (u @ proj)[:, None, :]
    down = normal(r, m, std=m**-0.5)
    down -= torch.outer(u, u @ down)
    eye = torch.eye(B)[:, :, None]
    mixer = normal(B, B, r, std=0.02).mul_(torch.ones(B, B).tril()[:, :, None]) + eye
    return PlantedHead(
        shape=shape,
        hidden_proj=proj.to(dtype),
        token_table=table.to(dtype),
        mixer=mixer.contiguous(),
        mlp_gate_up=normal(2 * m, r, std=r**-0.5).to(dtype),
        mlp_down=down.to(dtype),
        readout=readout.to(dtype),
        wrong=wrong,
        right=right,
        anchors=anchors,
    )


def planted_blocks(
    head: PlantedHead,
    N: int,
    kind: str = "worst",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 1,
) -> Blocks:
    """Makes N blocks of one kind for a planted head.

    Args:
        head: From :func:`planted_head`.
        N: Blocks.
        kind: ``"worst"`` or ``"mild"``.
        dtype: Type of base logits and hidden states.
        seed: Seed of the generator.

    Raises:
        ValueError: An unknown kind, or a mild block that would not fit (B < 5).
    """
    D = head.shape.B - 1
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if kind == "mild" and D < 4:
        raise ValueError(f"B={head.shape.B}: mild blocks need B >= 5")
    rng = torch.Generator().manual_seed(seed)
    depth = torch.full((N,), D) if kind == "worst" else torch.arange(1, N + 1) % 3 + 1
    order = torch.rand(N, D, generator=rng).argsort(-1)
    wrong, right = head.wrong[order], head.right[order]  # [N, D]
    slot = torch.arange(1, D + 1)
    # Right after the ripple's last slot the gap is closed, so a right token is followed by the
    # seed's own choice, and everything behind it stays as seeded.
    gap = torch.where(slot == depth[:, None] + 1, _CLOSED_GAP, _GAP)
    answer = torch.where(slot <= depth[:, None], right, wrong)
    anchor, predecessor = head.anchors[torch.randint(2, (2, N), generator=rng)]
    return Blocks(
        kind=kind,
        base_logits=_base_logits(head, wrong, right, gap, rng).to(dtype),
        hidden=torch.empty(N, head.shape.B, head.shape.H).normal_(generator=rng).to(dtype),
        anchor=anchor,
        predecessor=predecessor,
        answer=answer,
        depth=depth,
    )


def _base_logits(
    head: PlantedHead, wrong: Tensor, right: Tensor, gap: Tensor, rng: torch.Generator
) -> Tensor:
    """Base logits [N, D, V] fp32: a bulk with a logarithmic tail, led by the planted pair."""
    N, D = wrong.shape
    V = head.shape.V
    cap = _TAIL * torch.tensor(float(V)).log()
    logits = torch.empty(N, D, V).exponential_(generator=rng).mul_(_TAIL).clamp_(max=cap)
    planted = torch.cat([head.wrong, head.right, head.anchors])
    logits[:, :, planted] = logits[:, :, planted].clamp(max=cap - _DEMOTED)
    weaker = (cap + _LEAD).expand(N, D)
    logits.scatter_(2, right[..., None], weaker[..., None])
    logits.scatter_(2, wrong[..., None], (weaker + gap)[..., None])
    return logits


def lowest_changed_slots(blocks: Blocks, one_pass: Callable[[Tensor], Tensor]) -> Tensor:
    """The lowest slot that each of B-1 passes changes, per block.

    Args:
        blocks: The inputs.
        one_pass: Maps tokens [N, B-1] to the tokens after one more pass over all slots.

    Returns:
        [N, B-1] int64, entry [n, t-1] for pass t; 0 where a pass changed nothing.
    """
    tokens = blocks.base_logits.float().argmax(-1)
    lowest = []
    for _ in range(tokens.shape[1]):
        after = one_pass(tokens)
        changed = after != tokens
        first = changed.int().argmax(-1) + 1
        lowest.append(torch.where(changed.any(-1), first, 0))
        tokens = after
    return torch.stack(lowest, dim=1)


def assert_ripple(blocks: Blocks, one_pass: Callable[[Tensor], Tensor]) -> None:
    """Asserts that pass t changes slot t first (t <= depth), and later passes change nothing.

    Raises:
        AssertionError: Some pass changed another slot first; names the block and the pass.
    """
    lowest = lowest_changed_slots(blocks, one_pass).cpu()
    slot = torch.arange(1, lowest.shape[1] + 1)
    expected = torch.where(slot <= blocks.depth.cpu()[:, None], slot, 0)
    for n, t in (lowest != expected).nonzero().tolist()[:1]:
        raise AssertionError(
            f"{blocks.kind} inputs: pass {t + 1} of block {n} changed slot {int(lowest[n, t])} "
            f"first, expected {int(expected[n, t])} (0: none)"
        )
