"""Packaging: CMake builds the operator library, this file only drives it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools" / "build_backend"))

# Imported first: it checks the version of setuptools.
import xpress_build  # isort: skip  # noqa: E402
from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402


class BuildPython(build_py):
    """Copies the package into an empty folder: a file deleted since must not reach a wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "xpress_ext", ignore_errors=True)
        super().run()


class BuildLibrary(build_ext):
    """Builds libxpress_ops.so with CMake; a failure ends in one line that says what to do."""

    def get_ext_filename(self, fullname: str) -> str:
        # The library has no Python symbols, so its name carries no Python version either.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if not sys.platform.startswith("linux"):
            fail(f"only Linux is supported, this is {sys.platform}")
        cmake = xpress_build.find_cmake()
        ninja = xpress_build.find_ninja()
        torch_dir = xpress_build.find_torch()
        if cmake is None or ninja is None:
            fail("cmake (3.20 or newer) or ninja is missing: run `pip install cmake ninja`")
        if torch_dir is None:
            fail("torch is missing: run `pip install 'torch>=2.10'`")
        if not os.environ.get("CXX") and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            fail("no C++ compiler found: install g++ or clang++ (C++17), or name one in CXX")

        output_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = _build_dir()
        configured = _run(
            [
                cmake,
                f"-S{ROOT}",
                f"-B{build_dir}",
                "-GNinja",
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-DXPRESS_TORCH_DIR={torch_dir}",
                f"-DXPRESS_OUTPUT_DIR={output_dir}",
            ],
            "CMake could not configure the build: its messages above say why",
        )
        with_cuda = "XPRESS: CUDA " in configured
        _run(
            [ninja, "-C", str(build_dir), f"-j{xpress_build.jobs(with_cuda)}"],
            "the library did not compile: the compiler's messages are above",
        )


class TagWheel(bdist_wheel):
    """One wheel serves every Python 3: the library uses torch's stable ABI only."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def fail(message: str) -> None:
    raise SystemExit(f"xpress_ext: {message}")


def _build_dir() -> Path:
    """One folder for all settings, so that a change of XPRESS_CUDA or of torch compiles little.

    CMake reads the compiler and its flags the first time only; others get a folder of their own.
    """
    settings = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "LDFLAGS")]
    key = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
    return ROOT / "build" / f"cmake-{key}"


def _run(command: list[str], what_failed: str) -> str:
    """Run and echo a command. A failure exits with CMake's own one-line reason, if it gave one."""
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode != 0:
        marker = "XPRESS: error: "
        reasons = [line.split(marker, 1)[1].strip() for line in lines if marker in line]
        fail(reasons[0] if reasons else what_failed)
    return "".join(lines)


setup(
    ext_modules=[Extension("xpress_ext.libxpress_ops", sources=[])],
    cmdclass={"bdist_wheel": TagWheel, "build_ext": BuildLibrary, "build_py": BuildPython},
)
