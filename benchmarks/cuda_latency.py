"""The part of latency_vs_K.py that measures on a GPU.

Everything that can be is captured in a CUDA graph and replayed, as a decoder does it; one eager
line shows what that saves. Times are those of CUDA events around one replay, with nothing waited
for inside; rounds interleave all lines. "Hot" replays follow each other, so L2 keeps what fits;
"cold" ones follow a sweep over 256 MB that empties it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.inputs import PRESETS, Blocks, PlantedHead
from benchmarks.peers import CandidateLoop, FullLoop, MarkovLoop
from benchmarks.timing import Ceilings, Spread, describe_machine, table

if TYPE_CHECKING:
    from benchmarks.latency_vs_K import Bench

PASSES = (1, 4, 6, 8, 15)
CACHES = ("hot", "cold")
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class CudaLine:
    """One thing to time: `make(K)` gives a call without arguments that returns tokens.

    `against` names our line that a peer is compared with; empty for our own.
    """

    name: str
    against: str
    make: Callable[[int], Callable[[], Tensor]]
    passes: tuple[int, ...]
    captured: bool = True

    @property
    def ours(self) -> bool:
        return not self.against


def lines_of(
    head: PlantedHead, blocks: Blocks, C: int, compiles: bool, vllm: Path | None
) -> list[CudaLine]:
    """Ours and the peers, in bf16, on one batch of blocks."""
    tensors, D = blocks.tensors(), blocks.base_logits.shape[1]
    passes = (*(K for K in PASSES if K < D), D)
    full, few = "xpress full", f"xpress C={C}"

    def ours(top_c: int, exact: bool) -> Callable[[int], Callable[[], Tensor]]:
        refine = torch.ops.xpress.jacobi_refine
        return lambda K: lambda: refine(*tensors, *head.weights(), K, top_c, exact)[0]

    def peer(loop: FullLoop | CandidateLoop) -> Callable[[int], Callable[[], Tensor]]:
        return lambda K: lambda: loop(*tensors, K)

    lines = [
        CudaLine(full, "", ours(0, False), passes),
        CudaLine(few, "", ours(C, False), passes),
        CudaLine(f"xpress exact C={C}", "", ours(C, True), (D,)),
    ]
    eager = FullLoop(head, torch.bfloat16)
    lines += [
        CudaLine("torch eager", full, peer(eager), passes, captured=False),
        CudaLine("torch graph", full, peer(eager), passes),
        CudaLine(f"torch graph C={C}", few, peer(CandidateLoop(head, C, torch.bfloat16)), passes),
    ]
    if compiles:
        loop = FullLoop(head, torch.bfloat16, mode="compiled")
        pool = CandidateLoop(head, C, torch.bfloat16, mode="compiled")
        lines += [
            CudaLine("torch compiled, graph", full, peer(loop), passes),
            CudaLine(f"torch compiled, graph C={C}", few, peer(pool), passes),
        ]
    markov = MarkovLoop(head, torch.bfloat16)
    lines.append(
        CudaLine(
            "serial Markov, graph",
            full,
            lambda K: lambda: markov(blocks.base_logits, blocks.anchor),
            (D,),
        )
    )
    if vllm is not None:
        lines += _vllm_lines(head, blocks, C, passes, vllm)
    return lines


def _vllm_lines(
    head: PlantedHead, blocks: Blocks, C: int, passes: tuple[int, ...], folder: Path
) -> list[CudaLine]:
    from benchmarks.peer_vllm import VllmHead, load

    head_class = load(folder)
    base, hidden, anchor, predecessor = blocks.tensors()
    with_anchor = torch.cat([torch.zeros_like(base[:, :1]), base], dim=1)

    def make(peer: VllmHead) -> Callable[[int], Callable[[], Tensor]]:
        return lambda K: lambda: peer(with_anchor, hidden, anchor, predecessor, K)

    weights = head.to(torch.bfloat16)
    return [
        CudaLine(f"vLLM {name}", mine, make(VllmHead(head_class, weights, len(base), c)), passes)
        for name, mine, c in (
            ("full", "xpress full", 0),
            (f"C={C}", f"xpress C={C}", C),
            ("C=512", f"xpress C={C}", 512),  # its own default
        )
    ]


class Replay:
    """A call, captured or not, timed by events."""

    def __init__(self, call: Callable[[], Tensor], captured: bool) -> None:
        self._call = call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, tunes and warms up outside the capture
            for _ in range(3):
                self.tokens = call()
        torch.cuda.current_stream().wait_stream(side)
        self._graph: torch.cuda.CUDAGraph | None = None
        if captured:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.tokens = call()

    def run(self) -> None:
        if self._graph is None:
            self.tokens = self._call()
        else:
            self._graph.replay()


def time_all(replays: dict[Any, Replay], repeats: int, cold: bool) -> dict[Any, Spread]:
    """Microseconds of each, over interleaved rounds."""
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda") if cold else None
    events: dict[Any, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        key: [] for key in replays
    }
    for _ in range(repeats):
        for key, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush is None:
                replay.run()  # so that what ran before is not another line
            else:
                flush.zero_()
            begin.record()
            replay.run()
            end.record()
            events[key].append((begin, end))
    torch.cuda.synchronize()
    return {
        key: Spread.of([1e3 * begin.elapsed_time(end) for begin, end in pairs])
        for key, pairs in events.items()
    }


def run_cuda(args: argparse.Namespace, bench_class: type[Bench]) -> dict[str, object]:
    """Measures and prints microseconds per block over K, for each batch."""
    ceilings = Ceilings.measure("cuda")
    result: dict[str, object] = {
        "machine": describe_machine("cuda"),
        "device": "cuda",
        "preset": args.preset,
        "shape": asdict(PRESETS[args.preset]),
        "C": args.C,
        "dtype": "bf16",
        "repeats": args.repeats,
        "ceilings": asdict(ceilings),
        "batches": [run_batch(args, bench_class, N, ceilings) for N in args.batches],
    }
    print_batches(result)
    return result


def run_batch(
    args: argparse.Namespace, bench_class: type[Bench], N: int, ceilings: Ceilings
) -> dict[str, Any]:
    from benchmarks.latency_vs_K import pass_floor

    bench = bench_class(args, N)
    blocks = bench.blocks["worst", "bf16"]
    lines = lines_of(bench.head, blocks, args.C, "compiled" in args.modes, args.peer_vllm)
    replays, failures = {}, {}
    for line in lines:
        for K in line.passes:
            try:
                replays[line.name, K] = Replay(line.make(K), line.captured)
            except Exception as error:  # a peer that fails must not end the run; it is reported
                if line.ours:
                    raise
                failures[line.name] = f"{type(error).__name__}: {error}".split("\n")[0]
    times = {cache: time_all(replays, args.repeats, cache == "cold") for cache in CACHES}
    return {
        "N": N,
        "floor_us_per_pass": {
            name: pass_floor(bench.shape, N, C, "bf16", ceilings)
            for name, C in (("full", 0), ("candidates", args.C))
        },
        "failures": failures,
        "lines": [
            {
                "name": line.name,
                "ours": line.ours,
                "against": line.against,
                "wrong_tokens": _wrong(replays, line, blocks),
                "us_per_block": {
                    cache: {
                        str(K): asdict(times[cache][line.name, K].scaled(1 / N))
                        for K in line.passes
                    }
                    for cache in CACHES
                },
                "times_as_slow": {cache: _ratios(times[cache], line) for cache in CACHES},
            }
            for line in lines
            if line.name not in failures
        ],
    }


def _ratios(times: dict[Any, Spread], line: CudaLine) -> dict[str, float]:
    """A peer's median over that of our line with as many passes."""
    if line.ours:
        return {}
    return {str(K): times[line.name, K].median / times[line.against, K].median for K in line.passes}


def _wrong(replays: dict[Any, Replay], line: CudaLine, blocks: Blocks) -> int | None:
    """Tokens after B-1 passes that differ from the planted answer; None for another method."""
    if "Markov" in line.name:
        return None
    return int((replays[line.name, line.passes[-1]].tokens != blocks.answer).sum())


def print_batches(result: dict[str, Any]) -> None:
    """Prints a table per batch and cache."""
    machine, ceilings = result["machine"], result["ceilings"]
    print(f"{machine.get('gpu')}, torch {machine['torch']}, copy {ceilings['copy_gb_s']:.0f} GB/s")
    for batch in result["batches"]:
        for cache in CACHES:
            print(
                f"\nN={batch['N']}, {cache} caches, worst-case inputs: microseconds per block,"
                " median (p20..p80), and a peer's time over ours; wrong tokens at the end"
            )
            passes = list(batch["lines"][0]["us_per_block"][cache])
            rows = [*_floor_rows(batch, passes)]
            rows += [_row(line, cache, passes) for line in batch["lines"]]
            print(table(["line \\ K", *passes, "wrong"], rows))
        for name, why in batch["failures"].items():
            print(f"failed: {name}: {why}")


def _floor_rows(batch: dict[str, Any], passes: list[str]) -> list[list[str]]:
    """The greater of the floors by bytes and by arithmetic, of the passes alone."""
    return [
        [
            f"floor, {name}, from memory",
            *(f"{int(K) * max(floor.values()):.1f}" for K in passes),
            "",
        ]
        for name, floor in batch["floor_us_per_pass"].items()
    ]


def _row(line: dict[str, Any], cache: str, passes: list[str]) -> list[str]:
    cells = []
    for K in passes:
        at = line["us_per_block"][cache].get(K)
        ratio = line["times_as_slow"][cache].get(K)
        spread = f"{at['median']:.1f} ({at['p20']:.1f}..{at['p80']:.1f})" if at else ""
        cells.append(spread + (f" {ratio:.2f}x" if ratio else ""))
    wrong = line["wrong_tokens"]
    return [line["name"], *cells, "" if wrong is None else str(wrong)]
