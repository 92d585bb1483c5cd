"""What the build promises, as far as it shows without installing; the rest: make test-install."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xpress_ext
from xpress_ext._library import LIBRARY_PATH

ROOT = Path(__file__).resolve().parent.parent
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def run(
    command: list[str], folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def xpress(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "xpress_ext.cli", *arguments], **variables)


def library_symbols(which: str) -> list[str]:
    listing = run(["nm", "-D", "-C", f"--{which}-only", str(LIBRARY_PATH)])
    assert listing.returncode == 0, listing.stderr
    return [line.split(maxsplit=1)[-1] for line in listing.stdout.splitlines()]


# --- build_info


def test_build_info_names_versions_and_instruction_set():
    info = xpress_ext.build_info()
    assert info.version == xpress_ext.__version__
    assert info.torch == torch.__version__
    assert info.cpu_isa in info.cpu_isas
    assert "portable" in info.cpu_isas
    assert Path(info.library) == LIBRARY_PATH


def test_build_info_gives_a_reason_where_no_operator_runs_on_a_gpu():
    info = xpress_ext.build_info()
    assert bool(info.cuda_operators) != bool(info.cuda_reason)
    assert info.cuda_built == bool(info.cuda_architectures)
    assert info.cuda_built == (info.nvcc is not None)
    if not torch.cuda.is_available():
        assert not info.cuda_runs_here


def test_info_command_prints_the_same_facts():
    printed = xpress("info", "--json")
    assert printed.returncode == 0, printed.stderr
    facts = json.loads(printed.stdout)
    assert facts["cpu_isas"] == list(xpress_ext.build_info().cpu_isas)
    text = xpress("info").stdout
    for name in ("torch", "CPU instruction set", "CUDA half built", "CUDA operators"):
        assert re.search(rf"^{name}  ", text, re.MULTILINE), text


def test_info_command_shows_a_forced_instruction_set():
    printed = xpress("info", "--json", XPRESS_CPU_ISA="portable")
    assert json.loads(printed.stdout)["cpu_isa"] == "portable"


def test_unknown_instruction_set_is_refused_in_one_line():
    printed = xpress("info", XPRESS_CPU_ISA="sse9")
    assert printed.returncode == 1
    assert "Traceback" not in printed.stderr
    (line,) = printed.stderr.splitlines()
    assert "XPRESS_CPU_ISA" in line
    assert "'sse9'" in line
    assert "portable" in line


def test_demo_refuses_an_unknown_instruction_set_in_one_line():
    printed = xpress("demo", "--prompt", "hello", XPRESS_CPU_ISA="sse9")
    assert printed.returncode == 1
    (line,) = printed.stderr.splitlines()
    assert line.startswith("xpress demo: ")
    assert "'sse9'" in line


@pytest.mark.parametrize(("ending", "status", "lines"), [("| true", 141, 0), ("> /dev/full", 1, 1)])
def test_output_that_nobody_takes_gives_no_traceback(ending, status, lines):
    script = f"set -o pipefail; {sys.executable} -m xpress_ext.cli info {ending}"
    printed = run(["bash", "-c", script])
    assert printed.returncode == status
    assert len(printed.stderr.splitlines()) == lines


def test_package_without_its_library_says_how_to_build_it(tmp_path):
    copy = tmp_path / "xpress_ext"
    copy.mkdir()
    for file in (ROOT / "xpress_ext").glob("*.py"):
        shutil.copy(file, copy)
    command = [sys.executable, "-c", "import xpress_ext; xpress_ext.build_info()"]
    printed = run(command, folder=tmp_path)
    assert "ImportError: xpress_ext: the operator library" in printed.stderr
    assert "make build" in printed.stderr
    command = [sys.executable, "-W", "ignore", "-m", "xpress_ext.cli", "info"]
    printed = run(command, folder=tmp_path)
    assert printed.returncode == 1
    (line,) = printed.stderr.splitlines()
    assert line.startswith("xpress: xpress_ext: the operator library")


# --- the library


def test_library_needs_no_python_and_only_torchs_stable_abi():
    symbols = library_symbols("undefined")
    assert any(name.startswith("aoti_torch_") for name in symbols)
    python = [name for name in symbols if re.match(r"_?Py[A-Z_]", name)]
    unstable = [name for name in symbols if re.search(r"\b(at|c10|torch|caffe2)::", name)]
    assert python == []
    assert unstable == []


def test_library_exports_no_function_of_its_own():
    exported = [name for name in library_symbols("defined") if "xpress" in name]
    assert exported == []


def test_library_links_neither_python_nor_a_shared_cuda_runtime():
    dynamic = run(["readelf", "-d", str(LIBRARY_PATH)]).stdout
    needed = re.findall(r"NEEDED.*\[(.+)\]", dynamic)
    assert "libtorch.so" in needed
    assert [name for name in needed if re.match(r"libpython|libcudart|libtorch_python", name)] == []
    assert "RUNPATH" not in dynamic
    assert "RPATH" not in dynamic


# --- failing builds


def configure(folder: Path, *definitions: str, **variables: str) -> str:
    """The one line with which a configuration that must fail ends."""
    torch_dir = Path(torch.__file__).parent
    command = [str(CMAKE), "-S", str(ROOT), "-B", str(folder)]
    result = run([*command, f"-DXPRESS_TORCH_DIR={torch_dir}", *definitions], **variables)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if "XPRESS: error:" in line]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("definitions", "variables", "words"),
    [
        pytest.param(
            (),
            {"XPRESS_CUDA": "1", "CUDACXX": "/nonexistent/nvcc"},
            ("XPRESS_CUDA=1", "/nonexistent/nvcc", "XPRESS_CUDA=0"),
            id="cuda-without-nvcc",
        ),
        pytest.param(
            (),
            {"XPRESS_CUDA": "yes"},
            ("XPRESS_CUDA='yes'", "auto", "0", "1"),
            id="unknown-cuda-setting",
        ),
        pytest.param(
            ("-DXPRESS_TORCH_DIR=/nonexistent/torch",),
            {},
            ("no torch", "/nonexistent/torch", "torch>=2.10"),
            id="no-torch",
        ),
    ],
)
def test_failing_build_says_in_one_line_what_to_do(tmp_path, definitions, variables, words):
    line = configure(tmp_path, *definitions, **variables)
    for word in words:
        assert word in line


def test_torch_without_the_stable_abi_is_refused(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    line = configure(tmp_path / "build", f"-DXPRESS_TORCH_DIR={tmp_path / 'torch'}")
    assert "torch 2.9.1+cpu" in line
    assert "torch>=2.10" in line


# --- the backend and the pins


def missing_requirements(**variables: str) -> list[str]:
    program = "import json, xpress_build; print(json.dumps(xpress_build.missing_requirements()))"
    backend = str(ROOT / "tools" / "build_backend")
    result = run([sys.executable, "-c", program], PYTHONPATH=backend, **variables)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_backend_asks_for_torch_only_where_there_is_none(tmp_path):
    assert [name for name in missing_requirements() if name.startswith("torch")] == []
    assert "torch>=2.10" in missing_requirements(XPRESS_TORCH_DIR=str(tmp_path))
