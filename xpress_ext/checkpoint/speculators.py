"""Format A, of the library `speculators`: other names, hidden-state indices, offsets and a mask.

`aux_hidden_state_layer_ids` count the embedding's output as 0, so each is a plain layer id + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xpress_ext.checkpoint.contents import REFINER_PREFIX, Contents, refuse_serial_heads
from xpress_ext.checkpoint.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    read_config,
    read_weights,
    write_folder,
)
from xpress_ext.config import is_int
from xpress_ext.reference import target_ids

_PREFIX = "refiner_head."
_NAMES = {  # format B: format A
    f"{REFINER_PREFIX}{ours}": f"{_PREFIX}{theirs}"
    for ours, theirs in {
        "w1.weight": "token_embed.weight",
        "down_h.weight": "down_h.weight",
        "down_g.weight": "down_g.weight",
        "in_proj.weight": "in_proj.weight",
        "mix.L": "mix_l",
        "mlp.gate_proj.weight": "mlp_gate.weight",
        "mlp.up_proj.weight": "mlp_up.weight",
        "mlp.down_proj.weight": "mlp_down.weight",
        "w2.weight": "readout.weight",
    }.items()
}
_MODELS = {"xpress": "XPressSpeculator", "dflash": "DFlashDraftModel"}
# The drafter's keys that stand in `transformer_layer_config`.
_LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)
# What format A has no place for; its own readers pass over these, stored where they say more
# than the defaults.
_OUR_KEYS = ("num_target_layers", "xpress_topc", "xpress_without", "torch_dtype")


def read_speculators(folder: Path) -> Contents:
    """A folder in format A. Raises FileNotFoundError and CheckpointError."""
    path = folder / CONFIG_FILE
    keys = read_config(path)
    model = keys.get("speculators_model_type")
    if not isinstance(model, str) or model not in _MODELS:
        raise CheckpointError(
            f"{path}: speculators_model_type is {model!r}, expected one of {list(_MODELS)}"
        )
    needed = ["transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id"]
    needed += ["block_size"] + (["xpress_rank"] if model == "xpress" else [])
    missing = [name for name in needed if name not in keys]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    try:
        translated = _serving_keys(keys)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    tensors = read_weights(folder / WEIGHTS_FILE)
    serving = {theirs: ours for ours, theirs in _NAMES.items()}
    tensors = {serving.get(name, name): tensor for name, tensor in tensors.items()}
    vocabulary = translated.get("vocab_size")
    if isinstance(vocabulary, int):
        _check_mask(tensors, vocabulary, str(folder / WEIGHTS_FILE))
    d2t = tensors.get("d2t")
    if "draft_vocab_size" not in translated and d2t is not None and not d2t.any():
        del tensors["d2t"]  # offsets of a vocabulary that is not reduced
    return Contents(
        translated,
        tensors,
        str(path),
        str(folder / WEIGHTS_FILE),
        shown=lambda name: _NAMES.get(name, name),
    )


def write_speculators(contents: Contents, folder: Path) -> None:
    """Write a folder in format A. Raises CheckpointError for a head that it has no place for."""
    keys, tensors = contents.keys, dict(contents.tensors)
    refuse_serial_heads(contents, "A")
    if "d2t" in tensors:
        ids = target_ids(tensors["d2t"])
        mask = torch.zeros(keys["vocab_size"], dtype=torch.bool)
        tensors["t2d"] = mask.index_fill(0, ids, True)
    stored = {_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
    write_folder(folder, _speculators_keys(keys), stored)


def _speculators_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    dflash = keys["dflash_config"]
    model = "xpress" if "xpress_rank" in keys else "dflash"
    layer = {name: keys[name] for name in _LAYER_KEYS}
    if not dflash["qk_norm"]:
        layer["qk_norm"] = False
    translated = {
        "architectures": [_MODELS[model]],
        "speculators_model_type": model,
        "transformer_layer_config": layer,
        "block_size": keys["block_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "draft_vocab_size": keys.get("draft_vocab_size", keys["vocab_size"]),
        "sample_from_anchor": False,
    }
    if model == "xpress":
        ratio = keys["xpress_mlp_hidden"] / keys["xpress_rank"]
        translated |= {
            "xpress_rank": keys["xpress_rank"],
            "xpress_mlp_ratio": int(ratio) if ratio.is_integer() else ratio,
            "num_jacobi_passes": keys["xpress_num_passes"],
        }
    return translated | {name: keys[name] for name in _OUR_KEYS if keys.get(name)}


def _serving_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    layer, ids = keys["transformer_layer_config"], keys["aux_hidden_state_layer_ids"]
    if not isinstance(layer, Mapping):
        raise ValueError(f"transformer_layer_config is {layer!r}, expected an object")
    if not isinstance(ids, list) or not ids or not all(is_int(i) and i >= 1 for i in ids):
        raise ValueError(
            f"aux_hidden_state_layer_ids is {ids!r}, expected a list of hidden-state indices from "
            "1 (the first layer's output)"
        )
    if keys.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is true (the shift layout), expected false")
    translated = {
        **{name: value for name, value in layer.items() if name != "qk_norm"},
        "block_size": keys["block_size"],
        "dflash_config": {
            "mask_token_id": keys["mask_token_id"],
            "target_layer_ids": [i - 1 for i in ids],
            "qk_norm": layer.get("qk_norm", True),
        },
        **{name: keys[name] for name in _OUR_KEYS if name in keys},
    }
    reduced = keys.get("draft_vocab_size")
    if reduced is not None and reduced != layer.get("vocab_size"):
        translated["draft_vocab_size"] = reduced
    if keys["speculators_model_type"] == "xpress":
        translated |= {
            "xpress_rank": keys["xpress_rank"],
            "xpress_mlp_hidden": _mlp_hidden(keys["xpress_rank"], keys.get("xpress_mlp_ratio", 2)),
            "xpress_num_passes": keys.get("num_jacobi_passes", 6),
        }
    return translated


def _mlp_hidden(rank: Any, ratio: Any) -> int:
    if not is_int(rank):
        raise ValueError(f"xpress_rank is {rank!r}, expected an integer")
    if not (is_int(ratio) or isinstance(ratio, float)) or not 0 < ratio < 2**20:
        raise ValueError(f"xpress_mlp_ratio is {ratio!r}, expected a positive number")
    width = round(rank * ratio)
    if abs(width - rank * ratio) > 1e-6 * width:
        raise ValueError(f"xpress_mlp_ratio is {ratio}, which times {rank} is no whole width")
    return width


def _check_mask(tensors: Mapping[str, Tensor], vocabulary: int, where: str) -> None:
    """t2d [V_t] must be true exactly at the ids that d2t leads to."""
    mask, d2t = tensors.get("t2d"), tensors.get("d2t")
    if mask is None:
        return
    if mask.dtype != torch.bool or tuple(mask.shape) != (vocabulary,):
        raise CheckpointError(
            f"{where}: t2d has shape {list(mask.shape)} and type {mask.dtype}, "
            f"expected bool of shape {[vocabulary]}"
        )
    if d2t is None or d2t.dim() != 1 or d2t.is_floating_point():
        return  # told where d2t itself is checked
    ids = torch.arange(vocabulary)[mask]
    if not torch.equal(target_ids(d2t).sort().values, ids):
        raise CheckpointError(f"{where}: t2d is not true exactly at the ids that d2t leads to")
