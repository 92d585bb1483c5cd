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


def test_a_link_is_followed_and_a_pipe_is_refused(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    write_atomically(link, lambda temporary: temporary.write_text("new"))
    assert link.is_symlink()
    assert file.read_text() == "new"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe is not a regular file"):
        write_atomically(pipe, lambda temporary: temporary.write_text("new"))
    assert pipe.is_fifo()
