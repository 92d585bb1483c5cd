"""Checkpoints in the three formats of docs/method.md, 9: load, save, convert (docs/checkpoints.md).

A: folder of `speculators`; B: folder for serving (vLLM's layout); C: one `.pt` file of the
training reference. One checkpoint holds a drafter and, where trained, its head. Files are written
under temporary names and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from xpress_ext.checkpoint.contents import Contents, Head, contents_of, modules_of
from xpress_ext.checkpoint.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    read_config,
    read_weights,
    write_folder,
)
from xpress_ext.checkpoint.speculators import read_speculators, write_speculators
from xpress_ext.checkpoint.training_reference import (
    read_training_reference,
    write_training_reference,
)
from xpress_ext.drafter import DFlashDrafter

__all__ = [
    "CheckpointError",
    "Format",
    "Head",
    "convert_checkpoint",
    "format_of",
    "load_checkpoint",
    "save_checkpoint",
]

Format = Literal["A", "B", "C"]


def save_checkpoint(
    path: str | Path,
    drafter: DFlashDrafter,
    head: Head | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    format: Format = "B",
) -> None:
    """Write drafter and head to the folder `path`, in format C to the file `path`.

    head: an XPressRefiner; a MarkovHead or DominoHead (format B only); a NoHead, which has the
        offsets of a drafter's own reduced vocabulary; or None.
    dtype: the stored type; None keeps each parameter's.

    A reduced draft vocabulary adds the tensor `d2t` [V] int64 and the key `draft_vocab_size`;
    format C has no place for it. Where saving fails, what was at `path` stays as it was.

    Raises:
        TypeError: drafter or head is something else, a FoldedRefiner for example.
        ValueError: dtype or format is unknown.
        CheckpointError: the sizes of the two do not agree, or the format has no place for them.
    """
    contents = contents_of(drafter, head, dtype)
    if format == "A":
        write_speculators(contents, Path(path))
    elif format == "B":
        write_folder(Path(path), contents.keys, contents.tensors)
    elif format == "C":
        write_training_reference(contents, Path(path))
    else:
        raise ValueError(f"format is {format!r}, expected A, B or C")


def load_checkpoint(
    path: str | Path,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[DFlashDrafter, Head | None]:
    """Read a checkpoint of any of the formats; the head is None where there is a drafter alone.

    dtype: type of the parameters in memory; None keeps the stored one. Modules come in evaluation
    mode, without gradients. config: for format C, keys of format B's config.json that its `args`
    lack. A DominoHead still asks for the target's embedding (`attach_embedding`).

    No code in a file is run. Raises FileNotFoundError and CheckpointError.
    """
    path = Path(path)
    format = format_of(path)
    if config and format != "C":
        raise ValueError(f"config is for format C; {path} is in format {format} with its own")
    if format == "C":
        return modules_of(read_training_reference(path, config), dtype)
    return modules_of(read_speculators(path) if format == "A" else _read_serving(path), dtype)


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    to: Format,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write the checkpoint at `source`, of any format, in format `to`; values stay bit for bit.

    config: as in `load_checkpoint`. Raises FileExistsError where there is something at
    `destination`, and what loading and saving raise.
    """
    if Path(destination).exists():
        raise FileExistsError(f"{destination} exists: choose another name, or remove it first")
    drafter, head = load_checkpoint(source, config=config)
    save_checkpoint(destination, drafter, head, dtype=None, format=to)


def format_of(path: str | Path) -> Format:
    """Which format is at `path`: a file is C, a folder A or B by its config.json.

    Raises FileNotFoundError and, where config.json is no JSON object, CheckpointError.
    """
    path = Path(path)
    if path.is_file():
        return "C"
    keys = read_config(path / CONFIG_FILE)
    return "B" if keys.get("speculators_model_type") is None else "A"


def _read_serving(folder: Path) -> Contents:
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    return Contents(read_config(config), read_weights(weights), str(config), str(weights))
