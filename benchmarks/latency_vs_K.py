"""Latency of a refined draft over the number of passes K, beside its floor and plain torch.

    python benchmarks/latency_vs_K.py                       the curve, K = 1 .. 15, head of Qwen3-8B
    python benchmarks/latency_vs_K.py --N 8 --preset smollm2-135m --json out.json --png out.png
    python benchmarks/latency_vs_K.py --bars                K = 6 against what the project asks for
    python benchmarks/latency_vs_K.py --device cuda         N = 1, 8, 32, by graph replay

Every figure is per block (the time of a call divided by N), the median over rounds in which all
lines take turns on the same threads. Inputs are the seeded ones of inputs.py, whose passes are
known and checked before anything is timed; every line's tokens are checked against the planted
answer. Building, converting and compiling the peers is not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cuda_latency import run_cuda
from benchmarks.inputs import (
    PRESETS,
    Blocks,
    HeadShape,
    PlantedHead,
    assert_ripple,
    planted_blocks,
    planted_head,
)
from benchmarks.peers import CandidateLoop, FullLoop
from benchmarks.timing import (
    MATRIX_FLAGS,
    Ceilings,
    Spread,
    describe_machine,
    interleaved,
    table,
)
from xpress_ext import reference

_Holder = TypeVar("_Holder", PlantedHead, Blocks)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BAR_PASSES = 6  # the plateau of the method's quality, and the K that the bars are set at
BAR_BATCHES = (1, 8)
CUDA_BATCHES = (1, 8, 32)
BAR_CANDIDATES = 32
EXACT_CANDIDATES = (1, 32, 512)
DEFAULT_OUTPUT = Path("build/benchmarks")


@dataclass(frozen=True)
class Line:
    """One thing to time."""

    name: str
    ours: bool
    candidates: bool  # reads candidates only
    dtype: str
    run: Callable[[Blocks, int, bool], Tensor]  # (blocks, num_passes, early_exit) -> tokens
    exact: bool = False


# ------------------------------------------------------------------------------------- the lines


def our_line(head: PlantedHead, dtype: str, C: int = 0, exact: bool = False) -> Line:
    """``torch.ops.xpress.jacobi_refine``; it always exits early."""

    def run(blocks: Blocks, num_passes: int, early_exit: bool) -> Tensor:
        return torch.ops.xpress.jacobi_refine(
            *blocks.tensors(), *head.weights(), num_passes, C, exact
        )[0]

    name = "xpress " + (f"exact C={C}" if exact else f"C={C}" if C else "full")
    return Line(f"{name} {dtype}", True, C > 0 and not exact, dtype, run, exact)


def peer_lines(head: PlantedHead, C: int, modes: Sequence[str]) -> list[Line]:
    """The torch peers: full vocabulary in two types and forms, and candidates."""
    lines = []
    for dtype in ("fp32", "bf16"):
        weights = head.to(DTYPES[dtype])
        for mode in modes:
            # bf16 products have one fast form only: oneDNN's linear.
            for form in ("plain", "tiles") if dtype == "fp32" else ("plain",):
                if mode == "autotuned" and form == "plain":
                    continue
                loop = FullLoop(weights, DTYPES[dtype], form, mode)
                suffix = "" if form == "plain" else f" {form}"
                lines.append(_peer(f"torch {mode} {dtype}{suffix}", dtype, loop, False))
            if mode != "autotuned":
                pool = CandidateLoop(weights, C, DTYPES[dtype], mode)
                lines.append(_peer(f"torch {mode} {dtype} C={C}", dtype, pool, True))
    return lines


def _peer(name: str, dtype: str, loop: FullLoop | CandidateLoop, candidates: bool) -> Line:
    def run(blocks: Blocks, num_passes: int, early_exit: bool) -> Tensor:
        return loop(*blocks.tensors(), num_passes, early_exit)

    return Line(name, False, candidates, dtype, run)


class Bench:
    """A head, its inputs in every type needed, and the lines that run on them."""

    def __init__(self, args: argparse.Namespace, N: int) -> None:
        self.device: str = args.device
        self.shape: HeadShape = PRESETS[args.preset]
        self.N, self.dtype = N, args.dtype
        head = planted_head(self.shape, DTYPES[args.dtype])
        self.head = _to_device(head, args.device)
        self.blocks = {
            (kind, name): _to_device(planted_blocks(head, N, kind, dtype), args.device)
            for kind in ("worst", "mild")
            for name, dtype in DTYPES.items()
            if name in ("fp32", "bf16", args.dtype)
        }
        for kind in ("worst", "mild"):
            self._check_inputs(self.blocks[kind, args.dtype])

    def call(
        self, line: Line, num_passes: int, kind: str = "worst", early_exit: bool = False
    ) -> Callable[[], Tensor]:
        """A call to time."""
        blocks = self.blocks[kind, line.dtype]
        return lambda: line.run(blocks, num_passes, early_exit)

    def wrong_tokens(self, lines: Sequence[Line]) -> dict[str, int]:
        """Tokens of each line at B-1 passes that differ from the planted answer, both kinds."""
        return {
            line.name: sum(
                int((self.call(line, self.D, kind)() != self.blocks[kind, line.dtype].answer).sum())
                for kind in ("worst", "mild")
            )
            for line in lines
        }

    @property
    def D(self) -> int:
        """Drafted slots, B-1: the passes that always suffice."""
        return self.shape.B - 1

    def _check_inputs(self, blocks: Blocks) -> None:
        """Asserts the planted passes: the first block by the reference, all by our operator."""
        first = _to_device(blocks.first(), "cpu")
        head = _to_device(self.head, "cpu")
        assert_ripple(first, lambda tokens: one_pass(reference.jacobi_refine, head, first, tokens))
        ours = torch.ops.xpress.jacobi_refine
        assert_ripple(blocks, lambda tokens: one_pass(ours, self.head, blocks, tokens))


def one_pass(
    refine: Callable[..., tuple[Tensor, Tensor, Tensor]],
    head: PlantedHead,
    blocks: Blocks,
    tokens: Tensor,
) -> Tensor:
    """The tokens after one more pass of a ``jacobi_refine`` from the given ones."""
    return refine(*blocks.tensors(), *head.weights(), 1, 0, False, tokens)[0]


def _to_device(holder: _Holder, device: str) -> _Holder:
    """A copy of a dataclass of tensors on the device."""
    fields: dict[str, Any] = {
        k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(holder).items()
    }
    return type(holder)(**fields)


# ------------------------------------------------------------------------------------- the floor


def pass_floor(
    shape: HeadShape, N: int, C: int, dtype: str, ceilings: Ceilings
) -> dict[str, float]:
    """Least microseconds per block and pass: bytes at copy speed, arithmetic at matmul speed.

    Full vocabulary (C=0): the readout once for all N blocks, each block's base logits; the product
    over all B-1 slots. Candidates: their readout rows and base logits.
    """
    size = DTYPES[dtype].itemsize
    D = shape.B - 1
    rows = C * D * N if C else shape.V
    num_bytes = rows * shape.r * size + N * D * (C or shape.V) * size
    flop = 2 * N * D * (C or shape.V) * shape.r
    return {"bytes": ceilings.copy_us(num_bytes) / N, "arithmetic": ceilings.matmul_us(flop) / N}


# ------------------------------------------------------------------------------------- the curve


def run_curve(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints and plots microseconds per block over K."""
    bench = Bench(args, args.N)
    ours = [our_line(bench.head, args.dtype), our_line(bench.head, args.dtype, args.C)]
    exact = our_line(bench.head, args.dtype, args.C, exact=True)
    lines = [*ours, *peer_lines(bench.head, args.C, args.modes)]
    wrong = bench.wrong_tokens([*lines, exact])
    ceilings = Ceilings.measure(args.device)

    passes = list(range(1, bench.D + 1))
    curve = interleaved(
        {(line.name, K): bench.call(line, K) for K in passes for line in lines},
        args.repeats,
        args.device,
    )
    settled = interleaved(
        {
            (line.name, kind): bench.call(line, bench.D, kind, early_exit=True)
            for kind in ("worst", "mild")
            for line in [*lines, exact]
        },
        args.repeats,
        args.device,
    )
    result: dict[str, object] = {
        **_header(args, bench, ceilings),
        "passes": passes,
        "floor_us_per_pass": {
            name: pass_floor(bench.shape, args.N, C, args.dtype, ceilings)
            for name, C in (("full", 0), ("candidates", args.C))
        },
        "lines": [
            {
                "name": line.name,
                "ours": line.ours,
                "candidates": line.candidates,
                "exact": line.exact,
                "wrong_tokens": wrong[line.name],
                "us_per_block": None
                if line.exact
                else [asdict(curve[line.name, K].scaled(1 / args.N)) for K in passes],
                "us_per_added_pass": None
                if line.exact
                else _added(curve[line.name, 1], curve[line.name, bench.D], bench.D) / args.N,
                "us_to_fixed_point": {
                    kind: asdict(settled[line.name, kind].scaled(1 / args.N))
                    for kind in ("worst", "mild")
                },
            }
            for line in [*lines, exact]
        ],
    }
    print_curve(result)
    plot_curve(result, args.png)
    return result


def _added(first: Spread, last: Spread, num_passes: int) -> float:
    return (last.median - first.median) / max(1, num_passes - 1)


def _header(args: argparse.Namespace, bench: Bench, ceilings: Ceilings) -> dict[str, object]:
    return {
        "machine": describe_machine(args.device),
        "device": args.device,
        "preset": args.preset,
        "shape": asdict(bench.shape),
        "N": bench.N,
        "C": args.C,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "ceilings": asdict(ceilings),
    }


def _print_header(result: dict) -> None:
    machine, shape, ceilings = result["machine"], result["shape"], result["ceilings"]
    print(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"Python {machine['python']}, load {machine['load_average']}"
    )
    print(f"instruction sets: {' '.join(machine['flags']) or 'unknown'}")
    print(
        f"head {result['preset']}: "
        + " ".join(f"{k}={v}" for k, v in shape.items())
        + f", N={result['N']}, our weights and inputs {result['dtype']}, "
        f"{result['repeats']} rounds"
    )
    print(
        f"measured ceilings: copy {ceilings['copy_gb_s']:.1f} GB/s, "
        f"fp32 matrix product {ceilings['matmul_gflop_s']:.0f} GFLOP/s"
    )


def print_curve(result: dict) -> None:
    """Prints the tables of a curve."""
    _print_header(result)
    lines = [line for line in result["lines"] if not line["exact"]]
    for title, chosen in (
        ("full vocabulary", [x for x in lines if not x["candidates"]]),
        (f"candidates, C={result['C']}", [x for x in lines if x["candidates"]]),
    ):
        print(f"\n{title}, worst-case inputs: microseconds per block, medians over K passes")
        columns = ["line \\ K", *map(str, result["passes"])]
        rows = [[x["name"], *(f"{at['median']:.0f}" for at in x["us_per_block"])] for x in chosen]
        print(table(columns, rows))

    first, last = result["passes"][0], result["passes"][-1]
    middle = min(BAR_PASSES, last)
    print("\nmicroseconds per block, p20 to p80; microseconds per added pass; floor of a pass")
    columns = ["line", f"K={first}", f"K={middle}", f"K={last}", "added pass", "bytes", "arithm."]
    print(table(columns, [_spread_row(x, result, (first, middle, last)) for x in lines]))

    print(
        f"\nto the fixed point (K={last}, early exit): microseconds per block, median, p20 to p80;"
        " tokens that differ from the planted answer"
    )
    columns = ["line", "worst case", "", "mild", "", "differ"]
    print(table(columns, [_settled_row(x) for x in result["lines"]]))


def _spread_row(line: dict, result: dict, at: Sequence[int]) -> list[str]:
    floor = result["floor_us_per_pass"]["candidates" if line["candidates"] else "full"]
    spreads = [line["us_per_block"][K - 1] for K in at]
    return [
        line["name"],
        *(f"{s['p20']:.0f}..{s['p80']:.0f}" for s in spreads),
        f"{line['us_per_added_pass']:.0f}",
        f"{floor['bytes']:.0f}" if line["ours"] else "",
        f"{floor['arithmetic']:.0f}" if line["ours"] else "",
    ]


def _settled_row(line: dict) -> list[str]:
    cells = [line["name"]]
    for kind in ("worst", "mild"):
        spread = line["us_to_fixed_point"][kind]
        cells += [f"{spread['median']:.0f}", f"{spread['p20']:.0f}..{spread['p80']:.0f}"]
    return [*cells, str(line["wrong_tokens"])]


def plot_curve(result: dict, path: Path) -> None:
    """Plots the curve to a PNG file; says so where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("\nno plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 5.5), sharex=True)
    for panel, candidates in zip(panels, (False, True), strict=True):
        _plot_panel(panel, result, candidates)
    shape, machine = result["shape"], result["machine"]
    figure.suptitle(
        f"Refining one block: {result['preset']} (V={shape['V']}, r={shape['r']}, B={shape['B']}),"
        f" N={result['N']}, worst case; {machine['cpu']}, {machine['threads']} threads,"
        f" torch {machine['torch']}",
        fontsize=10,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    print(f"\nplot: {path}")


def _plot_panel(panel, result: dict, candidates: bool) -> None:  # type: ignore[no-untyped-def]
    passes = result["passes"]
    for line in result["lines"]:
        if line["exact"] or line["candidates"] != candidates:
            continue
        spreads = line["us_per_block"]
        style = {"lw": 2.5} if line["ours"] else {"lw": 1.2, "ls": "--"}
        (drawn,) = panel.plot(
            passes, [s["median"] for s in spreads], marker=".", label=line["name"], **style
        )
        panel.fill_between(
            passes,
            [s["p20"] for s in spreads],
            [s["p80"] for s in spreads],
            color=drawn.get_color(),
            alpha=0.2,
        )
    if not candidates:
        floors = result["floor_us_per_pass"]["full"]
        for name, style in (("bytes", "k:"), ("arithmetic", "k-.")):
            label = "floor: bytes" if name == "bytes" else "every product, all slots"
            panel.plot(passes, [K * floors[name] for K in passes], style, lw=1, label=label)
    exact = next(line for line in result["lines"] if line["exact"])
    if candidates:
        panel.axhline(
            exact["us_to_fixed_point"]["worst"]["median"], color="k", lw=1, label=exact["name"]
        )
    panel.set_title("candidates" if candidates else "full vocabulary")
    panel.set_xlabel("passes K")
    panel.set_ylabel("microseconds per block")
    panel.set_yscale("log")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=8)


# -------------------------------------------------------------------------------------- the bars


@dataclass(frozen=True)
class Bar:
    """A ratio that the project asks for: how many times as fast as the other side."""

    name: str
    N: int
    required: float | None  # None: shown, not asked for
    ratio: float
    ours_us: float
    other_us: float
    other: str
    strict: bool = False  # must exceed, not reach

    @property
    def met(self) -> bool | None:
        """Whether it holds; None where nothing is asked for."""
        if self.required is None:
            return None
        return self.ratio > self.required if self.strict else self.ratio >= self.required


def run_bars(args: argparse.Namespace) -> dict[str, object]:
    """Measures the project's bars and prints each with what it asks for."""
    flags = describe_machine(args.device)["flags"]
    assert isinstance(flags, list)
    found = [flag for flag in MATRIX_FLAGS if flag in flags]
    peer_dtype = "fp32" if found and args.device == "cpu" else "bf16"
    bars: list[Bar] = []
    headers, times = [], []
    for N in args.bar_batches:
        header, at_n, measured = _bars_at(args, N, peer_dtype)
        headers.append(header)
        times.append(measured)
        bars += at_n
    _print_header(headers[0])
    if found:
        print(
            f"This CPU multiplies bf16 matrices in hardware ({', '.join(found)}), which our code "
            "does not use (it promises the same bits on every x86-64 CPU): the bars compare with "
            "the fp32 peers; bf16 peers are listed below."
        )
    print(f"\nbars: worst case, K={BAR_PASSES}, medians of {args.repeats} rounds")
    print(table(["bar", "N", "ours us", "other us", "ratio", "asked", ""], map_rows(bars)))
    for header, measured in zip(headers, times, strict=True):
        print(f"\nall lines at N={header['N']}, microseconds per block")
        print(table(["line", "median", "p20", "p80"], measured_rows(measured)))
    return {
        **{k: v for k, v in headers[0].items() if k != "N"},
        "peer_dtype": peer_dtype,
        "bars": [{**asdict(bar), "met": bar.met} for bar in bars],
        "times": [
            {"N": header["N"], "us_per_block": {k: asdict(v) for k, v in measured.items()}}
            for header, measured in zip(headers, times, strict=True)
        ],
    }


def map_rows(bars: Sequence[Bar]) -> list[list[str]]:
    """Table rows of bars."""
    verdict = {True: "pass", False: "MISS", None: "shown only"}
    return [
        [
            f"{bar.name} vs {bar.other}",
            str(bar.N),
            f"{bar.ours_us:.0f}",
            f"{bar.other_us:.0f}",
            f"{bar.ratio:.2f}",
            "" if bar.required is None else f"{'> ' if bar.strict else '>= '}{bar.required:g}",
            verdict[bar.met],
        ]
        for bar in bars
    ]


def measured_rows(times: dict[str, Spread]) -> list[list[str]]:
    """Table rows of times."""
    return [[name, f"{t.median:.0f}", f"{t.p20:.0f}", f"{t.p80:.0f}"] for name, t in times.items()]


def _bars_at(
    args: argparse.Namespace, N: int, peer_dtype: str
) -> tuple[dict[str, object], list[Bar], dict[str, Spread]]:
    bench = Bench(args, N)
    K = min(BAR_PASSES, bench.D)
    full = our_line(bench.head, args.dtype)
    few = our_line(bench.head, args.dtype, BAR_CANDIDATES)
    exact = {
        C: our_line(bench.head, args.dtype, C, exact=True)
        for C in EXACT_CANDIDATES
        if bench.shape.V >= C
    }
    peers = peer_lines(bench.head, BAR_CANDIDATES, args.modes)
    wrong = bench.wrong_tokens([full, few, *exact.values(), *peers])
    for name, count in wrong.items():
        if count:
            print(f"note: {name} differs from the planted answer in {count} tokens (N={N})")

    calls = {line.name: bench.call(line, K) for line in [full, few, *peers]}
    for kind in ("worst", "mild"):
        calls[f"xpress full to its fixed point, {kind}"] = bench.call(full, bench.D, kind)
        for line in exact.values():
            calls[f"{line.name}, {kind}"] = bench.call(line, bench.D, kind)
    raw = interleaved(calls, args.repeats, args.device)
    times = {name: spread.scaled(1 / N) for name, spread in raw.items()}

    def bar(name: str, mine: str, other: str, required: float | None, strict: bool = False) -> Bar:
        ours, theirs = times[mine].median, times[other].median
        return Bar(name, N, required, theirs / ours, ours, theirs, other, strict)

    def best(candidates: bool) -> str:
        names = [p.name for p in peers if p.candidates == candidates and p.dtype == peer_dtype]
        return min(names, key=lambda name: times[name].median)

    bars = [
        bar("full", full.name, f"torch eager {peer_dtype}", 5.0),
        bar("full, best peer", full.name, best(False), 3.0 if N == 1 else 1.5),
        bar(f"C={BAR_CANDIDATES}", few.name, full.name, 10.0 if N == 1 else None),
        bar(f"C={BAR_CANDIDATES}, best peer", few.name, best(True), 3.0),
    ]
    for kind in ("worst", "mild"):
        fixed = f"xpress full to its fixed point, {kind}"
        for C, line in exact.items():
            faster = kind == "mild" and C == BAR_CANDIDATES
            mine = f"{line.name}, {kind}"
            bars.append(bar(mine, mine, fixed, 1.0 if faster else 0.5, strict=faster))
    return _header(args, bench, Ceilings.measure(args.device)), bars, times


# ------------------------------------------------------------------------------------ the script


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="our weights and inputs")
    parser.add_argument(
        "--N", type=int, help="blocks in a batch (1; with --bars 1 and 8; on a GPU 1, 8 and 32)"
    )
    parser.add_argument("--C", type=int, default=32, help="candidates per slot")
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-8b", help="shape of the head")
    parser.add_argument("--repeats", type=int, help="rounds (5; on a GPU 30)")
    parser.add_argument("--threads", type=int, help="torch's threads (default: as torch chooses)")
    parser.add_argument("--bars", action="store_true", help="measure the project's bars")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled peers")
    parser.add_argument(
        "--peer-vllm", type=Path, metavar="DIR", help="an unpacked vLLM 0.33 wheel; on a GPU"
    )
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--png", type=Path, help=f"the plot ({DEFAULT_OUTPUT}/latency_vs_K.png)")
    args = parser.parse_args(argv)
    args.modes = ("eager",) if args.no_compile else ("eager", "compiled", "autotuned")
    args.png = args.png or DEFAULT_OUTPUT / "latency_vs_K.png"
    on_gpu = args.device.startswith("cuda")
    args.repeats = args.repeats if args.repeats is not None else 30 if on_gpu else 5
    args.bar_batches = BAR_BATCHES if args.N is None else (args.N,)
    args.batches = CUDA_BATCHES if args.N is None else (args.N,)
    args.N = 1 if args.N is None else args.N
    if args.N < 1 or args.repeats < 1:
        parser.error(f"--N {args.N}, --repeats {args.repeats}: both must be at least 1")
    if on_gpu and (args.dtype != "bf16" or args.bars):
        parser.error("--device cuda measures bf16, without --bars")
    if args.peer_vllm and not on_gpu:
        parser.error("--peer-vllm: that peer runs on a GPU only (--device cuda)")
    if not 1 <= args.C <= min(PRESETS[args.preset].V, 1024):
        parser.error(f"--C {args.C}: expected 1 to min(V, 1024)")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 where an asked-for bar is missed or a token of ours is wrong."""
    args = parse_args(argv)
    if not hasattr(torch.ops.xpress, "jacobi_refine"):
        print("the operator library is not built: run `make build` first", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    on_gpu = args.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("--device cuda: torch sees no GPU here", file=sys.stderr)
        return 2
    with torch.inference_mode():
        if on_gpu:
            result = run_cuda(args, Bench)
        else:
            result = run_bars(args) if args.bars else run_curve(args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"json: {args.json}")
    return int(failed(result))


def failed(result: dict[str, Any]) -> bool:
    """Whether an asked-for bar was missed, or on a GPU a token of ours was wrong."""
    missed = any(bar["met"] is False for bar in result.get("bars", []))
    lines = [line for batch in result.get("batches", []) for line in batch["lines"]]
    return missed or any(line["ours"] and line["wrong_tokens"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
