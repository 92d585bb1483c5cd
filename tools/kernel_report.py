"""What the compiler made of the kernels: registers, shared memory, barriers and instructions.

    python tools/kernel_report.py            print the table of the built library
    python tools/kernel_report.py --write    and make it the committed one

Read from the library with the disassembler of requirements-dev.txt, so no GPU is needed. The
committed table is that of one version of nvcc, named in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "xpress_ext" / "libxpress_ops.so"
TABLE = ROOT / "benchmarks" / "results" / "kernel_resources.json"

Resources = dict[str, dict[str, dict[str, int]]]  # architecture -> kernel -> quantity -> value

_TYPES = {"f": "float32", "d": "float64", "NS_4bf16E": "bfloat16", "NS_4fp16E": "float16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from xpress_ext import build_info

    info = build_info()
    if not info.cuda_built:
        raise SystemExit(f"the library has no kernels: {info.cuda_reason}")
    found = resources()
    for architecture, kernels in found.items():
        print(f"\n{architecture:42} registers  shared  local  barriers")
        for name, row in kernels.items():
            print(
                f"{name:42} {row['registers']:9}  {row['shared']:6}  {row['local']:5}"
                f"  {row['barriers']:8}"
            )
    if options.write:
        TABLE.write_text(json.dumps({"nvcc": info.nvcc, "kernels": found}, indent=1) + "\n")


def resources(library: Path = LIBRARY) -> Resources:
    """Registers a thread, static shared memory and local memory in bytes, and barriers in use.

    The dynamic shared memory of a launch is chosen by its plan (csrc/cuda/*_plan.h).
    """
    found: Resources = {}
    architecture = name = ""
    for line in _cuobjdump("--dump-resource-usage", library):
        if line.startswith("arch = "):
            architecture = line.removeprefix("arch = ")
        elif line.startswith("Function "):
            name = kernel_name(line.removeprefix("Function ").rstrip(":"))
        elif line.startswith("REG:"):
            values = dict(part.split(":") for part in line.split())
            found.setdefault(architecture, {})[name] = {
                "registers": int(values["REG"]),
                "shared": int(values["SHARED"]),
                "local": int(values["LOCAL"]) + int(values["STACK"]),
            }
    for architecture, kernels in disassembly(library).items():
        for name, instructions in kernels.items():
            barriers = {i.split()[1] for i in instructions if i.startswith("BAR.SYNC")}
            found[architecture][name]["barriers"] = len(barriers)
    return {a: dict(sorted(kernels.items())) for a, kernels in sorted(found.items())}


def disassembly(library: Path = LIBRARY) -> dict[str, dict[str, list[str]]]:
    """Architecture -> kernel -> its instructions, predicates left out, in order."""
    found: dict[str, dict[str, list[str]]] = {}
    architecture, instructions = "", list[str]()
    for line in _cuobjdump("-sass", library):
        if line.startswith("arch = "):
            architecture = line.removeprefix("arch = ")
        elif line.startswith("Function : "):
            instructions = found.setdefault(architecture, {}).setdefault(
                kernel_name(line.removeprefix("Function : ")), []
            )
        elif match := re.match(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][^;]*);", line):
            instructions.append(match[1].strip())
    return found


def kernel_name(symbol: str) -> str:
    """`readout_stream_kernel<bfloat16>` for its mangled name."""
    name, rest = symbol, symbol.removeprefix("_ZN")
    while match := re.match(r"L?(\d+)", rest):  # nested names, each after its length
        end = match.end() + int(match[1])
        name, rest = rest[match.end() : end], rest[end:]
    parameters = re.match(r"I((?:f|d|NS_4bf16E|NS_4fp16E|Li\d+E|Lb\dE)+)E", rest)
    if parameters is None:
        return name
    words = [
        _TYPES.get(word) or re.sub(r"\D", "", word)
        for word in re.findall(r"f|d|NS_\w{5}E|L[ib]\d+E", parameters[1])
    ]
    return f"{name}<{', '.join(words)}>"


def _cuobjdump(option: str, library: Path) -> list[str]:
    programs = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu13/bin")
    path = os.pathsep.join([*map(str, programs), os.environ.get("PATH", "")])
    result = subprocess.run(
        ["cuobjdump", option, str(library)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.strip() for line in result.stdout.splitlines()]


if __name__ == "__main__":
    main()
