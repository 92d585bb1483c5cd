"""Shipped kernels with one mistake each: the ordinary tests of the operators must fail on them.

A mutation is one replaced text in a copy of a kernel's file. The launcher is compiled with that
copy in front of the real one and linked with the emulator's other objects; then `test_operators.py`
runs against the result in a process of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in csrc/`file`; `launcher` is recompiled; `tests` must fail."""

    file: str
    old: str
    new: str
    launcher: str
    tests: str


LATENTS = "test_latents_are_as_accurate and odd and bfloat16"
READOUTS = "test_readouts_of_every_vocabulary and bfloat16 and not 50257 and not 8191"
CANDIDATES = "test_candidates_of_every_vocabulary and bfloat16 and not 50257"
REFINEMENT = "test_refinement_of_every_size and bfloat16 and (few or odd)"

MUTATIONS = {
    "no CTA barrier between gather and sum": Mutation(
        "kernels/fuse_mix.cuh",
        "kChannels, tokens);\n  cta_sync();",
        "kChannels, tokens);",
        "fuse_mix",
        LATENTS,
    ),
    "no CTA barrier before the mix": Mutation(
        "kernels/causal_mix.cuh", "  cta_sync();\n", "", "causal_mix", LATENTS
    ),
    "no wait for the weights": Mutation(
        "kernels/refiner_mlp.cuh",
        "  copy_async_wait<0>();\n  cta_sync();\n\n",
        "  cta_sync();\n\n",
        "refiner_mlp",
        LATENTS,
    ),
    "a wrong map of k in one operand": Mutation(
        "kernels/products.cuh",
        "columns[2] = {b.word[2 * i], b.word[2 * i + 1]}",
        "columns[2] = {b.word[i], b.word[i + 2]}",
        "refiner_mlp",
        LATENTS,
    ),
    "no CTA barrier after the latents": Mutation(
        "kernels/readout_stream.cuh",
        "  cta_sync();\n\n  const int g =",
        "  const int g =",
        "readout_argmax",
        READOUTS,
    ),
    "rows of the readout past its end": Mutation(
        "kernels/readout_stream.cuh",
        "row < V && k < r",
        "k < r",
        "readout_argmax",
        READOUTS,
    ),
    "no wait for a stage": Mutation(
        "kernels/readout_tiled.cuh",
        "copy_async_wait<1>();",
        ";",
        "readout_argmax",
        READOUTS,
    ),
    "no barrier before a stage is filled again": Mutation(
        "kernels/readout_tiled.cuh",
        "cta_sync();  // the stage has arrived, and the one before is no longer read",
        ";",
        "readout_argmax",
        READOUTS,
    ),
    "maxima read before all are there": Mutation(
        "kernels/top_candidates.cuh",
        "  cluster_sync();\n  find_bound(",
        "  find_bound(",
        "top_candidates",
        CANDIDATES,
    ),
    "another CTA's memory without the mapping": Mutation(
        "kernels/jacobi_latent.cuh",
        "*device::cluster_map(shared, rank) = value;",
        "*shared = value;",
        "jacobi_refine",
        REFINEMENT,
    ),
    "no cluster barrier before c is read": Mutation(
        "kernels/jacobi_latent.cuh",
        "cluster_sync();  // c is complete",
        ";",
        "jacobi_refine",
        REFINEMENT,
    ),
    "no cluster barrier before keys are read": Mutation(
        "kernels/jacobi_candidates.cuh",
        "cluster_sync();  // so are the keys; and z is no longer read",
        ";",
        "jacobi_refine",
        REFINEMENT,
    ),
    "a write behind the candidates": Mutation(
        "kernels/jacobi_state.cuh",
        "s.capacity + count, id)",
        "s.capacity + count + s.capacity * s.N * D, id)",
        "jacobi_refine",
        REFINEMENT,
    ),
}


def build_folder() -> Path:
    """The CMake folder of the newest emulator."""
    built = ROOT.glob("build/cmake-*/csrc/emulator/CMakeFiles/xpress_emulator.dir/module.cpp.o")
    return max(built, key=lambda path: path.stat().st_mtime).parents[4]


def compile_mutant(mutation: Mutation, folder: Path) -> Path:
    """A folder with an emulator module of which one kernel is mutated."""
    text = (ROOT / "csrc" / mutation.file).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.old!r} is not once in {mutation.file}"
    copy = folder / "overlay" / mutation.file
    copy.parent.mkdir(parents=True)
    copy.write_text(text.replace(mutation.old, mutation.new))

    build = build_folder()
    source = ROOT / "csrc" / "cuda" / f"{mutation.launcher}.cu"
    command = next(
        shlex.split(entry["command"])
        for entry in json.loads((build / "compile_commands.json").read_text())
        if entry["file"] == str(source) and "xpress_emulated.dir" in entry["command"]
    )
    target = folder / "mutant.o"
    command[command.index("-o") + 1] = str(target)
    command[1:1] = [f"-I{folder / 'overlay'}"]
    run([*command, "-O1", "-w"], cwd=build)

    objects = build / "csrc/emulator/CMakeFiles"
    others = [
        path
        for path in (objects / "xpress_emulated.dir").rglob("*.o")
        if path.name != f"{mutation.launcher}.cu.o"
    ]
    module = next((ROOT / "build" / "emulator").glob("xpress_emulator.*.so"))
    link = [command[0], "-shared", "-o", str(folder / module.name), str(target)]
    run([*link, *map(str, others), str(objects / "xpress_emulator.dir/module.cpp.o")])
    return folder


def run(command: list[str], cwd: Path = ROOT) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_operators_tests_fail_on(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    folder = compile_mutant(mutation, tmp_path)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            *("python_tests/test_operators.py", "-k", f"emulator and {mutation.tests}"),
        ],
        cwd=ROOT,
        env={**os.environ, "XPRESS_EMULATOR_MODULE": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1, f"the tests passed, or crashed:\n{result.stdout[-3000:]}"
    assert "1 failed" in result.stdout
