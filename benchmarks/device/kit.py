"""The steps of benchmarks/device/run.sh.

Each step is one command with a time limit and, where it measures something, a JSON result. A step
that fails does not end the run; nor does the end of the time for the whole run, after which steps
are skipped. What comes back lies in three files, whatever the steps: kit.txt, the tables printed at
the end; kit.json, all results; kit.log, all output. They are rewritten after every step, so that a
run that is cut off leaves what it had. Only the standard library is needed to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE = Path("benchmarks/device")
WORK = ROOT / "build" / "device"  # each step's own files, and what is built for it
BUDGET_S = 470
BATCHES = (1, 8, 32)
OPERATOR_TESTS = tuple(
    f"python_tests/{name}.py" for name in ("test_operators", "test_method", "test_readout_argmax")
)
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Python that takes a prebuilt library, and shows that it has CUDA operators for this GPU.
TAKE_LIBRARY = """
import os, shutil, sys
source, target = map(os.path.realpath, sys.argv[1:])
if source != target:
    shutil.copy(source, target)
from xpress_ext import build_info
info = build_info()
print(info)
sys.exit(info.cuda_reason or None)
"""


@dataclass(frozen=True)
class Step:
    """One command of the kit.

    Attributes:
        name: how it is asked for.
        command: program and arguments; the programs and files in it are what a dry run checks.
        limit_s: it is ended after that many seconds.
        json: whether it has a result: the file `result(name)`, or its output where it prints JSON.
        shown: whether the tables at the end repeat its output.
        programs: what it starts beside its own program.
        modules: Python modules that it needs beside those that its scripts import.
        environment: variables to set.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    json: bool = False
    shown: bool = False
    programs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    status: str  # ok, failed, timed out, skipped
    seconds: float
    detail: str = ""
    output: str = field(default="", repr=False)


def result(name: str) -> Path:
    """The file of a step's result."""
    return WORK / f"{name}.json"


def steps() -> list[Step]:
    """All steps, in order: what the others need first, then what matters most."""
    python = sys.executable
    micro = str(WORK / "micro")
    nvcc = os.environ.get("CUDACXX", "nvcc")
    flags = ("-std=c++17", "-O3", f"-arch=sm_{architecture()}", "-Icsrc", "-Icsrc/include")
    roofline = (python, "benchmarks/roofline.py", "--micro", str(result("micro")))
    return [
        Step("environment", (python, str(DEVICE / "environment.py")), 60, json=True),
        build_step(),
        Step("micro-build", (nvcc, *flags, str(DEVICE / "micro.cu"), "-o", micro), 60),
        Step("micro", (micro,), 60, json=True),
        Step(
            "roofline",
            (*roofline, "--json", str(result("roofline"))),
            30,
            json=True,
            shown=True,
        ),
        Step(
            "tests",
            (python, "-m", "pytest", "-q", "-k", "cuda", *OPERATOR_TESTS),
            120,
            modules=("pytest", "hypothesis"),
        ),
        Step("graphs", (python, str(DEVICE / "graphs.py")), 60, json=True),
        Step("draft", (python, str(DEVICE / "draft.py")), 120, json=True),
        latency_step(BATCHES[0]),
        *(sanitizer_step(tool) for tool in SANITIZERS),
        *(latency_step(N) for N in BATCHES[1:]),
    ]


def architecture() -> str:
    """The GPU to compile for, as nvcc spells it after sm_."""
    return os.environ.get("XPRESS_KIT_ARCH", "90a")


def build_step() -> Step:
    """Builds the library, or takes the one that XPRESS_LIBRARY names."""
    prebuilt = os.environ.get("XPRESS_LIBRARY")
    if prebuilt:
        target = "xpress_ext/libxpress_ops.so"
        return Step("build", (sys.executable, "-c", TAKE_LIBRARY, prebuilt, target), 60)
    number = architecture().rstrip("abcdefghijklmnopqrstuvwxyz")
    spelled = f"{number[:-1]}.{number[-1]}{architecture()[len(number) :]}"
    return Step(
        "build",
        (sys.executable, "setup.py", "build_ext", "--inplace"),
        300,
        programs=("cmake", "ninja", "nvcc", "g++"),
        modules=("setuptools", "torch"),
        environment={"XPRESS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": spelled},
    )


def sanitizer_step(tool: str) -> Step:
    """One tool of compute-sanitizer over every operator on tiny shapes."""
    return Step(
        f"sanitizer-{tool}",
        (
            "compute-sanitizer",
            f"--tool={tool}",
            "--error-exitcode=1",
            sys.executable,
            str(DEVICE / "tiny.py"),
        ),
        90,
        # Every tensor is an allocation of its own, so that a step beyond one is seen.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def latency_step(N: int) -> Step:
    """Our draft and its peers over the passes, with N blocks."""
    name = f"latency-{N}"
    command = [sys.executable, "benchmarks/latency_vs_K.py", "--device", "cuda", "--N", str(N)]
    command += ["--repeats", "20", "--json", str(result(name))]
    if os.environ.get("PEER_VLLM"):
        command += ["--peer-vllm", os.environ["PEER_VLLM"]]
    return Step(
        name, tuple(command), 120, json=True, shown=True, programs=("g++",), modules=("triton",)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the steps; 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description="builds, checks and measures on a machine with a GPU"
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", WORK)))
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="seconds for all steps together"
    )
    parser.add_argument("--dry-run", action="store_true", help="check commands and files only")
    parser.add_argument("--list", action="store_true", help="the steps, in order")
    args = parser.parse_args(argv)
    known = steps()
    names = [step.name for step in known]
    if args.list:
        print("\n".join(names))
        return 0
    unknown = [name for name in args.steps if name not in names]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; the steps are {', '.join(names)}")
    chosen = [step for step in known if not args.steps or step.name in args.steps]
    if args.dry_run:
        return dry_run(chosen)
    out = args.out.resolve()
    os.chdir(ROOT)
    outcomes = run_all(chosen, out, args.budget)
    print((out / "kit.txt").read_text(), end="")
    return int(any(outcome.status != "ok" for outcome in outcomes))


def run_all(chosen: Sequence[Step], out: Path, budget_s: float) -> list[Outcome]:
    """Runs steps one after another, and keeps kit.txt, kit.json and kit.log up to date."""
    WORK.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    for step in chosen:
        result(step.name).unlink(missing_ok=True)
    (out / "kit.log").write_text("")
    end = time.monotonic() + budget_s
    outcomes: list[Outcome] = []
    for step in chosen:
        print(f"== {step.name}", flush=True)
        outcome = run(step, end - time.monotonic())
        print(f"   {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        outcomes.append(outcome)
        with (out / "kit.log").open("a") as log:
            log.write(f"== {step.name}: {outcome.status}\n{outcome.output.rstrip()}\n\n")
        write_results(chosen, outcomes, out)
    return outcomes


def run(step: Step, time_left_s: float) -> Outcome:
    """Runs one step within its limit and the time left."""
    if time_left_s < 5:
        return Outcome(step.name, "skipped", 0.0, "no time left")
    if shutil.which(step.command[0]) is None:
        return Outcome(step.name, "failed", 0.0, f"{step.command[0]} is not installed")
    start = time.monotonic()
    with (WORK / f"{step.name}.err").open("w+") as errors:
        printed, status = _run(step, min(step.limit_s, time_left_s), errors.fileno())
        errors.seek(0)
        output = f"{printed}{errors.read()}"
    detail = ""
    if status != "ok":
        detail = output.strip().splitlines()[-1] if output.strip() else "no output"
    elif step.json and not result(step.name).is_file():
        status, detail = _keep_json(printed, result(step.name))
    return Outcome(step.name, status, time.monotonic() - start, detail, output)


def _run(step: Step, limit_s: float, errors: int) -> tuple[str, str]:
    """What a step's command printed, and its status; nothing that it started outlives it."""
    environment = {**os.environ, **step.environment, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        preexec_fn=os.setpgrp,
    )
    timed_out = False
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if timed_out:
        printed, _ = process.communicate()
        return printed, "timed out"
    return printed, "ok" if process.returncode == 0 else "failed"


def _keep_json(text: str, path: Path) -> tuple[str, str]:
    try:
        path.write_text(json.dumps(json.loads(text), indent=1) + "\n")
    except ValueError:
        return "failed", "its output is no JSON"
    return "ok", ""


def write_results(chosen: Sequence[Step], outcomes: Sequence[Outcome], out: Path) -> None:
    """kit.json and kit.txt: what is known so far."""
    results, blocks = {}, []
    for step, outcome in zip(chosen, outcomes, strict=False):
        path = result(step.name)
        if not path.is_file():
            continue
        results[step.name] = json.loads(path.read_text())
        if step.shown:
            blocks.append(f"== {step.name}\n{outcome.output.strip()}")
        else:
            blocks.append(f"== {step.name}\n" + "\n".join(lines_of(results[step.name])))
    listed = [{k: v for k, v in asdict(o).items() if k != "output"} for o in outcomes]
    text = json.dumps({"steps": listed, "results": results}, indent=1)
    (out / "kit.json").write_text(text + "\n")
    blocks.append(f"== steps\n{steps_table(outcomes)}")
    (out / "kit.txt").write_text("\n\n".join(blocks) + "\n")


def lines_of(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A result as lines of name and figure; a median stands before its spread."""
    for name, inner in value.items():
        label = f"{prefix}{name}"
        if not isinstance(inner, dict):
            yield f"{label:30}  {inner}"
        elif "median" in inner:
            spread = f"({inner['p20']:.2f} .. {inner['p80']:.2f})"
            yield f"{label:30}  {inner['median']:10.2f}  {spread}"
        else:
            yield from lines_of(inner, f"{label} ")


def steps_table(outcomes: Sequence[Outcome]) -> str:
    """What became of the steps, and which of them failed."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [
        f"{at.name:{width}}  {at.status:9}  {at.seconds:5.0f} s  {at.detail}".rstrip()
        for at in outcomes
    ]
    failed = [outcome.name for outcome in outcomes if outcome.status != "ok"]
    lines += ["", f"failed: {', '.join(failed)}" if failed else "all steps passed"]
    return "\n".join(lines)


def dry_run(chosen: Sequence[Step]) -> int:
    """Checks what a run would use, as far as one can without a GPU; 1 if some is missing.

    Scripts are imported but not run, so that their imports are checked too. What only a machine
    with a GPU needs (nvcc, compute-sanitizer, Triton) is named where it is missing, no failure.
    """
    failed = False
    importable: dict[str, str] = {}
    for step in chosen:
        problems, notes = [], []
        for word in (*step.command[1:], *_tested(step)):
            if not word.endswith((".py", ".cu")) or word.startswith("-"):
                continue
            if not (ROOT / word).is_file():
                problems.append(f"{word} is missing")
            elif word.endswith(".py") and word != "setup.py":
                if word not in importable:
                    importable[word] = _why_not_imported(word)
                problems += [f"{word}: {importable[word]}"] if importable[word] else []
        for program in (step.command[0], *step.programs):
            if not program.startswith(str(WORK)) and shutil.which(program) is None:
                notes.append(f"{program} is not installed here")
        for module in step.modules:
            code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
            if subprocess.run([sys.executable, "-c", code]).returncode != 0:
                kept = notes if module == "triton" else problems
                kept.append(f"Python module {module} is missing")
        failed |= bool(problems)
        shown = [word if "\n" not in word else "..." for word in step.command]
        print(f"{step.name}: {' '.join(shown)}")
        for text in (*problems, *notes):
            print(f"   {text}")
    return int(failed)


def _tested(step: Step) -> tuple[str, ...]:
    """Files that a run of pytest loads beside those that it is given."""
    return ("python_tests/on_cuda.py",) if "pytest" in step.command else ()


def _why_not_imported(script: str) -> str:
    """Why Python does not import a script, in a line; empty if it does."""
    code = f"import runpy; runpy.run_path({script!r}, run_name='dry_run')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python_tests")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
