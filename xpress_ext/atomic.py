"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write(temporary)` for a name beside `path`, then renames it to `path`.

    No reader ever sees half a file, and where `write` raises nothing is left behind. The file gets
    the permissions of a newly made one, whatever `write` made of them. A symbolic link stays one:
    the file that it leads to is written.

    Raises:
        OSError: the folder cannot be written, or `path` is a folder, a device or a pipe.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file, so it is not replaced")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return mask
