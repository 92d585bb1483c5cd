"""Make a virtual environment hold the packages that requirements-dev.txt pins.

``python3 tools/environment.py [--venv .venv] [--only SECTION ...]``

What is there in the right version is left alone, so an environment that somebody works in is never
rebuilt. Needs nothing but the standard library, since it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements-dev.txt"
SECTIONS = ("torch", "packages", "no-deps", "nvcc")

# Runs inside the environment: prints those of the given requirements that it does not meet.
CHECK = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
def missing(line):
    wanted = Requirement(line)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return False
    try:
        have = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return have.split("+")[0] not in wanted.specifier
print(json.dumps([line for line in json.load(sys.stdin) if missing(line)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections to install")
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  (this runs under whatever python3 is)
        fail(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}: set PYTHON3")
    python = options.venv / "bin" / "python"
    if not python.exists():
        create(options.venv)
    sections = options.only or default_sections(options.venv)
    pins = read_pins()
    for section in sections:
        install(python, pins[section], no_deps=section in ("no-deps", "nvcc"))


def fail(message: str) -> None:
    raise SystemExit(f"xpress: {message}")


def create(venv: Path) -> None:
    print(f"creating {venv}", flush=True)
    result = subprocess.run([sys.executable, "-m", "venv", str(venv)])
    if result.returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        fail("`python3 -m venv` failed: on Debian and Ubuntu run `apt-get install python3-venv`")


def read_pins() -> dict[str, list[str]]:
    """The requirement lines of each section. A section begins with a comment ``# [name]``."""
    pins: dict[str, list[str]] = {name: [] for name in SECTIONS}
    section = ""
    for line in PINS.read_text().splitlines():
        heading = re.match(r"# \[([\w-]+)\]", line)
        if heading:
            section = heading.group(1)
        elif line and not line.startswith("#"):
            pins[section].append(line)
    return pins


def default_sections(venv: Path) -> list[str]:
    sections = ["torch", "packages", "no-deps"]
    if os.environ.get("XPRESS_CUDA") == "1" and not has_toolkit():
        sections.append("nvcc")
    return sections


def has_toolkit() -> bool:
    """Whether nvcc is where the build looks for it, the environment itself left aside."""
    named = os.environ.get("CUDACXX")
    if named:
        return True
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return shutil.which("nvcc") is not None or any(
        home and os.access(Path(home) / "bin" / "nvcc", os.X_OK) for home in homes
    )


def install(python: Path, requirements: list[str], no_deps: bool) -> None:
    """Install what is missing of one section."""
    check = subprocess.run(
        [str(python), "-c", CHECK],
        input=json.dumps(requirements),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    missing = json.loads(check.stdout)
    if not missing:
        return
    names = ", ".join(line.split(";")[0].strip() for line in missing)
    print(f"installing {names}", flush=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The whole section is given, so that pip chooses the requirements' own requirements within it.
    command += ["--no-deps", *missing] if no_deps else requirements
    if subprocess.run(command).returncode != 0:
        fail(f"could not install {names}: pip says why above (is the package index reachable?)")


if __name__ == "__main__":
    main()
