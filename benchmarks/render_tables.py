"""Fills the marked sections of README.md and docs/ from the results in benchmarks/results.

    python benchmarks/render_tables.py            rewrite the sections
    python benchmarks/render_tables.py --check    exit 1 where one is out of date

A section lies between ``<!-- table: NAME -->`` and ``<!-- end -->``; NAME is a key of SECTIONS. So
every measured figure in the documents stands in a committed file that a script wrote. A section
whose file does not exist says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/method.md", "docs/cpu.md", "docs/kernels.md")

CURVE = "latency_qwen3-8b.json"
CURVE_PLOT = "latency_qwen3-8b.png"
BARS = "latency_bars.json"
ACCEPTANCE = "acceptance_smollm2.json"
DEMO = "demo_smollm2.json"
RESOURCES = "kernel_resources.json"
TRAFFIC = "kernel_traffic.json"
ROOFLINE = "roofline_h200.json"

SHOWN_PASSES = (1, 4, 6, 15)
_MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Result = dict[str, Any]


# ---------------------------------------------------------------------------------------- pieces


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned table: the first column to the left, all others to the right."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        rest = (cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        return "| " + " | ".join([row[0].ljust(widths[0]), *rest]) + " |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(columns), "| " + " | ".join(rule) + " |", *map(line, cells[1:])])


def milliseconds(microseconds: float) -> str:
    """Three significant digits."""
    value = microseconds / 1e3
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def spread(at: Result) -> str:
    """Median and, in brackets, the 20th and 80th percentiles; microseconds in, milliseconds out."""
    return f"{milliseconds(at['median'])} ({milliseconds(at['p20'])}-{milliseconds(at['p80'])})"


def machine(result: Result) -> str:
    """CPU, threads and versions, in words."""
    facts = result["machine"]
    text = f"{facts['cpu']}, {facts['threads']} threads"
    if facts.get("flags"):
        text += f" ({', '.join(facts['flags'])})"
    text += f", torch {facts['torch']}, Python {facts['python']}"
    if "load_average" in facts:
        text += f", load average {facts['load_average']:.1f} at the start"
    return text


def head(result: Result) -> str:
    """Sizes of the head, in words."""
    shape = result["shape"]
    return f"head {result['preset']} (" + ", ".join(f"{k}={v}" for k, v in shape.items()) + ")"


# -------------------------------------------------------------------------------------- sections


def latency(results: Callable[[str], Result]) -> str:
    """The curve at a few K, each line's cost of a pass, and the floor."""
    result = results(CURVE)
    shown = [K for K in SHOWN_PASSES if K <= result["passes"][-1]]
    columns = ["ms per block", *(f"K={K}" for K in shown), "per added pass"]
    columns += ["fixed point, worst", "fixed point, mild"]
    rows = [_latency_row(line, shown) for line in result["lines"]]
    return "\n\n".join(
        [
            f"{machine(result)}; {head(result)}, N={result['N']}, ours in {result['dtype']}; "
            f"medians of {result['repeats']} rounds, p20-p80 in brackets at K={shown[-1]}. "
            f"{_floor(result)}",
            markdown(columns, rows),
            f"![Time per block over the number of passes](benchmarks/results/{CURVE_PLOT})",
        ]
    )


def _latency_row(line: Result, shown: Sequence[int]) -> list[str]:
    name = f"**{line['name']}**" if line["ours"] else line["name"]
    curve = line["us_per_block"]
    if curve is None:
        cells = ["-"] * (len(shown) + 1)
    else:
        cells = [milliseconds(curve[K - 1]["median"]) for K in shown[:-1]]
        cells += [spread(curve[shown[-1] - 1]), milliseconds(max(0.0, line["us_per_added_pass"]))]
    fixed = line["us_to_fixed_point"]
    return [name, *cells, *(milliseconds(fixed[kind]["median"]) for kind in ("worst", "mild"))]


def _floor(result: Result) -> str:
    floor, ceilings = result["floor_us_per_pass"]["full"], result["ceilings"]
    return (
        f"In the same run a copy moved {ceilings['copy_gb_s']:.1f} GB/s and an fp32 matrix product "
        f"made {ceilings['matmul_gflop_s']:.0f} GFLOP/s, so one full pass over all slots cannot "
        f"take less than {milliseconds(floor['bytes'])} ms for its bytes, and would take "
        f"{milliseconds(floor['arithmetic'])} ms if every product were made at that speed."
    )


def bars(results: Callable[[str], Result]) -> str:
    """Ratios to the peers, as asked for and as measured, misses included."""
    result = results(BARS)
    rows = [
        [
            bar["name"],
            bar["other"],
            str(bar["N"]),
            milliseconds(bar["ours_us"]),
            milliseconds(bar["other_us"]),
            f"{bar['ratio']:.2f}",
            _asked(bar),
            {True: "met", False: "**missed**", None: ""}[bar["met"]],
        ]
        for bar in result["bars"]
    ]
    columns = ["ours", "compared with", "N", "ours, ms", "other, ms", "times as fast", "asked", ""]
    text = f"{machine(result)}; K=6, worst-case inputs unless named, per block; {head(result)}."
    if result["peer_dtype"] == "fp32":
        text += (
            " This CPU multiplies bf16 matrices in hardware, which our code does not use, so that"
            " all CPUs give the same bits; the comparison is with the fp32 peers."
        )
    return "\n\n".join([text, markdown(columns, rows), *_faster_peers(result)])


def _asked(bar: Result) -> str:
    if bar["required"] is None:
        return ""
    return f"{'> ' if bar['strict'] else '>= '}{bar['required']:g}"


def _faster_peers(result: Result) -> list[str]:
    """The torch lines that beat ours at the same task, named."""
    lost = []
    for times in result["times"]:
        lines = times["us_per_block"]
        for marker, mine in (("", "xpress full"), (" C=", "xpress C=")):
            ours = next(t["median"] for n, t in lines.items() if n.startswith(mine))
            for name, time in lines.items():
                same = name.startswith("torch") and (" C=" in name) == bool(marker)
                if same and time["median"] < ours:
                    lost.append(
                        f"{name} at N={times['N']} ({milliseconds(time['median'])} ms against "
                        f"{milliseconds(ours)} ms)"
                    )
    if not lost:
        return ["No torch line of that run, in any type, was faster than ours at the same task."]
    return [f"Faster than ours in that run: {'; '.join(lost)}."]


def acceptance(results: Callable[[str], Result]) -> str:
    """Acceptance lengths on unseen prompts, with intervals."""
    result = results(ACCEPTANCE)
    columns = ["acceptance length", "mean", "95% interval", "over the drafter", "95% interval"]
    rows = []
    for name, drafts in result["sets"].items():
        for row in drafts:
            rows.append(
                [
                    f"{name}, {row['draft']}",
                    f"{row['mean_acceptance_length']:.2f}",
                    "{:.2f}-{:.2f}".format(*row["mean_95"]),
                    *_over_the_drafter(row),
                ]
            )
    counts = ", ".join(
        f"{drafts[0]['prompts']} of {name}" for name, drafts in result["sets"].items()
    )
    text = (
        f"{result['target']}, {result['decoding']}, {result['new_tokens']} new tokens, blocks of "
        f"{result['block_size']}; prompts that training never saw: {counts}. Intervals: paired "
        "bootstrap over prompts."
    )
    return "\n\n".join([text, markdown(columns, rows)])


def _over_the_drafter(row: Result) -> list[str]:
    if row["difference"] == 0 and row["ratio"] == 1:
        return ["", ""]
    low, high = ((bound - 1) * 100 for bound in row["ratio_95"])
    return [f"{(row['ratio'] - 1) * 100:+.1f}%", f"{low:+.1f}% to {high:+.1f}%"]


def demo(results: Callable[[str], Result]) -> str:
    """The demo's table and what it says of itself."""
    result = results(DEMO)
    verdicts = list(dict.fromkeys(result["verdicts"]))
    return "\n\n".join(
        [
            f"{machine(result)}; the demo's {len(result['prompts'])} own prompts, "
            f"{result['max_new_tokens']} new tokens each, K={result['num_passes']}.",
            markdown(["", *result["titles"]], [[label, *row] for label, row in result["rows"]]),
            " ".join([*verdicts, result["cost"], _cost_of_verifying(result)]),
        ]
    )


def _cost_of_verifying(result: Result) -> str:
    plain, _, refined = (
        stats["milliseconds"]["target"] / stats["verification_steps"]
        for stats in result["statistics"]
    )
    return f"Of that, verifying a block costs the target {refined / plain:.2f} plain steps."


def resources(results: Callable[[str], Result]) -> str:
    """Registers and barriers of every kernel, by architecture."""
    table = results(RESOURCES)
    kernels = table["kernels"]
    rows = []
    for name in sorted({name for found in kernels.values() for name in found}):
        cells = [f"`{name}`"]
        for found in kernels.values():
            at = found.get(name)
            cells.append("" if at is None else f"{at['registers']} / {at['barriers']}")
        rows.append(cells)
    columns = ["kernel", *(f"{a.removeprefix('sm_')}: registers / barriers" for a in kernels)]
    spilling = any(at["local"] for found in kernels.values() for at in found.values())
    return (
        f"nvcc {table['nvcc']}; local memory and spills: {'some' if spilling else 'none'}.\n\n"
        + markdown(columns, rows)
    )


def traffic(results: Callable[[str], Result]) -> str:
    """Bytes of every operator beside their floor."""
    table = results(TRAFFIC)
    shape = ", ".join(f"{name}={value}" for name, value in table["shape"].items())
    rows = []
    for at in table["rows"]:
        total = at["loaded"] + at["stored"]
        sweeps = at["readout"] / at["once"]
        rows.append(
            [
                at["name"],
                f"{total / 1e6:.3f}",
                f"{at['floor'] / 1e6:.3f}",
                f"{total / at['floor']:.2f}x",
                f"{sweeps:.2f}" if sweeps >= 1 else "",
            ]
        )
    columns = ["call", "MB", "floor, MB", "ratio", "W_r read, times"]
    return f"{shape}; bf16.\n\n{markdown(columns, rows)}"


def floors(results: Callable[[str], Result]) -> str:
    """Least bytes and arithmetic of every stage on one GPU."""
    table = results(ROOFLINE)
    gpu = table["gpu"]
    rows = [
        [
            at["name"].strip(),
            str(at["N"]),
            f"{at['num_bytes'] / 1e6:.3f}",
            f"{at['flop'] / 1e9:.3f}",
            f"{at['bytes_us']:.2f}",
            f"{at['arithmetic_us']:.2f}",
        ]
        for at in table["stages"]
    ]
    columns = ["stage", "N", "MB", "GFLOP", "bytes, us", "arithmetic, us"]
    return (
        f"{gpu['name']}: {gpu['memory_gb_s']:.0f} GB/s, {gpu['dense_bf16_tflop_s']:.0f} TFLOP/s in"
        f" bf16 ({gpu['source']}).\n\n{markdown(columns, rows)}"
    )


SECTIONS: dict[str, tuple[tuple[str, ...], Callable[[Callable[[str], Result]], str]]] = {
    "latency": ((CURVE,), latency),
    "bars": ((BARS,), bars),
    "acceptance": ((ACCEPTANCE,), acceptance),
    "demo": ((DEMO,), demo),
    "floors": ((ROOFLINE,), floors),
    "traffic": ((TRAFFIC,), traffic),
    "resources": ((RESOURCES,), resources),
}


# ------------------------------------------------------------------------------------- documents


def render(text: str, folder: Path = RESULTS) -> str:
    """The text with its marked sections filled from the result files of a folder.

    Raises:
        ValueError: a section has an unknown name.
    """

    def results(name: str) -> Result:
        return json.loads((folder / name).read_text(encoding="utf-8"))

    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in SECTIONS:
            raise ValueError(f"table {name!r}: expected one of {', '.join(SECTIONS)}")
        files, section = SECTIONS[name]
        missing = [file for file in files if not (folder / file).is_file()]
        body = section(results) if not missing else f"Not measured yet: {', '.join(missing)}."
        return f"{match.group(1)}{body}\n{match.group(4)}"

    return _MARK.sub(fill, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the documents, or tells which of them are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    options = parser.parse_args(arguments)
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = render(old, options.results)
        if new == old:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if options.check else 'rewritten'}: {', '.join(stale)}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
