"""XPress in plain torch: every operator in a few lines, and the text that explains the method.

A block-diffusion drafter fills `B` slots at once, each slot blind to the others' tokens. XPress
corrects that draft: from the drafter's hidden states `h`, its logits `s` and the tokens as they
stand, it computes new logits for all slots in parallel, takes the argmax, and repeats (a Jacobi
iteration) until nothing changes. Slot 0 holds the anchor, the last token that the target has
verified; slots 1..B-1 are drafted. Everywhere `token_0 = anchor`, `prev_0 = predecessor` (the
token before the anchor) and `prev_k = token_{k-1}`.

One draft walks through this file from top to bottom (docs/method.md, sections 3 and 4)::

    xh = project_hidden(h)              A_h h_k + A_g mean(h)         once per block
    x  = causal_mix(xh)                 the context                   once per block
    c  = fuse_mix(x, prev)              x_k + sum_{j<=k} M[k,j] E[prev_j]     per pass
    z  = refiner_mlp(c)                 c + MLP(c)                            per pass
    token = readout_argmax(z, s)        argmax_v s[v] + <W_r[v], z>           per pass

Numbers. The weights are all of one type. Sums are evaluated in fp64 where that type is fp32, and
in fp32 where it has 16 bits. The input of the MLP, its hidden layer and `z` are rounded to the
weight type before the next product; `xh`, `x` and `c` are rounded to fp32; logits are compared in
fp32. A logit's bits must not depend on what is computed beside it, so `jacobi_refine` evaluates
one whole block at a time, always at the same shapes, and picks the slots that it wants.

Letters: N blocks, B slots, D = B-1 drafted slots, V draft vocabulary, V_t target vocabulary,
H hidden size, r rank, m MLP width, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from xpress_ext.config import MAX_TOP_C

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


# ------------------------------------------------------------------------------ the latent stage


def project_hidden(hidden: Tensor, hidden_proj: Tensor) -> Tensor:
    """Projects hidden states to the rank: `xh_k = A_h h_k + A_g g`, with `g = mean_k h_k`.

    `h_k` is rounded to the weight type; `g` is the mean of the `h_k` as given, over all B slots,
    and then rounded to the weight type.

    Args:
        hidden: [N,B,H] fp32, bf16 or fp16.
        hidden_proj: [2,r,H] weight type, A_h and A_g.

    Returns:
        xh [N,B,r] fp32.
    """
    weight, wide = hidden_proj.dtype, _wide(hidden_proj.dtype)
    mean = hidden.to(wide).mean(dim=1, keepdim=True).to(weight)
    a_h, a_g = hidden_proj.to(wide)
    return (hidden.to(weight).to(wide) @ a_h.T + mean.to(wide) @ a_g.T).float()


def causal_mix(x: Tensor, mixer: Tensor) -> Tensor:
    """Mixes slots causally, channel by channel: `y_k = sum_{j<=k} M[k,j] * x_j`.

    Differentiable in both arguments. The mixer above its diagonal is never read.

    Args:
        x: [N,B,r] fp32 (fp64 is taken too, and kept, to check gradients).
        mixer: [B,B,r] fp32, M[k,j,c] with channels contiguous.

    Returns:
        y [N,B,r] in the type of x.
    """
    return _mix(x.double(), mixer.double()).to(x.dtype)


def fuse_mix(context: Tensor, prev: Tensor, token_table: Tensor, mixer: Tensor) -> Tensor:
    """Adds the mixed embeddings of the previous tokens: `c_k = x_k + sum_{j<=k} M[k,j] E[prev_j]`.

    Args:
        context: [N,B,r] fp32, x.
        prev: [N,B] int64 target ids: predecessor, anchor, token_1, ..., token_{B-2}.
        token_table: [V_t,r] weight type, E.
        mixer: [B,B,r] fp32, M; never read above the diagonal.

    Returns:
        c [N,B,r] fp32.

    Raises:
        IndexError: an id in prev is outside the token table.
    """
    _check_ids("prev", prev, len(token_table), "token_table rows")
    wide = _wide(token_table.dtype)
    return (context.to(wide) + _mix(token_table[prev].to(wide), mixer.to(wide))).float()


def refiner_mlp(c: Tensor, mlp_gate_up: Tensor, mlp_down: Tensor) -> Tensor:
    """The SwiGLU transform with its residual: `z = c + W_down(silu(W_gate c) * (W_up c))`.

    The products read `c` and the hidden layer rounded to the weight type; the residual adds `c`
    as it is.

    Args:
        c: [N,B,r] fp32.
        mlp_gate_up: [2m,r] weight type, the rows of W_gate and then those of W_up.
        mlp_down: [r,m] weight type.

    Returns:
        z [N,B,r] weight type.
    """
    weight, wide = mlp_down.dtype, _wide(mlp_down.dtype)
    gate, up = (c.to(weight).to(wide) @ mlp_gate_up.to(wide).T).chunk(2, dim=-1)
    inner = (silu(gate) * up).to(weight).to(wide)
    return (c.to(wide) + inner @ mlp_down.to(wide).T).to(weight)


def _mix(x: Tensor, mixer: Tensor) -> Tensor:
    # Slices rather than a product with a masked matrix: 0 * NaN would let a later slot, or what
    # lies above the diagonal, into an earlier one.
    return torch.stack(
        [(mixer[k, : k + 1] * x[:, : k + 1]).sum(dim=1) for k in range(x.shape[1])], dim=1
    )


# ----------------------------------------------------------------------------------- the readout


def argmax_key(values: Tensor, ids: Tensor) -> Tensor:
    """One int64 per candidate whose maximum is the argmax, ties and NaN included.

    The high half holds the value's bits in ascending order, the low half the inverted vocabulary
    id, so the lowest id wins a tie. Before that -0 becomes +0, and every NaN, of either sign, the
    greatest value. This is the order of `torch.argmax`, whatever the order of the candidates.

    Args:
        values: fp32, any shape.
        ids: int64, broadcastable to it: vocabulary ids, each below 2^32.

    Returns:
        Keys, int64, in the broadcast shape.
    """
    values = torch.where(values.isnan(), torch.nan, values + 0.0)
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ascending << _ID_BITS) | (_ID_MASK - ids)


def top_candidates(base_logits: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """The C best draft ids per slot by base logit: value descending, then id ascending, NaN first.

    Args:
        base_logits: [N,D,V] fp32, bf16 or fp16.
        C: candidates per slot, from 1 to min(V, 1024).

    Returns:
        ids [N,D,C] int64 draft ids, and their logits [N,D,C] fp32 (-0 has become +0).

    Raises:
        ValueError: C is out of range.
    """
    limit = min(base_logits.shape[-1], MAX_TOP_C)
    if not 1 <= C <= limit:
        raise ValueError(f"C must be from 1 to min(V, {MAX_TOP_C}) = {limit}, got {C}")
    values = base_logits.float()
    # Keys are unique, so no sort needs to be stable.
    keys = argmax_key(values, torch.arange(values.shape[-1], device=values.device))
    ids = _ID_MASK - (keys.topk(C, dim=-1).values & _ID_MASK)
    return ids, values.gather(-1, ids) + 0.0


def refined_logits(z: Tensor, base_logits: Tensor, readout: Tensor) -> Tensor:
    """The refined logits `l = s + W_r z`, for the rows that a caller really needs.

    Args:
        z: [R,r] weight type.
        base_logits: [R,V] fp32, bf16 or fp16, s.
        readout: [V,r] weight type, W_r.

    Returns:
        logits [R,V] fp32.
    """
    wide = _wide(readout.dtype)
    return (base_logits.to(wide) + z.to(wide) @ readout.to(wide).T).float()


def readout_argmax(
    z: Tensor, base_logits: Tensor, readout: Tensor, candidates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best draft id per slot, `argmax_v s[v] + <W_r[v], z>`, over all ids or the candidates.

    Compared in fp32 by `argmax_key`: the lowest id wins a tie, the lowest NaN wins over all.

    Args:
        z: [N,D,r] weight type (slots 1..B-1).
        base_logits: [N,D,V] fp32, bf16 or fp16.
        readout: [V,r] weight type.
        candidates: [N,D,C] int64 draft ids, in any order, or None for the whole vocabulary.

    Returns:
        index [N,D] int64 draft ids, and their logits [N,D] fp32.

    Raises:
        IndexError: a candidate is outside the draft vocabulary.
    """
    num_ids = len(readout)
    # The whole vocabulary is scored even for candidates: the same shape gives the same bits.
    rows = refined_logits(z.flatten(0, 1), base_logits.flatten(0, 1), readout)
    logits = rows.view(base_logits.shape)
    if candidates is None:
        candidates = torch.arange(num_ids, device=z.device).expand(logits.shape)
    _check_ids("candidates", candidates, num_ids, "readout rows")
    best = argmax_key(logits.gather(-1, candidates), candidates).amax(dim=-1)
    index = _ID_MASK - (best & _ID_MASK)
    return index, logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def target_ids(d2t: Tensor) -> Tensor:
    """The target ids of a reduced draft vocabulary, `v + d2t[v]`.

    Args:
        d2t: [V] integer offsets.

    Returns:
        [V] int64.
    """
    return torch.arange(len(d2t), device=d2t.device) + d2t


# ------------------------------------------------------------------------------------- the loops


class _Block:
    """One block: what stays constant during its passes, and the function that a pass evaluates."""

    def __init__(
        self,
        base_logits: Tensor,  # [D,V]
        hidden: Tensor,  # [B,H]
        anchor: Tensor,  # []
        predecessor: Tensor,  # []
        hidden_proj: Tensor,
        token_table: Tensor,
        mixer: Tensor,
        mlp_gate_up: Tensor,
        mlp_down: Tensor,
        readout: Tensor,
        d2t: Tensor | None,
    ) -> None:
        self.base_logits = base_logits.unsqueeze(0)  # [1,D,V]
        self.first_ids = torch.stack([predecessor, anchor])  # [2]
        self.token_table, self.mixer = token_table, mixer
        self.mlp_gate_up, self.mlp_down, self.readout = mlp_gate_up, mlp_down, readout
        self.d2t = d2t
        self.context = causal_mix(project_hidden(hidden.unsqueeze(0), hidden_proj), mixer)

    def seed(self) -> Tensor:
        """The argmax of the base logits, [D] target ids."""
        return self.to_target(top_candidates(self.base_logits, 1)[0][0, :, 0])

    def score(self, tokens: Tensor, candidates: Tensor | None) -> Tensor:
        """All slots' new tokens, given those as they stand.

        Args:
            tokens: [D] target ids.
            candidates: [D,C] draft ids, or None for all.

        Returns:
            [D] draft ids. Slot k depends on the tokens of slots < k only.
        """
        prev = torch.cat([self.first_ids, tokens[:-1]]).unsqueeze(0)  # [1,B]
        c = fuse_mix(self.context, prev, self.token_table, self.mixer)
        z = refiner_mlp(c, self.mlp_gate_up, self.mlp_down)
        restricted = None if candidates is None else candidates.unsqueeze(0)
        return readout_argmax(z[:, 1:], self.base_logits, self.readout, restricted)[0][0]

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids to target ids: `v + d2t[v]` where the draft's vocabulary is reduced."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def jacobi_refine(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    hidden_proj: Tensor,
    token_table: Tensor,
    mixer: Tensor,
    mlp_gate_up: Tensor,
    mlp_down: Tensor,
    readout: Tensor,
    num_passes: int,
    top_c: int = 0,
    exact: bool = False,
    seed_tokens: Tensor | None = None,
    d2t: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Refines a batch of drafts by Jacobi passes (docs/method.md, section 4), greedily.

    A block starts from the argmax of its base logits, or from the caller's seeds. A pass scores
    all slots from the block as it stands. Where `f` is the lowest slot that a pass changed, the
    slots up to f are settled, for each depends on lower slots only; a pass that changed nothing,
    or settled the last slot, ends the block. So slot k is final after pass k, B-1 passes always
    reach the sequential greedy decode, and ending early equals running on.

    With `top_c`, each slot is decided among the C best ids of its base logits. With `exact` too,
    full readouts check that state and add to the candidates what was missing, until the result is
    the sequential decode over the whole vocabulary.

    Args:
        base_logits: [N,D,V] fp32, bf16 or fp16, of slots 1..B-1.
        hidden: [N,B,H] fp32, bf16 or fp16, the drafter's last hidden states, slot 0 included.
        anchor: [N] int64 target ids, the last verified token.
        predecessor: [N] int64 target ids, the token before the anchor.
        hidden_proj: [2,r,H] weight type.
        token_table: [V_t,r] weight type.
        mixer: [B,B,r] fp32, never read above the diagonal.
        mlp_gate_up: [2m,r] weight type.
        mlp_down: [r,m] weight type.
        readout: [V,r] weight type.
        num_passes: the cap K, at least 1; more than D acts as D.
        top_c: candidates per slot, up to min(V, 1024); 0 for the whole vocabulary.
        exact: prove the result over the whole vocabulary; asks for top_c >= 1, num_passes >= D.
        seed_tokens: [N,D] int64 target ids to start from, or None.
        d2t: [V] int64 offsets of a reduced draft vocabulary, target id = v + d2t[v], or None.

    Returns:
        tokens [N,D] int64 target ids; passes [N] int32, those executed, one that found no change
        included; full_readouts [N] int32, 0 unless exact.

    Raises:
        IndexError: an id is outside its table.
        ValueError: num_passes, top_c or exact is out of range, a shape does not fit, or ids are
            not int64.
        TypeError: num_passes or top_c is not an int.
    """
    num_blocks, num_drafted, num_ids = base_logits.shape
    weights = (hidden_proj, token_table, mixer, mlp_gate_up, mlp_down, readout)
    _check_loop(num_passes, top_c, exact, num_drafted, num_ids)
    _check_inputs(base_logits, hidden, anchor, predecessor, weights, d2t)
    if seed_tokens is not None:
        _check_shape("seed_tokens", seed_tokens, (num_blocks, num_drafted))
        _check_ids("seed_tokens", seed_tokens, len(token_table), "token_table rows")

    tokens = torch.empty(num_blocks, num_drafted, dtype=torch.int64, device=hidden.device)
    passes = torch.zeros(num_blocks, dtype=torch.int32, device=hidden.device)
    full_readouts = torch.zeros_like(passes)
    for n in range(num_blocks):
        block = _Block(base_logits[n], hidden[n], anchor[n], predecessor[n], *weights, d2t)
        candidates = top_candidates(base_logits[n], top_c)[0] if top_c else None
        seed = block.seed() if seed_tokens is None else seed_tokens[n]
        if exact:
            assert candidates is not None  # _check_loop asks for top_c >= 1
            tokens[n], passes[n], full_readouts[n] = _refine_exactly(block, seed, candidates)
        else:
            tokens[n], passes[n] = _iterate(block, seed, candidates, num_passes)
    return tokens, passes, full_readouts


def _iterate(
    block: _Block,
    tokens: Tensor,
    candidates: Tensor | None,
    max_passes: int | None = None,
    settled: int = 0,
) -> tuple[Tensor, int]:
    """Passes until nothing changes, all slots are settled or the cap is reached.

    Slots 1..settled are frozen. Returns the tokens [D] (target ids) and the passes executed.
    """
    passes = 0
    while settled < len(tokens) and passes != max_passes:
        scored = block.to_target(block.score(tokens, candidates))
        scored[:settled] = tokens[:settled]
        changed = (scored != tokens).nonzero()
        tokens, passes = scored, passes + 1
        if len(changed) == 0:
            break
        settled = int(changed[0]) + 1  # slots count from 1, positions in `tokens` from 0
    return tokens, passes


def _refine_exactly(block: _Block, tokens: Tensor, candidates: Tensor) -> tuple[Tensor, int, int]:
    """Exact top-C: candidate passes, proven by full readouts that each settle a slot at least.

    Returns the tokens [D] (target ids), the candidate passes and the full readouts.
    """
    proven = passes = full_readouts = 0
    while proven < len(tokens):
        tokens, executed = _iterate(block, tokens, candidates, settled=proven)
        best = block.score(tokens, None)
        passes, full_readouts = passes + executed, full_readouts + 1
        mismatch = block.to_target(best) != tokens
        # Frozen for good: a rounding difference between two readouts could otherwise loop.
        mismatch[:proven] = False
        if not mismatch.any():
            break
        tokens = torch.where(mismatch, block.to_target(best), tokens)
        # Every set grows by one column; where nothing was missing it repeats a member.
        added = torch.where(mismatch, best, candidates[:, 0])
        candidates = torch.cat([candidates, added.unsqueeze(-1)], dim=-1)
        proven = int(mismatch.nonzero()[0]) + 1
    return tokens, passes, full_readouts


def sequential_decode(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    hidden_proj: Tensor,
    token_table: Tensor,
    mixer: Tensor,
    mlp_gate_up: Tensor,
    mlp_down: Tensor,
    readout: Tensor,
    candidates: Tensor | None = None,
    d2t: Tensor | None = None,
) -> Tensor:
    """Greedy decode, one slot after another: what the Jacobi passes must arrive at.

    Args:
        candidates: [N,D,C] int64 draft ids that each slot chooses among, or None for all.
        others: as in `jacobi_refine`.

    Returns:
        tokens [N,D] int64 target ids.

    Raises:
        IndexError: an id is outside its table.
        ValueError: a shape does not fit.
    """
    weights = (hidden_proj, token_table, mixer, mlp_gate_up, mlp_down, readout)
    _check_inputs(base_logits, hidden, anchor, predecessor, weights, d2t)
    num_blocks, num_drafted, _ = base_logits.shape
    # Ids that are not decided yet are read by later slots only; any valid id will do.
    tokens = anchor.unsqueeze(-1).repeat(1, num_drafted)
    for n in range(num_blocks):
        block = _Block(base_logits[n], hidden[n], anchor[n], predecessor[n], *weights, d2t)
        restricted = None if candidates is None else candidates[n]
        for k in range(num_drafted):
            tokens[n, k] = block.to_target(block.score(tokens[n], restricted))[k]
    return tokens


# ------------------------------------------------------------------------------ types and checks


def _wide(weight: torch.dtype) -> torch.dtype:
    """The type that sums are evaluated in."""
    return torch.float64 if weight is torch.float32 else torch.float32


def _check_loop(num_passes: int, top_c: int, exact: bool, num_drafted: int, num_ids: int) -> None:
    for name, value in (("num_passes", num_passes), ("top_c", top_c)):
        if not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
    if num_passes < 1:
        raise ValueError(f"num_passes must be at least 1, got {num_passes}")
    limit = min(num_ids, MAX_TOP_C)
    if not 0 <= top_c <= limit:
        raise ValueError(
            f"top_c must be 0 (all) or from 1 to min(V, {MAX_TOP_C}) = {limit}, got {top_c}"
        )
    if exact and top_c == 0:
        raise ValueError("exact needs top_c of at least 1, got top_c=0; top_c=0 is exact already")
    if exact and num_passes < num_drafted:
        raise ValueError(
            f"exact needs num_passes of at least B-1 = {num_drafted}, got {num_passes}"
        )


def _check_inputs(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    weights: tuple[Tensor, ...],
    d2t: Tensor | None,
) -> None:
    hidden_proj, token_table, mixer, mlp_gate_up, mlp_down, readout = weights
    num_ids, rank = readout.shape
    num_slots = len(mixer)
    num_blocks = len(hidden)
    _check_shape("mixer", mixer, (num_slots, num_slots, rank))
    _check_shape("hidden_proj", hidden_proj, (2, rank, hidden_proj.shape[-1]))
    _check_shape("token_table", token_table, (len(token_table), rank))
    _check_shape("mlp_down", mlp_down, (rank, mlp_down.shape[-1]))
    _check_shape("mlp_gate_up", mlp_gate_up, (2 * mlp_down.shape[-1], rank))
    _check_shape("hidden", hidden, (num_blocks, num_slots, hidden_proj.shape[-1]))
    _check_shape("base_logits", base_logits, (num_blocks, num_slots - 1, num_ids))
    for name, ids in (("anchor", anchor), ("predecessor", predecessor)):
        _check_shape(name, ids, (num_blocks,))
        _check_ids(name, ids, len(token_table), "token_table rows")
    if d2t is not None:
        _check_int64("d2t", d2t)
        _check_shape("d2t", d2t, (num_ids,))
        _check_ids("v + d2t[v]", target_ids(d2t), len(token_table), "token_table rows")
    elif num_ids > len(token_table):
        raise ValueError(
            f"readout has {num_ids} rows, more than the {len(token_table)} of token_table"
        )


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")


def _check_int64(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {str(tensor.dtype).removeprefix('torch.')}")


def _check_ids(name: str, ids: Tensor, limit: int, what: str) -> None:
    _check_int64(name, ids)
    outside = ids[(ids < 0) | (ids >= limit)]
    if outside.numel():
        raise IndexError(
            f"{name} has the id {int(outside.flatten()[0])}, expected 0 <= id < {limit} ({what})"
        )
