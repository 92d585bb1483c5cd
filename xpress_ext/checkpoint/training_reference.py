"""Format C, of the training reference: one `.pt` file with two state dictionaries and `args`.

`args` holds the keys of format B's config.json, at the top or as a Namespace. Files of other
programs may lack some; a caller can hand those in. The sizes of the refiner are read off its
tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xpress_ext.checkpoint.contents import REFINER_PREFIX, Contents, refuse_serial_heads
from xpress_ext.checkpoint.files import CheckpointError, read_pickle, write_pickle

_MASK = "mix.tril"  # a buffer of the reference's mixer: ones in the lower triangle
_BARE = (
    "w1",
    "w2",
    "down_h",
    "down_g",
    "in_proj",
    *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
)
_DRAFTER_KEYS = ("mask_token_id", "target_layer_ids", "qk_norm")  # of dflash_config


def read_training_reference(path: Path, config: Mapping[str, Any] | None = None) -> Contents:
    """A file in format C; `config`: keys of format B that go before those in `args`.

    Raises FileNotFoundError and CheckpointError.
    """
    state = read_pickle(path)
    drafter = _state(state, "draft_state_dict", path)
    refiner = _state(state, "refiner_state_dict", path) if "refiner_state_dict" in state else {}
    refiner = {f"{name}.weight" if name in _BARE else name: t for name, t in refiner.items()}
    _drop_mask(refiner, path)
    keys = _keys(state.get("args", {}), config or {}, path)
    if refiner:
        keys = _refiner_sizes(refiner, path) | keys
    else:  # the options of a head that is not in the file
        keys = {name: value for name, value in keys.items() if not name.startswith("xpress_")}
    tensors = {f"{REFINER_PREFIX}{name}": tensor for name, tensor in refiner.items()}
    return Contents(keys, {**drafter, **tensors}, f"{path}, args", str(path), shown=_shown)


def _shown(name: str) -> str:
    if name.startswith(REFINER_PREFIX):
        return f"refiner_state_dict.{name.removeprefix(REFINER_PREFIX)}"
    return f"draft_state_dict.{name}"


def write_training_reference(contents: Contents, path: Path) -> None:
    """Write a file in format C, at global step 0.

    Raises CheckpointError for a head or a vocabulary that the format has no place for.
    """
    keys, tensors = contents.keys, contents.tensors
    if "d2t" in tensors or "draft_vocab_size" in keys:
        raise CheckpointError("format C has no place for a reduced draft vocabulary: use A or B")
    refuse_serial_heads(contents, "C")
    refiner = {
        name.removeprefix(REFINER_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(REFINER_PREFIX)
    }
    drafter = {n: t for n, t in tensors.items() if not n.startswith(REFINER_PREFIX)}
    state: dict[str, Any] = {"draft_state_dict": drafter, "args": keys, "global_step": 0}
    if refiner:
        size = keys["block_size"]
        state["refiner_state_dict"] = {**refiner, _MASK: torch.ones(size, size).tril()}
    write_pickle(path, state)


def _state(state: Mapping[str, Any], name: str, path: Path) -> dict[str, Tensor]:
    values = state.get(name)
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path}: {name} is {'missing' if values is None else type(values).__name__}, "
            "expected a dictionary of tensors"
        )
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: {name} holds {key!r}: {type(value).__name__}, expected tensors by name"
            )
        if value.layout != torch.strided or value.is_meta:
            raise CheckpointError(f"{path}: {name}.{key} is no plain tensor with values")
    return {key: value.detach() for key, value in values.items()}


def _keys(args: Any, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    if not isinstance(args, dict) or not all(isinstance(name, str) for name in args):
        raise CheckpointError(f"{path}: args is {type(args).__name__}, expected keys by name")
    keys = {**args, **config}
    dflash = keys.get("dflash_config", {})
    if isinstance(dflash, Mapping):
        flat = {name: keys[name] for name in _DRAFTER_KEYS if name in keys}
        keys["dflash_config"] = {**flat, **dflash}
    return keys


def _refiner_sizes(refiner: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Keys that the shapes tell; whether all shapes agree is checked with the modules."""
    shapes = {}
    for name, rank in {"w1.weight": 2, "mix.L": 3, "mlp.gate_proj.weight": 2}.items():
        if name not in refiner or refiner[name].dim() != rank:
            raise CheckpointError(
                f"{path}: refiner_state_dict.{name} is missing or has not {rank} dimensions"
            )
        shapes[name] = refiner[name].shape
    return {
        "vocab_size": shapes["w1.weight"][0],
        "xpress_rank": shapes["w1.weight"][1],
        "block_size": shapes["mix.L"][-1],
        "xpress_mlp_hidden": shapes["mlp.gate_proj.weight"][0],
    }


def _drop_mask(refiner: dict[str, Tensor], path: Path) -> None:
    mask = refiner.pop(_MASK, None)
    if mask is None:
        return
    size = mask.shape[-1] if mask.dim() else 0
    if mask.numel() != size * size or not torch.equal(
        mask.reshape(size, size).bool(), torch.ones(size, size, dtype=torch.bool).tril()
    ):
        raise CheckpointError(
            f"{path}: refiner_state_dict.{_MASK} is not the lower triangle with its diagonal, so "
            "this head mixes slots otherwise"
        )
