"""Try every way to install the package, each in environments of its own; ``make test-install``.

``python tools/test_install.py [--only NAME ...] [--keep]``

Run by the Python of .venv, whose torch is copied (by hard links) into the new environments. Works
on a copy of the sources under a temporary folder, so neither the checkout nor .venv is touched.
The package index must be reachable: isolated builds take setuptools from it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_NVCC = "/nonexistent/nvcc"

# Runs in an environment after the installation, outside the sources.
CHECK = """
import torch, xpress_ext
from xpress_ext import reference
x, mixer = torch.randn(2, 4, 32), torch.randn(4, 4, 32)
got = torch.ops.xpress.causal_mix(x, mixer)
torch.testing.assert_close(got, reference.causal_mix(x, mixer))
info = xpress_ext.build_info()
print("CHECK", info.cuda_built, info.cuda_reason)
"""

# What a tensor on a GPU gets, tried without one: the operator of the GPU, called by its key.
ON_GPU = """
import torch, xpress_ext.ops
key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
try:
    torch.ops.xpress.causal_mix.default.redispatch(key, torch.ones(2, 4, 32), torch.ones(4, 4, 32))
except (RuntimeError, ValueError) as error:
    print("ON_GPU", error)
"""


class Failure(Exception):
    """A promise of the installation that was not kept."""


@dataclass
class Environment:
    """A virtual environment of its own and the variables that commands in it see."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *command: str, ok: bool = True, **variables: str) -> str:
        """Run a program of the environment. Returns what it printed, both streams together."""
        environment = {**os.environ, **self.variables, **variables}
        environment.pop("PYTHONPATH", None)
        result = subprocess.run(
            [self.python, *command],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ok != (result.returncode == 0):
            expected = "succeed" if ok else "fail"
            raise Failure(f"{' '.join(command)} did not {expected}:\n{result.stdout}")
        return result.stdout

    def pip(self, *arguments: str, ok: bool = True, **variables: str) -> str:
        return self.run("-m", "pip", *arguments, ok=ok, **variables)

    def check(self) -> tuple[bool, str]:
        """Call an operator. Returns whether the library has a CUDA half, and why none runs."""
        line = next(line for line in self.run("-c", CHECK).splitlines() if line.startswith("CHECK"))
        _, built, reason = line.split(" ", 2)
        self.run("-m", "xpress_ext.cli", "info")
        return built == "True", reason

    def on_gpu(self) -> str:
        """What an operator says when it is called for a GPU with tensors that are not on one."""
        lines = self.run("-c", ON_GPU).splitlines()
        return next(line for line in lines if line.startswith("ON_GPU"))


class Bench:
    """Makes environments and copies of the sources under one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.sources = folder / "sources"
        self._copy_sources()

    def environment(self, *packages: str, torch: bool = True) -> Environment:
        """A new environment with torch (the one of .venv) and the named packages of .venv."""
        self.count += 1
        environment = Environment(self.folder / f"environment-{self.count}")
        subprocess.run([sys.executable, "-m", "venv", str(environment.folder)], check=True)
        # With the default settings, whatever the caller's are.
        environment.variables = {
            "XPRESS_CUDA": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PATH": f"{environment.folder}/bin:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(environment.folder),
        }
        site = Path(
            environment.run(
                "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
            ).splitlines()[-1]
        )
        if "setuptools" in packages:
            environment.pip("uninstall", "--yes", "--quiet", "setuptools")
        for name in _with_requirements([*(["torch"] if torch else []), *packages]):
            _link_distribution(name, site)
        return environment

    def _copy_sources(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if name.startswith("checkpoints/") or not (ROOT / name).is_file():
                continue
            target = self.sources / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def _with_requirements(names: list[str]) -> list[str]:
    """The distributions and what they require, as far as .venv has it."""
    wanted, seen = list(names), set()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        try:
            requires = distribution(name).requires or []
        except ModuleNotFoundError:
            continue
        seen.add(name)
        plain = [line for line in requires if "extra ==" not in line]
        wanted += [re.split(r"[ ;<>=!~(\[]", line, maxsplit=1)[0] for line in plain]
    return sorted(seen)


def _link_distribution(name: str, site: Path) -> None:
    """Hard links (copies, across file systems) of an installed distribution's files."""
    found = distribution(name)
    for file in found.files or []:
        source = Path(str(found.locate_file(file)))
        if source.suffix == ".pyc" or not source.is_file():
            continue
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            continue
        try:
            # A script starts with the path of its Python; it has to be rewritten, so it is copied.
            if target.parent.name == "bin":
                raise OSError
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
        if target.parent.name == "bin":
            _point_to_own_python(target)


def _point_to_own_python(script: Path) -> None:
    content = script.read_bytes()
    if content.startswith(b"#!") and b"python" in content.split(b"\n", 1)[0]:
        rest = content.split(b"\n", 1)[1]
        python = script.resolve().parent / "python"
        script.write_bytes(b"#!" + str(python).encode() + b"\n" + rest)


def expect(condition: bool, promise: str) -> None:
    if not condition:
        raise Failure(promise)


def expect_one_line(output: str, beginning: str) -> None:
    """The failure is told in one line that begins so, and nowhere is there a traceback."""
    lines = [line.strip() for line in output.splitlines()]
    expect(
        any(line.startswith(f"xpress_ext: {beginning}") for line in lines),
        f"no line 'xpress_ext: {beginning}...' in:\n{output}",
    )
    expect("Traceback" not in output, f"a traceback in:\n{output}")


# --- cases ---------------------------------------------------------------------------------------


def plain_install_takes_the_torch_that_is_there(bench: Bench) -> None:
    environment = bench.environment()
    log = environment.pip("install", "-v", str(bench.sources))
    expect(
        not re.search(r"(Collecting|Downloading|Installing collected packages:.*) ?\btorch\b", log),
        f"pip took a torch of its own:\n{log}",
    )
    environment.check()


def plain_install_brings_torch_where_there_is_none(bench: Bench) -> None:
    environment = bench.environment(torch=False)
    constraint = bench.folder / "constraint.txt"
    pins = (ROOT / "requirements-dev.txt").read_text().splitlines()
    constraint.write_text("\n".join(line for line in pins if line.startswith("torch==")) + "\n")
    environment.pip(
        "install",
        str(bench.sources),
        PIP_CONSTRAINT=str(constraint),
        PIP_BUILD_CONSTRAINT=str(constraint),
    )
    environment.check()


def install_without_isolation(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja")
    environment.pip("install", "--no-build-isolation", str(bench.sources))
    environment.check()


def editable_install(bench: Bench) -> None:
    environment = bench.environment()
    environment.pip("install", "--editable", str(bench.sources))
    environment.check()
    where = environment.run("-c", "import xpress_ext; print(xpress_ext.__file__)")
    expect(str(bench.sources) in where, f"the sources are not what is imported: {where}")


def wheel_into_a_second_environment(bench: Bench) -> None:
    first, second = bench.environment(), bench.environment()
    wheels = bench.folder / "wheels"
    first.pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(bench.sources))
    (wheel,) = wheels.glob("*.whl")
    expect("-py3-none-linux_" in wheel.name, f"tag of {wheel.name}")
    second.pip("install", str(wheel))
    second.check()


def source_distribution(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja")
    folder = bench.folder / "sdist"
    environment.run(
        "-c",
        "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, 'tools/build_backend');"
        "import xpress_build; xpress_build.build_sdist(sys.argv[2])",
        str(bench.sources),
        str(folder),
    )
    (archive,) = folder.glob("*.tar.gz")
    environment.pip("install", str(archive))
    environment.check()


def cuda_off(bench: Bench) -> None:
    environment = _environment_with_nvcc(bench)
    _install_in_place(environment, bench, XPRESS_CUDA="0")
    built, reason = environment.check()
    expect(not built and "XPRESS_CUDA=0" in reason, f"got {built}, {reason}")
    said = environment.on_gpu()
    expect("not in this build" in said and "XPRESS_CUDA=0" in said, f"got {said}")


def cuda_required_with_nvcc(bench: Bench) -> None:
    environment = _environment_with_nvcc(bench)
    _install_in_place(environment, bench, XPRESS_CUDA="1")
    built, reason = environment.check()
    expect(built and bool(reason), f"got {built}, {reason}")
    said = environment.on_gpu()
    expect("x is on the CPU; expected a CUDA device" in said, f"got {said}")


def cuda_auto_with_nvcc(bench: Bench) -> None:
    environment = _environment_with_nvcc(bench)
    _install_in_place(environment, bench, XPRESS_CUDA="auto")
    built, _ = environment.check()
    expect(built, "nvcc is there, but the CUDA half was not built")


def cuda_auto_without_nvcc(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja")
    _install_in_place(environment, bench, XPRESS_CUDA="auto", CUDACXX=NO_NVCC)
    built, reason = environment.check()
    expect(not built and NO_NVCC in reason, f"got {built}, {reason}")


def cuda_required_without_nvcc_fails_in_one_line(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja")
    log = _install_in_place(environment, bench, ok=False, XPRESS_CUDA="1", CUDACXX=NO_NVCC)
    expect_one_line(log, "XPRESS_CUDA=1 but")


def unknown_cuda_setting_fails_in_one_line(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja")
    log = _install_in_place(environment, bench, ok=False, XPRESS_CUDA="yes")
    expect_one_line(log, "XPRESS_CUDA='yes' is not understood")


def no_compiler_fails_in_one_line(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja")
    only_own = f"{environment.folder}/bin"
    log = _install_in_place(environment, bench, ok=False, PATH=only_own, CXX="")
    expect_one_line(log, "no C++ compiler found")


def no_cmake_fails_in_one_line(bench: Bench) -> None:
    environment = bench.environment("setuptools")
    only_own = f"{environment.folder}/bin"
    log = _install_in_place(environment, bench, ok=False, PATH=only_own)
    expect_one_line(log, "cmake (3.20 or newer) or ninja is missing")


def no_torch_fails_in_one_line(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja", torch=False)
    log = _install_in_place(environment, bench, ok=False)
    expect_one_line(log, "torch is missing")


def old_torch_fails_in_one_line(bench: Bench) -> None:
    environment = bench.environment("setuptools", "cmake", "ninja", torch=False)
    old = bench.folder / "old" / "torch"
    old.mkdir(parents=True)
    (old / "version.py").write_text("__version__ = '2.9.1'\n")
    log = _install_in_place(environment, bench, ok=False, XPRESS_TORCH_DIR=str(old))
    expect_one_line(log, "torch 2.9.1")


CASES: tuple[Callable[[Bench], None], ...] = (
    plain_install_takes_the_torch_that_is_there,
    plain_install_brings_torch_where_there_is_none,
    install_without_isolation,
    editable_install,
    wheel_into_a_second_environment,
    source_distribution,
    cuda_off,
    cuda_required_with_nvcc,
    cuda_auto_with_nvcc,
    cuda_auto_without_nvcc,
    cuda_required_without_nvcc_fails_in_one_line,
    unknown_cuda_setting_fails_in_one_line,
    no_compiler_fails_in_one_line,
    no_cmake_fails_in_one_line,
    no_torch_fails_in_one_line,
    old_torch_fails_in_one_line,
)


def _environment_with_nvcc(bench: Bench) -> Environment:
    """An environment that finds nvcc: the machine's, or the pinned one from the package index."""
    environment = bench.environment("setuptools", "cmake", "ninja")
    sys.path.insert(0, str(ROOT / "tools"))
    from environment import has_toolkit, install, read_pins

    if not has_toolkit():
        install(Path(environment.python), read_pins()["nvcc"], no_deps=True)
    return environment


def _install_in_place(
    environment: Environment, bench: Bench, ok: bool = True, **variables: str
) -> str:
    return environment.pip(
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--editable",
        str(bench.sources),
        ok=ok,
        **variables,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.__name__ for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder there")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="xpress-install-"))
    bench = Bench(folder)
    failed = 0
    selected = [case for case in CASES if not options.only or case.__name__ in options.only]
    for case in selected:
        start = time.monotonic()
        try:
            case(bench)
            outcome = "passed"
        except Failure as failure:
            failed += 1
            outcome = "FAILED"
            print(failure)
        seconds = time.monotonic() - start
        print(f"{outcome}  {seconds:6.1f} s  {case.__name__.replace('_', ' ')}", flush=True)
    if options.keep:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder)
    print(f"{len(selected) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
