"""What a checkpoint holds, in memory in the serving format (B), and the modules made of it.

Formats A and C are translated to and from these keys and names, so that modules are built and
checked in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xpress_ext.checkpoint.files import CheckpointError
from xpress_ext.config import PARTS, XPressConfig
from xpress_ext.drafter import DFlashConfig, DFlashDrafter
from xpress_ext.head_checks import check_d2t
from xpress_ext.heads import (
    DominoConfig,
    DominoHead,
    HeadConfig,
    MarkovConfig,
    MarkovHead,
    NoHead,
)
from xpress_ext.refiner import FoldedRefiner, XPressRefiner

REFINER_PREFIX = "xpress_head."
MARKOV_PREFIX = "markov_head."
ARCHITECTURE = "Qwen3XPressModel"
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OFFSET_TYPES = (torch.int64, torch.int32)
# What a checkpoint may carry beside the drafter's and the head's parameters, unused here: the
# target's own frozen matrices, which a serving stack may store again, and the inverse of d2t.
_BORROWED = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "t2d",
)
_DOMINO_KEYS = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")

Head = XPressRefiner | MarkovHead | DominoHead | NoHead


@dataclass
class Contents:
    """Keys of format B's config.json and tensors by their names in format B.

    config_file, weights_file, shown: for messages, where both stand and how the file calls a
        tensor of that name.
    """

    keys: dict[str, Any]
    tensors: dict[str, Tensor]
    config_file: str = "the config"
    weights_file: str = "the modules"
    shown: Callable[[str], str] = str


def refuse_serial_heads(contents: Contents, format: str) -> None:
    """Raises CheckpointError if contents in memory hold a Markov or Domino head."""
    is_serial = contents.keys["dflash_config"].get("projector_type")
    if is_serial or any(name.startswith(MARKOV_PREFIX) for name in contents.tensors):
        raise CheckpointError(
            f"format {format} has no place for a Markov or Domino head: use format B"
        )


# --- modules to contents ---


def contents_of(
    drafter: DFlashDrafter, head: Head | None, dtype: torch.dtype | None = None
) -> Contents:
    """Copies on the CPU, in `dtype` or, if None, in each tensor's own type.

    Raises:
        TypeError: drafter or head is something else, a FoldedRefiner for example.
        ValueError: dtype, or the type of a parameter, is none that checkpoints have.
        CheckpointError: drafter and head do not fit together, or a parameter its config.
    """
    _check_modules(drafter, head)
    if dtype not in (None, *WEIGHT_TYPES):
        raise ValueError(f"dtype is {dtype}, expected None or one of {WEIGHT_TYPES}")
    if head is not None:
        _check_agreement(drafter.config, head)
        _check_left_out(head)
    tensors = {}
    parts = [("", drafter), *([(_prefix(head), head)] if head is not None else [])]
    for prefix, module in parts:
        for name, tensor in module.state_dict().items():
            if name == "d2t":
                tensors["d2t"] = tensor.detach().to("cpu").contiguous()
            else:
                tensors[prefix + name] = _stored(prefix + name, tensor, dtype)
    _check_tensors(_expected_shapes(drafter.config, head), Contents({}, tensors))
    keys = {"architectures": [_architecture(head)], **drafter.config.to_dict()}
    types = {tensor.dtype for name, tensor in tensors.items() if name != "d2t"}
    if len(types) == 1:
        keys["torch_dtype"] = str(types.pop()).removeprefix("torch.")
    return Contents(_with_head(keys, head), tensors)


def _check_modules(drafter: object, head: object) -> None:
    if not isinstance(drafter, DFlashDrafter):
        raise TypeError(f"drafter must be a DFlashDrafter, got {type(drafter).__name__}")
    if isinstance(head, FoldedRefiner):
        raise TypeError(
            "a FoldedRefiner cannot be unfolded: save the XPressRefiner that it was made of"
        )
    if head is not None and not isinstance(head, Head):
        raise TypeError(
            "head must be an XPressRefiner, MarkovHead, DominoHead, NoHead or None, "
            f"got {type(head).__name__}"
        )


def _check_agreement(drafter: DFlashConfig, head: Head) -> None:
    kind = "refiner" if isinstance(head, XPressRefiner) else "head"
    for name in ("hidden_size", "block_size", "vocab_size"):
        theirs, ours = getattr(drafter, name), getattr(head.config, name)
        if theirs != ours:
            raise CheckpointError(f"{name} is {theirs} in the drafter and {ours} in the {kind}")
    if drafter.draft_vocab_size not in (None, head.config.draft_vocab_size):
        raise CheckpointError(
            f"draft_vocab_size is {drafter.draft_vocab_size} in the drafter and "
            f"{head.config.draft_vocab_size} in the {kind}"
        )


def _check_left_out(head: Head) -> None:
    """Parts that are switched off are stored as zeros, which any reader computes rightly."""
    if not isinstance(head, XPressRefiner):
        return
    for name in head.parameters_left_out():
        if head.get_parameter(name).detach().any():
            raise CheckpointError(
                f"{REFINER_PREFIX}{name} belongs to a part that the config switches off "
                f"({', '.join(head.config.left_out)}), and is not zero"
            )


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values to save")
    if tensor.dtype not in WEIGHT_TYPES:
        raise ValueError(f"{name} is {tensor.dtype}, expected one of {WEIGHT_TYPES}")
    # A copy of its own memory: safetensors refuses tensors that share it.
    return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


def _prefix(head: Head) -> str:
    if isinstance(head, XPressRefiner):
        return REFINER_PREFIX
    return MARKOV_PREFIX if isinstance(head, MarkovHead) else ""


def _architecture(head: Head | None) -> str:
    if isinstance(head, XPressRefiner):
        return ARCHITECTURE
    return "DominoDraftModel" if isinstance(head, DominoHead) else "DFlashDraftModel"


def _with_head(keys: dict[str, Any], head: Head | None) -> dict[str, Any]:
    """The drafter's keys and those that describe the head."""
    if head is None:
        return keys
    sizes = head.config
    if sizes.draft_vocab_size != sizes.vocab_size:
        keys["draft_vocab_size"] = sizes.draft_vocab_size
    if isinstance(sizes, MarkovConfig):
        keys["dflash_config"] |= {"projector_type": "markov"}
        keys["markov_rank"] = sizes.rank
    elif isinstance(sizes, DominoConfig):
        keys["dflash_config"] |= {"projector_type": "domino"}
        keys["dflash_config"] |= {name: getattr(sizes, name) for name in _DOMINO_KEYS}
    elif isinstance(sizes, XPressConfig):
        keys |= {
            "xpress_rank": sizes.rank,
            "xpress_mlp_hidden": sizes.mlp_hidden,
            "xpress_block_size": sizes.block_size,
            "xpress_num_passes": sizes.num_passes,
            "xpress_topc": sizes.top_c,
            "sample_from_anchor": False,
        }
        if sizes.left_out:
            keys["xpress_without"] = list(sizes.left_out)
    return keys


# --- contents to modules ---


def modules_of(contents: Contents, dtype: torch.dtype | None) -> tuple[DFlashDrafter, Head | None]:
    """Drafter and head in evaluation mode, without gradients; None for a drafter alone.

    dtype: the parameters' type, or None for the stored one.
    Raises ValueError for a wrong dtype and CheckpointError for wrong contents.
    """
    if dtype not in (None, *WEIGHT_TYPES):
        raise ValueError(f"dtype is {dtype}, expected None or one of {WEIGHT_TYPES}")
    try:
        drafter_config = DFlashConfig.from_dict(contents.keys)
        head_config = _head_config(contents, drafter_config)
    except ValueError as error:
        raise CheckpointError(f"{contents.config_file}: {error}") from error
    d2t = _offsets(contents, head_config)
    with torch.device("meta"):
        drafter = DFlashDrafter(drafter_config)
        head = None if head_config is None else _make_head(head_config, _shape_of(d2t))
    _check_tensors(_expected_shapes(drafter_config, head), contents)
    _assign(drafter, "", contents.tensors, dtype)
    if isinstance(head_config, HeadConfig) and isinstance(head, NoHead):
        head = NoHead(head_config, d2t).requires_grad_(False).eval()
    elif head is not None:
        _assign(head, _prefix(head), contents.tensors, dtype)
        _check_left_out(head)
    return drafter, head


def _head_config(contents: Contents, drafter: DFlashConfig) -> XPressConfig | HeadConfig | None:
    keys, tensors = contents.keys, contents.tensors
    dflash = keys.get("dflash_config") or {}
    kind = dflash.get("projector_type")
    sizes: dict[str, Any] = {
        "vocab_size": drafter.vocab_size,
        "hidden_size": drafter.hidden_size,
        "block_size": drafter.block_size,
        "draft_vocab_size": drafter.draft_vocab_size or 0,
    }
    if "xpress_rank" in keys:
        return _xpress_config(keys, sizes)
    if kind == "domino":
        named = {name: dflash[name] for name in _DOMINO_KEYS if name in dflash}
        missing = [f"dflash_config.{name}" for name in _DOMINO_KEYS if name not in named]
        if missing:
            raise ValueError(f"the Domino head's config lacks {', '.join(missing)}")
        return DominoConfig(**sizes, **named)
    w1 = tensors.get(f"{MARKOV_PREFIX}markov_w1.weight")
    if kind == "markov" or (kind is None and w1 is not None):
        if "markov_rank" in keys:
            return MarkovConfig(**sizes, rank=keys["markov_rank"])
        if w1 is None or w1.dim() != 2:
            raise ValueError("the Markov head's config lacks markov_rank")
        return MarkovConfig(**sizes, rank=w1.shape[1])
    if kind not in (None, "dflash"):
        raise ValueError(f"projector_type is {kind!r}, expected dflash, domino or markov")
    return HeadConfig(**sizes) if "d2t" in tensors else None


def _xpress_config(keys: Mapping[str, Any], sizes: dict[str, Any]) -> XPressConfig:
    if keys.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is true (the shift layout), expected false")
    block_size = keys.get("xpress_block_size", sizes["block_size"])
    if block_size != sizes["block_size"]:
        raise ValueError(
            f"xpress_block_size is {block_size}, expected the drafter's block_size "
            f"{sizes['block_size']}"
        )
    left_out = keys.get("xpress_without", [])
    if not isinstance(left_out, list) or not all(part in PARTS for part in left_out):
        raise ValueError(f"xpress_without is {left_out}, expected some of {list(PARTS)}")
    switches: dict[str, Any] = {f"use_{part}": False for part in left_out}
    return XPressConfig(
        **sizes,
        rank=keys["xpress_rank"],
        mlp_hidden=keys.get("xpress_mlp_hidden", 0),
        num_passes=keys.get("xpress_num_passes", 6),
        top_c=keys.get("xpress_topc", 0),
        **switches,
    )


def _offsets(contents: Contents, config: XPressConfig | HeadConfig | None) -> Tensor | None:
    """d2t [V] int64, checked, where the file has it or has to have it."""
    d2t, where = contents.tensors.get("d2t"), contents.weights_file
    if config is None:
        return None
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"{where}: the checkpoint has a reduced draft vocabulary "
                f"({config.draft_vocab_size} of {config.vocab_size}) and no d2t"
            )
        return None
    if d2t.shape != (config.draft_vocab_size,) or d2t.dtype not in _OFFSET_TYPES:
        raise CheckpointError(
            f"{where}: d2t has shape {list(d2t.shape)} and type {d2t.dtype}, expected integers of "
            f"shape {[config.draft_vocab_size]}"
        )
    try:
        check_d2t(config, d2t.long())
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return d2t.long()


def _make_head(config: XPressConfig | HeadConfig, d2t: Tensor | None) -> Head:
    if isinstance(config, XPressConfig):
        return XPressRefiner(config, d2t)
    if isinstance(config, MarkovConfig):
        return MarkovHead(config, d2t)
    if isinstance(config, DominoConfig):
        return DominoHead(config, d2t)
    return NoHead(config, d2t)


def _expected_shapes(drafter: DFlashConfig, head: Head | None) -> dict[str, tuple[int, ...]]:
    """Names in format B and their shapes, by the configs."""
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in DFlashDrafter(drafter).state_dict().items()}
        if head is None:
            return shapes
        made = _make_head(head.config, _shape_of(head.d2t))
    for name, tensor in made.state_dict().items():
        shapes["d2t" if name == "d2t" else _prefix(head) + name] = tuple(tensor.shape)
    return shapes


def _shape_of(d2t: Tensor | None) -> Tensor | None:
    return None if d2t is None else d2t.to("meta")


def _check_tensors(expected: Mapping[str, tuple[int, ...]], contents: Contents) -> None:
    tensors, shown = contents.tensors, contents.shown
    missing = sorted(shown(name) for name in set(expected) - set(tensors))
    unknown = sorted(shown(name) for name in set(tensors) - set(expected) - set(_BORROWED))
    problems = []
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unknown:
        problems.append(f"unknown {', '.join(unknown)}")
    for name in sorted(set(expected) & set(tensors)):
        tensor, shape = tensors[name], list(expected[name])
        if list(tensor.shape) != shape:
            problems.append(f"{shown(name)} has shape {list(tensor.shape)}, expected {shape}")
        types = _OFFSET_TYPES if name == "d2t" else WEIGHT_TYPES
        if tensor.dtype not in types:
            problems.append(f"{shown(name)} is stored as {tensor.dtype}, expected one of {types}")
    if problems:
        raise CheckpointError(f"{contents.weights_file}: {'; '.join(problems)}")


def _assign(
    module: nn.Module, prefix: str, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> None:
    state = {}
    for name in module.state_dict():
        if name == "d2t":
            state[name] = tensors["d2t"].long()
        else:
            stored = tensors[prefix + name]
            state[name] = stored.to(dtype or stored.dtype)
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False).eval()
