"""Reading and writing of the files of a checkpoint; what is not what it says is refused."""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from xpress_ext.atomic import write_atomically

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class CheckpointError(ValueError):
    """A file or folder is not a checkpoint that can be used; the message names what is wrong."""


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FileNotFoundError and CheckpointError."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: a checkpoint is a folder with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}, or one .pt file"
        )
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(keys, dict):
        raise CheckpointError(f"{path} holds {type(keys).__name__}, expected an object")
    return keys


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises FileNotFoundError and CheckpointError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a file of torch.save, without running any code that is in it.

    Tensors, plain values and an argparse.Namespace are taken. Raises FileNotFoundError and
    CheckpointError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a file of torch.save, or only a part of one")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path} is refused: to read it would run code that is in it"
            + (f" ({found[1]})" if found else "")
        ) from error
    except Exception as error:  # a damaged archive fails in as many ways as it has readers
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path} cannot be read by torch.load: {reason}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds {type(state).__name__}, expected a dictionary")
    return state


def write_folder(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors; where that fails, `path` is as it was before."""
    text = json.dumps(keys, indent=2) + "\n"

    def write_both(config: Path) -> None:
        # The weights get their name last of all that may fail.
        config.write_text(text, encoding="utf-8")
        write_atomically(
            path / WEIGHTS_FILE, lambda file: save_file(dict(tensors), file, {"format": "pt"})
        )

    with _folder(path):
        write_atomically(path / CONFIG_FILE, write_both)


def write_pickle(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` with torch.save; where that fails, `path` is as it was before."""
    with _folder(path.parent):
        write_atomically(path, lambda file: torch.save(dict(state), file))


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Makes the folder and its parents, and takes away what it made if the body fails."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # somebody else's file is in it by now
                folder.rmdir()
        raise
