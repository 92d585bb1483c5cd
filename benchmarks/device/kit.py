"""The steps of benchmarks/device/run.sh.

Each step is one command with a log, a time limit and, where it measures something, a JSON file. A
step that fails does not end the run; the table at the end says what failed, and so does the exit
status. Only the standard library is needed to start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE = Path("benchmarks/device")
LIBRARY = Path("xpress_ext/libxpress_ops.so")
OPERATOR_TESTS = tuple(
    f"python_tests/{name}.py" for name in ("test_operators", "test_method", "test_readout_argmax")
)
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


@dataclass(frozen=True)
class Step:
    """One command of the kit.

    Attributes:
        name: how it is asked for.
        command: program and arguments; the programs and files in it are what a dry run checks.
        limit_s: it is ended after that many seconds.
        json: file under the output folder that holds its result: its standard output, unless the
            command writes the file itself.
        writes_json: whether it does.
        modules: Python modules that it imports.
        environment: variables to set.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    json: str = ""
    writes_json: bool = False
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    status: str  # ok, failed, timed out
    seconds: float
    detail: str = ""


def steps(out: Path) -> list[Step]:
    """All steps, in order."""
    python = sys.executable
    architecture = os.environ.get("XPRESS_KIT_ARCH", "90a")
    spelled = f"{architecture[:-1]}.{architecture[-1]}"
    if architecture[-1].isalpha():
        spelled = f"{architecture[:-2]}.{architecture[-2:]}"
    build = (python, "setup.py", "build_ext", "--inplace")
    prebuilt = os.environ.get("XPRESS_LIBRARY")
    if prebuilt:
        build = (python, "-c", f"import shutil; shutil.copy({prebuilt!r}, {str(LIBRARY)!r})")
    latency = [python, "benchmarks/latency_vs_K.py", "--device", "cuda"]
    latency += ["--json", str(out / "latency.json"), "--repeats", "20"]
    if os.environ.get("PEER_VLLM"):
        latency += ["--peer-vllm", os.environ["PEER_VLLM"]]
    micro = str(out / "micro")
    nvcc = os.environ.get("CUDACXX", "nvcc")
    flags = ("-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Icsrc", "-Icsrc/include")
    return [
        Step("environment", (python, str(DEVICE / "environment.py")), 60, "environment.json"),
        Step(
            "build",
            build,
            300,
            modules=("setuptools", "torch"),
            environment={"XPRESS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": spelled},
        ),
        Step("micro-build", (nvcc, *flags, str(DEVICE / "micro.cu"), "-o", micro), 60),
        Step("micro", (micro,), 60, "micro.json"),
        Step(
            "tests",
            (python, "-m", "pytest", "-q", "-k", "cuda", *OPERATOR_TESTS),
            120,
            modules=("pytest", "hypothesis"),
        ),
        Step("graphs", (python, str(DEVICE / "graphs.py")), 60, "graphs.json", modules=("torch",)),
        *(
            Step(
                f"sanitizer-{tool}",
                (
                    "compute-sanitizer",
                    f"--tool={tool}",
                    "--error-exitcode=1",
                    python,
                    str(DEVICE / "tiny.py"),
                ),
                90,
            )
            for tool in SANITIZERS
        ),
        Step("draft", (python, str(DEVICE / "draft.py")), 120, "draft.json", modules=("numpy",)),
        Step("latency", tuple(latency), 240, "latency.json", writes_json=True),
        Step(
            "roofline",
            (
                python,
                "benchmarks/roofline.py",
                "--micro",
                str(out / "micro.json"),
                "--json",
                str(out / "roofline.json"),
            ),
            30,
            "roofline.json",
            writes_json=True,
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps; 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description="builds, checks and measures on a machine with a GPU"
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/device")))
    parser.add_argument("--dry-run", action="store_true", help="check commands and files only")
    parser.add_argument("--list", action="store_true", help="the steps, in order")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    known = steps(args.out.resolve())
    names = [step.name for step in known]
    if args.list:
        print("\n".join(names))
        return 0
    unknown = [name for name in args.steps if name not in names]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; the steps are {', '.join(names)}")
    chosen = [step for step in known if not args.steps or step.name in args.steps]
    if args.dry_run:
        return dry_run(chosen, args.out.resolve())
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for step in chosen:
        print(f"== {step.name}", flush=True)
        outcomes.append(run(step, args.out.resolve()))
        print(f"   {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s", flush=True)
    report(outcomes, args.out)
    return int(any(outcome.status != "ok" for outcome in outcomes))


def run(step: Step, out: Path) -> Outcome:
    """Runs one step; its output goes to OUT/NAME.log."""
    log = out / f"{step.name}.log"
    start = time.monotonic()
    if shutil.which(step.command[0]) is None:
        return Outcome(step.name, "failed", 0.0, f"{step.command[0]} is not installed")
    environment = {**os.environ, **step.environment, "PYTHONUNBUFFERED": "1"}
    status, detail = "ok", ""
    with log.open("w") as sink:
        try:
            result = subprocess.run(
                step.command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                timeout=step.limit_s,
            )
            text = result.stdout
            if result.returncode != 0:
                status = "failed"
        except subprocess.TimeoutExpired as error:
            held = error.stdout or ""
            text = held.decode() if isinstance(held, bytes) else held
            status = "timed out"
        sink.write(text)
    if status != "ok":
        lines = log.read_text().strip().splitlines()
        detail = lines[-1] if lines else "no output"
    elif step.json and not step.writes_json:
        status, detail = _keep_json(text, out / step.json)
    return Outcome(step.name, status, time.monotonic() - start, detail)


def _keep_json(text: str, path: Path) -> tuple[str, str]:
    try:
        path.write_text(json.dumps(json.loads(text), indent=1) + "\n")
    except ValueError:
        return "failed", "its output is no JSON"
    return "ok", ""


def report(outcomes: Sequence[Outcome], out: Path) -> None:
    """The table at the end, and steps.json beside it."""
    width = max(len(outcome.name) for outcome in outcomes)
    print()
    for outcome in outcomes:
        line = f"{outcome.name:{width}}  {outcome.status:9}  {outcome.seconds:5.0f} s"
        print(f"{line}  {outcome.detail}".rstrip())
    (out / "steps.json").write_text(
        json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
    )
    failed = [outcome.name for outcome in outcomes if outcome.status != "ok"]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall steps passed")


def dry_run(chosen: Sequence[Step], out: Path) -> int:
    """Checks what a run would use, as far as a machine without a GPU can; 1 if a file is missing.

    Programs that only the GPU machine needs (nvcc, compute-sanitizer) are named where they are
    missing here, which is no failure.
    """
    failures = 0
    for step in chosen:
        problems = []
        notes = []
        for word in step.command:
            path = ROOT / word
            if word.endswith((".py", ".cu")) and not path.is_file():
                problems.append(f"{word} is missing")
            if word.endswith(".py") and path.is_file():
                compile(path.read_text(), word, "exec")
        program = step.command[0]
        if not program.startswith(str(out)) and shutil.which(program) is None:
            notes.append(f"{program} is not installed here")
        for module in step.modules:
            found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True)
            if found.returncode != 0:
                problems.append(f"Python module {module} is missing")
        failures += bool(problems)
        print(f"{step.name}: {' '.join(step.command)}")
        for text in (*problems, *notes):
            print(f"   {text}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
