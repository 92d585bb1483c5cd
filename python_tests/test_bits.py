"""The same bits from any number of threads and from each instruction set."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import bits
import pytest
import torch

from xpress_ext import build_info


def in_a_process_of_its_own(*arguments: str, isa: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XPRESS_CPU_ISA"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if isa is not None:
        environment["XPRESS_CPU_ISA"] = isa
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def available_isas() -> list[str]:
    """The compiled instruction sets, plainest first, up to the one that this CPU would choose."""
    chosen = "import xpress_ext; print(xpress_ext.build_info().cpu_isa)"
    process = in_a_process_of_its_own("-c", chosen, isa=None)
    assert process.returncode == 0, process.stderr
    compiled = list(build_info().cpu_isas)
    return compiled[: compiled.index(process.stdout.strip()) + 1]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """Digests of this process, on one thread."""
    with_threads(1)
    return bits.digests()


@pytest.fixture(autouse=True)
def _restore_threads():
    before = torch.get_num_threads()
    yield
    with_threads(before)


def with_threads(count: int) -> None:
    torch.set_num_threads(count)
    assert torch.get_num_threads() == count


def assert_equal_bits(got: dict[str, str], expected: dict[str, str]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in expected if got[name] != expected[name]]
    assert not different, f"different bits: {different}"


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_gives_the_same_bits(expected: dict[str, str], threads: int) -> None:
    with_threads(threads)
    assert_equal_bits(bits.digests(), expected)


@pytest.mark.parametrize("isa", available_isas())
def test_each_instruction_set_gives_the_same_bits(expected: dict[str, str], isa: str) -> None:
    process = in_a_process_of_its_own(bits.__file__, isa=isa)
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert answer["isa"] == isa
    assert_equal_bits(answer["digests"], expected)


def test_an_unknown_instruction_set_is_named() -> None:
    process = in_a_process_of_its_own(bits.__file__, isa="sse9")
    assert process.returncode != 0
    assert "XPRESS_CPU_ISA" in process.stderr
    assert "sse9" in process.stderr
