"""Checkpoints in the serving format (B of docs/method.md, 9): config.json and model.safetensors.

One folder holds a drafter and, where trained, its refiner. A folder is written under temporary
names and renamed, so that a reader never sees half of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xpress_ext.atomic import write_atomically
from xpress_ext.config import XPressConfig
from xpress_ext.drafter import DFlashConfig, DFlashDrafter
from xpress_ext.reference import target_ids
from xpress_ext.refiner import XPressRefiner

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
REFINER_PREFIX = "xpress_head."
ARCHITECTURE = "Qwen3XPressModel"
# What a folder may carry beside the drafter's and the refiner's parameters, unused here: the
# target's own frozen matrices, which a serving stack may store again.
_BORROWED = ("embed_tokens.weight", "lm_head.weight", "t2d")

_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OFFSET_TYPES = (torch.int64, torch.int32)


class CheckpointError(ValueError):
    """A folder is not a checkpoint that can be loaded; the message names what is wrong."""


def save_checkpoint(
    path: str | Path,
    drafter: DFlashDrafter,
    refiner: XPressRefiner | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write drafter and refiner to the folder `path` in format B; `dtype` None keeps each type.

    A reduced draft vocabulary adds the tensor `d2t` [V] int64 and the key `draft_vocab_size`.
    Raises CheckpointError where the sizes of the two do not agree.
    """
    config = _config_keys(drafter.config, refiner, dtype)
    tensors = {name: _stored(t, dtype) for name, t in drafter.state_dict().items()}
    if refiner is not None:
        _check_agreement(drafter.config, refiner.config)
        for name, tensor in refiner.state_dict().items():
            if name == "d2t":
                tensors["d2t"] = tensor.detach().to("cpu").contiguous()
            else:
                tensors[REFINER_PREFIX + name] = _stored(tensor, dtype)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS_FILE, lambda file: save_file(tensors, file, {"format": "pt"}))
    text = json.dumps(config, indent=2) + "\n"
    write_atomically(folder / CONFIG_FILE, lambda file: file.write_text(text, encoding="utf-8"))


def load_checkpoint(
    path: str | Path, dtype: torch.dtype | None = None
) -> tuple[DFlashDrafter, XPressRefiner | None]:
    """Read a folder in format B; the refiner is None where the folder holds a drafter alone.

    dtype: type of the parameters in memory; None keeps the stored one. Modules come in evaluation
    mode. Raises FileNotFoundError and CheckpointError.
    """
    if dtype not in (None, *_WEIGHT_TYPES):
        raise ValueError(f"dtype is {dtype}, expected None or one of {_WEIGHT_TYPES}")
    folder = Path(path)
    keys = _read_config(folder / CONFIG_FILE)
    tensors = _read_weights(folder / WEIGHTS_FILE)
    try:
        drafter_config = DFlashConfig.from_dict(keys)
        refiner_config = _refiner_config(keys, drafter_config)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    with torch.device("meta"):
        drafter = DFlashDrafter(drafter_config)
        refiner = _empty_refiner(refiner_config, tensors)
    expected = _expected(drafter, refiner)
    _check_tensors(folder / WEIGHTS_FILE, expected, tensors)
    parts: Iterable[tuple[str, nn.Module | None]] = (("", drafter), (REFINER_PREFIX, refiner))
    for prefix, module in parts:
        if module is not None:
            _assign(module, prefix, tensors, dtype)
    return drafter, refiner


# --- writing ---


def _config_keys(
    config: DFlashConfig, refiner: XPressRefiner | None, dtype: torch.dtype | None
) -> dict[str, Any]:
    keys = {"architectures": [ARCHITECTURE if refiner else "DFlashDraftModel"], **config.to_dict()}
    if dtype is not None:
        keys["torch_dtype"] = str(dtype).removeprefix("torch.")
    if refiner is not None:
        head = refiner.config
        keys |= {
            "xpress_rank": head.rank,
            "xpress_mlp_hidden": head.mlp_hidden,
            "xpress_block_size": head.block_size,
            "xpress_num_passes": head.num_passes,
            "xpress_topc": head.top_c,
            "sample_from_anchor": False,
        }
        if head.draft_vocab_size != head.vocab_size:
            keys["draft_vocab_size"] = head.draft_vocab_size
    return keys


def _check_agreement(drafter: DFlashConfig, head: XPressConfig) -> None:
    for name in ("hidden_size", "block_size", "vocab_size"):
        theirs, ours = getattr(drafter, name), getattr(head, name)
        if theirs != ours:
            raise CheckpointError(f"{name} is {theirs} in the drafter and {ours} in the refiner")
    if drafter.draft_vocab_size not in (None, head.draft_vocab_size):
        raise CheckpointError(
            f"draft_vocab_size is {drafter.draft_vocab_size} in the drafter and "
            f"{head.draft_vocab_size} in the refiner"
        )


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()


# --- reading ---


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: a checkpoint is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(keys, dict):
        raise CheckpointError(f"{path} holds {type(keys).__name__}, expected an object")
    if keys.get("speculators_model_type") is not None:
        raise CheckpointError(
            f"{path} is in the `speculators` format, expected the serving format "
            f"(architectures [{ARCHITECTURE}])"
        )
    return keys


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def _refiner_config(keys: Mapping[str, Any], drafter: DFlashConfig) -> XPressConfig | None:
    if "xpress_rank" not in keys:
        return None
    if keys.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is true (the shift layout), expected false")
    block_size = keys.get("xpress_block_size", drafter.block_size)
    if block_size != drafter.block_size:
        raise ValueError(
            f"xpress_block_size is {block_size}, expected the drafter's block_size "
            f"{drafter.block_size}"
        )
    return XPressConfig(
        vocab_size=drafter.vocab_size,
        hidden_size=drafter.hidden_size,
        rank=keys["xpress_rank"],
        mlp_hidden=keys.get("xpress_mlp_hidden", 0),
        block_size=block_size,
        draft_vocab_size=drafter.draft_vocab_size or 0,
        num_passes=keys.get("xpress_num_passes", 6),
        top_c=keys.get("xpress_topc", 0),
    )


def _empty_refiner(
    config: XPressConfig | None, tensors: Mapping[str, Tensor]
) -> XPressRefiner | None:
    """The refiner on the meta device, with its offsets, which decide what ids it may draft."""
    if config is None:
        return None
    if config.draft_vocab_size == config.vocab_size:
        return XPressRefiner(config)
    d2t = tensors.get("d2t")
    if d2t is None:
        raise CheckpointError(
            "the checkpoint has a reduced draft vocabulary "
            f"({config.draft_vocab_size} of {config.vocab_size}) and no d2t"
        )
    if d2t.shape != (config.draft_vocab_size,) or d2t.dtype not in _OFFSET_TYPES:
        raise CheckpointError(
            f"d2t has shape {list(d2t.shape)} and type {d2t.dtype}, expected integers of shape "
            f"{[config.draft_vocab_size]}"
        )
    ids = target_ids(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise CheckpointError(
            f"d2t leads to ids {int(ids.min())} to {int(ids.max())}, expected "
            f"0 to {config.vocab_size - 1}"
        )
    return XPressRefiner(config, torch.empty(d2t.shape, dtype=torch.long, device="meta"))


def _expected(drafter: nn.Module, refiner: nn.Module | None) -> dict[str, tuple[int, ...]]:
    """Names in the file and their shapes."""
    shapes = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    if refiner is not None:
        for name, tensor in refiner.state_dict().items():
            shapes["d2t" if name == "d2t" else REFINER_PREFIX + name] = tuple(tensor.shape)
    return shapes


def _check_tensors(
    path: Path, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> None:
    missing = sorted(set(expected) - set(tensors))
    unknown = sorted(set(tensors) - set(expected) - set(_BORROWED))
    problems = []
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unknown:
        problems.append(f"unknown {', '.join(unknown)}")
    for name in sorted(set(expected) & set(tensors)):
        shape = tuple(tensors[name].shape)
        if shape != expected[name]:
            problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
        types = _OFFSET_TYPES if name == "d2t" else _WEIGHT_TYPES
        if tensors[name].dtype not in types:
            problems.append(f"{name} is stored as {tensors[name].dtype}, expected one of {types}")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")


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
