"""Runs the demo's own prompts without its panes and writes its table as JSON.

    python benchmarks/demo_table.py [--checkpoint DIR] [--json FILE]

README.md shows this table (render_tables.py). The three decodes take turns, a verification step
each, so that they meet the same weather; times belong to the machine named beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import describe_machine
from xpress_ext import demo

OUTPUT = Path(__file__).resolve().parent / "results" / "demo_smollm2.json"


class Silent:
    """A view that shows nothing."""

    def update(self, lanes: list[demo.Lane]) -> None:
        """Called after each round."""


def measure(models: demo.Models, prompts: list[str], max_new_tokens: int) -> dict[str, Any]:
    """One race for each prompt; the figures are pooled over them."""
    lanes_of_races = []
    for prompt in prompts:
        lanes = models.lanes(prompt, max_new_tokens)
        demo.run_race(lanes, Silent())  # type: ignore[arg-type]
        lanes_of_races.append(lanes)
    by_lane = list(zip(*lanes_of_races, strict=True))
    pooled = [demo.pool([lane.stats for lane in lanes]) for lanes in by_lane]
    return {
        "titles": [lanes[0].title for lanes in by_lane],
        "rows": [list(row) for row in demo.figures(pooled)],
        "cost": demo.cost_note(pooled),
        "verdicts": [line for lanes in lanes_of_races for line in demo.verdict(lanes)],
        "statistics": [stats.to_dict() for stats in pooled],
    }


def main() -> int:
    """Measures and writes the file; 1 with a message where something is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="folder of drafter and refiner")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, default=OUTPUT)
    options = parser.parse_args()
    machine = describe_machine("cpu")
    prompts = list(demo.DEFAULT_PROMPTS)
    try:
        models = demo.load_models(demo.find_checkpoint(options.checkpoint))
        result = measure(models, prompts, options.max_new_tokens)
    except demo.DemoError as error:
        print(f"demo_table: {error}", file=sys.stderr)
        return 1
    result = {
        "machine": machine,
        "prompts": prompts,
        "max_new_tokens": options.max_new_tokens,
        "num_passes": demo.NUM_PASSES,
        **result,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"json: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
