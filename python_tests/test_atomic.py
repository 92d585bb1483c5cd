"""Files are whole or not there, and anyone may read them whom the umask lets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from xpress_ext.atomic import write_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def fail(file: Path) -> None:
        file.write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_atomically(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_private_temporary_file_becomes_an_ordinary_one(
    tmp_path: Path, umask: int, mode: int
) -> None:
    path = tmp_path / "model.safetensors"

    def write_privately(file: Path) -> None:
        file.write_text("new")
        file.chmod(0o600)

    previous = os.umask(umask)
    try:
        write_atomically(path, write_privately)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == mode
