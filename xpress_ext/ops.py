"""Typed functions over ``torch.ops.xpress.*``: shapes, dtypes, fake implementations, autograd.

Semantics are in :mod:`xpress_ext.reference`, under the same names. Letters: N blocks, B slots in a
block, D = B-1 drafted slots, V draft vocabulary, V_t target vocabulary, H hidden size, r rank, m
MLP width, C candidates. Weights (``hidden_proj``, ``token_table``, ``mlp_*``, ``readout``) are all
of one dtype, fp32, bf16 or fp16, contiguous and 16-byte aligned; the mixer is fp32; hidden states
and base logits are fp32, bf16 or fp16 whatever the weights, with any outer strides and an innermost
stride of 1, so ``logits[:, 1:]`` of [N,B,V] logits is taken as it is. r is a multiple of 32 up to
512, H and m multiples of 32, B from 2 to 32. All tensors of a call are on one device: the CPU, or
a GPU where the library was built with CUDA operators (``xpress info`` tells).

Bad arguments raise ``ValueError``, a build without CUDA operators and failures of CUDA
``RuntimeError``; the message names the argument, its value and what was expected.

Ids outside their table raise ``IndexError`` on the CPU. On a GPU nothing is waited for, so a call
can be captured in a CUDA graph, and ids are not looked at before the launch: a block with such an
id gets the results named below, and nothing is read out of bounds. With ``XPRESS_CHECK=1`` in the
environment a call on a GPU checks its ids first, raises as on the CPU, and waits for its own end,
so that it also raises what CUDA reports of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xpress_ext._library import load_library

load_library()
_xpress = torch.ops.xpress


def project_hidden(hidden: Tensor, hidden_proj: Tensor) -> Tensor:
    """Projects hidden states to the rank, ``A_h h_k + A_g mean(h)``.

    Args:
        hidden: [N,B,H] fp32, bf16 or fp16.
        hidden_proj: [2,r,H] weight dtype, A_h and A_g.

    Returns:
        [N,B,r] fp32.
    """
    return _xpress.project_hidden(hidden, hidden_proj)


def causal_mix(x: Tensor, mixer: Tensor) -> Tensor:
    """Mixes slots causally per channel, ``y_k = sum_{j<=k} M[k,j] * x_j``. Differentiable in both.

    Args:
        x: [N,B,r] fp32 (fp64 is taken too, to check gradients).
        mixer: [B,B,r] in the dtype of x, (k, j, channel); never read above the diagonal.

    Returns:
        [N,B,r] in the dtype of x.
    """
    return _xpress.causal_mix(x, mixer)


def fuse_mix(context: Tensor, prev: Tensor, token_table: Tensor, mixer: Tensor) -> Tensor:
    """Adds the mixed embeddings of the previous tokens, ``x_k + sum_{j<=k} M[k,j] E[prev_j]``.

    Args:
        context: [N,B,r] fp32.
        prev: [N,B] int64 target ids: predecessor, anchor, token_1, ..., token_{B-2}.
        token_table: [V_t,r] weight dtype.
        mixer: [B,B,r] fp32.

    Returns:
        c [N,B,r] fp32. NaN in a block with an id outside [0,V_t), on a GPU.
    """
    return _xpress.fuse_mix(context, prev, token_table, mixer)


def refiner_mlp(c: Tensor, mlp_gate_up: Tensor, mlp_down: Tensor) -> Tensor:
    """SwiGLU with a residual, ``c + W_down(silu(W_gate c) * (W_up c))``.

    Args:
        c: [N,B,r] fp32.
        mlp_gate_up: [2m,r] weight dtype, gate rows first.
        mlp_down: [r,m] weight dtype.

    Returns:
        z [N,B,r] weight dtype.
    """
    return _xpress.refiner_mlp(c, mlp_gate_up, mlp_down)


def top_candidates(base_logits: Tensor, C: int) -> tuple[Tensor, Tensor]:
    """The C best ids per slot: value descending, then id ascending, NaN first.

    Args:
        base_logits: [N,D,V] fp32, bf16 or fp16.
        C: from 1 to min(V, 1024).

    Returns:
        ids [N,D,C] int64 draft ids and their logits [N,D,C] fp32 (-0 has become +0).
    """
    return _xpress.top_candidates(base_logits, C)


def readout_argmax(
    z: Tensor, base_logits: Tensor, readout: Tensor, candidates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The argmax of ``s + W_r z`` per slot; the lowest id wins a tie, NaN is greatest.

    Args:
        z: [N,D,r] weight dtype.
        base_logits: [N,D,V] fp32, bf16 or fp16.
        readout: [V,r] weight dtype.
        candidates: [N,D,C] int64 draft ids to choose among, or None for all.

    Returns:
        index [N,D] int64 draft ids and value [N,D] fp32, the logits there (-0 has become +0). -1
        and NaN in a slot with a candidate outside [0,V), on a GPU.
    """
    return _xpress.readout_argmax(z, base_logits, readout, candidates)


def refined_logits(
    z: Tensor, base_logits: Tensor, readout: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """``s + W_r z``, for the rows that a caller really needs.

    Args:
        z: [R,r] weight dtype.
        base_logits: [R,V] fp32, bf16 or fp16.
        readout: [V,r] weight dtype.
        out: [R,V] fp32 to write to, or None.

    Returns:
        logits [R,V] fp32.
    """
    if out is None:
        return _xpress.refined_logits(z, base_logits, readout)
    _xpress.refined_logits.out(z, base_logits, readout, out=out)
    return out


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
    """Refines a batch of drafts by Jacobi passes, greedily (docs/method.md, section 4).

    ``torch.ops.xpress.jacobi_refine.out`` takes the same arguments and ``tokens``, ``passes``,
    ``full_readouts`` and ``workspace`` (uint8, aligned to 64 bytes, on a GPU to 128, of at least
    ``torch.ops.xpress.jacobi_workspace(N, B, H, r, m, top_c, exact, device)`` bytes) to write to.

    Args:
        base_logits: [N,D,V] fp32, bf16 or fp16: the drafter's logits of slots 1..B-1.
        hidden: [N,B,H] fp32, bf16 or fp16: the drafter's last hidden states, slot 0 included.
        anchor: [N] int64 target ids, the last verified token.
        predecessor: [N] int64 target ids, the token before the anchor.
        hidden_proj: [2,r,H] weight dtype.
        token_table: [V_t,r] weight dtype.
        mixer: [B,B,r] fp32.
        mlp_gate_up: [2m,r] weight dtype.
        mlp_down: [r,m] weight dtype.
        readout: [V,r] weight dtype.
        num_passes: the cap on passes, at least 1; more than D acts as D. A block that reaches its
            fixed point earlier ends there, which never changes its tokens.
        top_c: 0 scores the whole vocabulary; C from 1 to min(V, 1024) the C best base logits.
        exact: prove the result over the whole vocabulary; needs top_c >= 1 and num_passes >= D.
        seed_tokens: [N,D] int64 target ids to start from, or None for the argmax of base_logits.
        d2t: [V] int64 offsets of a reduced draft vocabulary (target id = v + d2t[v]), or None.

    Returns:
        tokens [N,D] int64 target ids; passes [N] int32, the passes executed, one that found no
        change included; full_readouts [N] int32, 0 unless exact. On a GPU, tokens and passes of a
        block with an id outside [0,V_t), a ``d2t`` that leads there included, are -1.
    """
    return _xpress.jacobi_refine(
        base_logits,
        hidden,
        anchor,
        predecessor,
        hidden_proj,
        token_table,
        mixer,
        mlp_gate_up,
        mlp_down,
        readout,
        num_passes,
        top_c,
        exact,
        seed_tokens,
        d2t,
    )


def jacobi_workspace(
    N: int,
    B: int,
    H: int,
    r: int,
    m: int,
    top_c: int = 0,
    exact: bool = False,
    device: torch.device | str | None = None,
) -> int:
    """Bytes of workspace that ``jacobi_refine.out`` needs on a device; they do not depend on V.

    Without a device: as many as do on whichever device the tensors will be.
    """
    place = None if device is None else torch.device(device)
    return _xpress.jacobi_workspace(N, B, H, r, m, top_c, exact, place)


# ------------------------------------------------------------------- shapes, for torch.compile


def _register_fake(name: str) -> Callable[[Callable[..., Any]], None]:
    """Registers what gives an operator's outputs their shapes, on meta and fake tensors.

    torch takes this way as soon as one argument is on the meta device, real ones beside it or not;
    outputs would then come back unwritten, so such a mixture is refused. So are fake tensors of
    several devices, as the operators themselves refuse them.
    """
    packet, _, overload = name.partition(".")
    schema = getattr(getattr(_xpress, packet), overload or "default")._schema

    def register(shapes: Callable[..., Any]) -> None:
        def checked(*args: Any, **kwargs: Any) -> Any:
            names = [argument.name for argument in schema.arguments]
            _check_one_device({**dict(zip(names, args, strict=False)), **kwargs})
            return shapes(*args, **kwargs)

        torch.library.register_fake(f"xpress::{name}", checked)

    return register


def _check_one_device(arguments: dict[str, Any]) -> None:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    on_meta = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if on_meta and len(on_meta) < len(tensors):
        raise ValueError(
            f"{on_meta[0]} is on the meta device, but other arguments are not; "
            "load its data, or move all to one device"
        )
    first = next(iter(tensors))
    expected = tensors[first].device
    for name, tensor in tensors.items():
        if tensor.device != expected:
            raise ValueError(
                f"{name} is on {tensor.device}; expected {expected}, where {first} is; "
                "move all to one device"
            )


@_register_fake("project_hidden")
def _(hidden: Tensor, hidden_proj: Tensor) -> Tensor:
    num_blocks, num_slots, _ = hidden.shape
    return hidden.new_empty(num_blocks, num_slots, hidden_proj.shape[1], dtype=torch.float32)


@_register_fake("causal_mix")
def _(x: Tensor, mixer: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_register_fake("causal_mix_backward")
def _(grad_out: Tensor, x: Tensor, mixer: Tensor) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(x, memory_format=contiguous),
        torch.empty_like(mixer, memory_format=contiguous),
    )


@_register_fake("fuse_mix")
def _(context: Tensor, prev: Tensor, token_table: Tensor, mixer: Tensor) -> Tensor:
    return torch.empty_like(context, memory_format=torch.contiguous_format)


@_register_fake("refiner_mlp")
def _(c: Tensor, mlp_gate_up: Tensor, mlp_down: Tensor) -> Tensor:
    return c.new_empty(c.shape, dtype=mlp_gate_up.dtype)


@_register_fake("top_candidates")
def _(base_logits: Tensor, C: int) -> tuple[Tensor, Tensor]:
    num_blocks, num_drafted, _ = base_logits.shape
    shape = (num_blocks, num_drafted, C)
    return (
        base_logits.new_empty(shape, dtype=torch.int64),
        base_logits.new_empty(shape, dtype=torch.float32),
    )


@_register_fake("readout_argmax")
def _(
    z: Tensor, base_logits: Tensor, readout: Tensor, candidates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape[:2], dtype=torch.int64), z.new_empty(
        z.shape[:2], dtype=torch.float32
    )


@_register_fake("refined_logits")
def _(z: Tensor, base_logits: Tensor, readout: Tensor) -> Tensor:
    return z.new_empty(z.shape[0], readout.shape[0], dtype=torch.float32)


@_register_fake("refined_logits.out")
def _(z: Tensor, base_logits: Tensor, readout: Tensor, *, out: Tensor) -> None:
    return None


@_register_fake("jacobi_refine")
def _(base_logits: Tensor, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    num_blocks, num_drafted, _ = base_logits.shape
    return (
        hidden.new_empty(num_blocks, num_drafted, dtype=torch.int64),
        hidden.new_empty(num_blocks, dtype=torch.int32),
        hidden.new_empty(num_blocks, dtype=torch.int32),
    )


@_register_fake("jacobi_refine.out")
def _(*args: Any, **kwargs: Any) -> None:
    return None


# -------------------------------------------------------------------------------------- autograd


def _save_for_mix(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_mix(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    x, mixer = ctx.saved_tensors
    grad_x, grad_mixer = _xpress.causal_mix_backward(grad_out.contiguous(), x, mixer)
    return grad_x, grad_mixer


torch.library.register_autograd("xpress::causal_mix", _backward_of_mix, setup_context=_save_for_mix)
