"""The PEP 517 backend of this project: setuptools, and where torch comes from.

In a plain ``pip install .`` the build runs in an environment of its own, which does not see the
torch that the user has. To require torch there would download gigabytes that nothing needs: the
library uses torch's stable ABI, so the headers of any torch >= 2.10 do. So torch is looked for in
the environment that pip installs into, and asked for only where there is none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import setuptools

# Asked before anything else: an older one cannot even read this project's pyproject.toml.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"xpress_ext: setuptools {setuptools.__version__} is too old to build without isolation: "
        "run `pip install 'setuptools>=77'`"
    )

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are setuptools' own)

MINIMUM_TORCH = (2, 10)
MINIMUM_CMAKE = (3, 20)
GIGABYTE = 2**30


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + missing_requirements()


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + missing_requirements()


def missing_requirements() -> list[str]:
    """What the build needs and neither the machine nor the user's environment has."""
    requirements = []
    torch_dir = find_torch()
    if torch_dir is None or torch_version(torch_dir) < MINIMUM_TORCH:
        requirements.append(f"torch>={_dotted(MINIMUM_TORCH)}")
    if find_cmake() is None:
        requirements.append(f"cmake>={_dotted(MINIMUM_CMAKE)}")
    if find_ninja() is None:
        requirements.append("ninja")
    return requirements


def find_torch() -> Path | None:
    """The folder of the torch package to build against, or None.

    ``XPRESS_TORCH_DIR`` names it; else it is the one that this process would import; else the one
    of the environment that pip installs into, which an isolated build cannot import.
    """
    named = os.environ.get("XPRESS_TORCH_DIR")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    for folder in _site_folders():
        if (folder / "torch" / "version.py").exists():
            return folder / "torch"
    return None


def torch_version(torch_dir: Path) -> tuple[int, ...]:
    """Version of an installed torch without importing it; (0,) if there is none in the folder."""
    try:
        text = (torch_dir / "version.py").read_text()
    except OSError:
        return (0,)
    match = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else (0,)


def find_cmake() -> str | None:
    """A cmake that runs here and is new enough.

    The console script of a cmake package outside an isolated build environment is on PATH but
    cannot find its own package, so each is tried.
    """
    for candidate in _programs("cmake"):
        version = _version_of(candidate)
        if version is not None and version >= MINIMUM_CMAKE:
            return candidate
    return None


def find_ninja() -> str | None:
    """A ninja that runs here."""
    return next((path for path in _programs("ninja") if _version_of(path) is not None), None)


def jobs(with_cuda: bool) -> int:
    """Parallel compilations; ``MAX_JOBS`` sets them. nvcc takes up to 4 GB each on templates."""
    wanted = os.environ.get("MAX_JOBS")
    if wanted:
        return max(1, int(wanted))
    cores = len(os.sched_getaffinity(0))
    if not with_cuda:
        return cores
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    return max(1, min(cores, free // (4 * GIGABYTE)))


def _site_folders() -> list[Path]:
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE is not False or os.environ.get("PYTHONNOUSERSITE"):
        paths.append(site.getusersitepackages())
    config = Path(sys.prefix) / "pyvenv.cfg"
    if config.exists() and re.search(
        r"include-system-site-packages\s*=\s*true", config.read_text(), re.IGNORECASE
    ):
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        paths.append(sysconfig.get_path("purelib", vars=base))
    return [Path(path) for path in paths]


def _programs(name: str) -> list[str]:
    folders = [*os.environ.get("PATH", "").split(os.pathsep), sysconfig.get_path("scripts")]
    found = (shutil.which(name, path=folder) for folder in folders if folder)
    return [path for path in found if path is not None]


def _version_of(program: str) -> tuple[int, ...] | None:
    try:
        text = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
