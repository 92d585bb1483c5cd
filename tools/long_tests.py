"""The wide sweeps: the operators' tests with ten times the examples, on each instruction set.

``python tools/long_tests.py [PYTEST ARGUMENTS]``; ``make test-long``. What it
prints is also written to benchmarks/results/test-long.txt, which is committed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "test-long.txt"
TESTS = ("fuzz", "method", "readout_argmax", "bounds", "torch_contract")
INSTRUCTION_SETS = ("portable", "avx2", "avx512")


def main(arguments: list[str]) -> int:
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    files = [f"python_tests/test_{name}.py" for name in TESTS]
    failed = 0
    with RESULT.open("w") as result:
        say(result, f"make test-long, {date.today()}, {processor()}")
        for isa in INSTRUCTION_SETS:
            variables = {"XPRESS_CPU_ISA": isa, "XPRESS_TEST_PROFILE": "long"}
            info = run(result, ["-m", "xpress_ext.cli", "info"], variables, shown=False)
            say(result, f"\n== {isa}" + ("" if info == 0 else ": not on this processor, left out"))
            if info == 0:
                status = run(result, ["-m", "pytest", "-q", *files, *arguments], variables)
                failed += status != 0
        say(result, f"\n{failed} instruction sets failed" if failed else "\nall passed")
    return 1 if failed else 0


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.machine()


def say(result: TextIO, text: str) -> None:
    print(text, flush=True)
    result.write(text + "\n")


def run(result: TextIO, command: list[str], variables: dict[str, str], shown: bool = True) -> int:
    """Run a Python command, with what it prints copied to the result as it comes."""
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if shown:
                say(result, line.rstrip("\n").replace(f"{ROOT}/", ""))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
