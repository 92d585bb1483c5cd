"""Make training data: `python -m xpress_ext.training.make_data --help`.

Writes shards of examples: prompts, the target's own greedy answers, and the target's hidden
states on them. Three sources: code prompts and GSM8K prompts, answered here, and ready answers.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from xpress_ext.atomic import write_atomically
from xpress_ext.drafter import default_target_layer_ids
from xpress_ext.targets import load_smollm2
from xpress_ext.training.features import BatchedTarget, Example, greedy_answers, teacher_forced
from xpress_ext.training.prompts import chat_ids, code_messages, gsm8k_questions

_Item = TypeVar("_Item")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K training file (question per line)")
    parser.add_argument("--answers", type=Path, help=".npz of ready answers to --gsm8k")
    parser.add_argument("--code", action="store_true", help="answer code prompts")
    parser.add_argument("--skip-ready", type=Path, help=".npz whose GSM8K rows are left out")
    parser.add_argument("--count", type=int, default=1000, help="prompts to answer")
    parser.add_argument("--max-new-tokens", type=int, default=144)
    parser.add_argument("--batch", type=int, default=64, help="prompts decoded together")
    parser.add_argument("--draft-layers", type=int, default=5, help="target layers recorded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_smollm2(torch.bfloat16)
    layers = default_target_layer_ids(model.config.num_hidden_layers, options.draft_layers)
    target = BatchedTarget(model, layers)
    options.out.mkdir(parents=True, exist_ok=True)
    started, made = time.time(), 0
    for index, examples in enumerate(_batches(options, target, tokenizer)):
        save_shard(options.out / f"shard{index:04d}.pt", examples)
        made += sum(len(e.tokens) - e.prompt_length for e in examples)
        print(f"shard {index}: {made} answer tokens, {time.time() - started:.0f} s", flush=True)


def _batches(
    options: argparse.Namespace, target: BatchedTarget, tokenizer: object
) -> Iterator[list[Example]]:
    if options.answers is not None:
        questions = gsm8k_questions(options.gsm8k)
        pairs = [
            (chat_ids(tokenizer, questions[row]), answer[: options.max_new_tokens])
            for row, answer in ready_answers(options.answers)
        ]
        for chunk in _length_sorted(pairs, 16, lambda pair: len(pair[0]) + len(pair[1])):
            yield teacher_forced(target, [p for p, _ in chunk], [a for _, a in chunk])
        return
    prompts = [chat_ids(tokenizer, text) for text in _messages(options)]
    eos = target.model.config.eos_token_id
    for batch in _length_sorted(prompts, options.batch, len):
        yield greedy_answers(target, batch, options.max_new_tokens, eos)


def _messages(options: argparse.Namespace) -> list[str]:
    if options.code:
        return code_messages(options.count, options.seed)
    questions = gsm8k_questions(options.gsm8k)
    rows = set(range(len(questions)))
    if options.skip_ready is not None:
        rows -= {row for row, _ in ready_answers(options.skip_ready)}
    chosen = sorted(rows)
    random.Random(options.seed).shuffle(chosen)
    return [questions[row] for row in chosen[: options.count]]


def ready_answers(path: Path) -> list[tuple[int, list[int]]]:
    """(row of the prompt file, answer tokens) of each answer in the .npz."""
    arrays = np.load(path)
    offset, tokens = arrays["offset"], arrays["tokens"].astype(np.int64)
    return [
        (int(row), tokens[offset[i] : offset[i + 1]].tolist())
        for i, row in enumerate(arrays["row"])
    ]


def _length_sorted(
    items: Sequence[_Item], batch: int, length: Callable[[_Item], int], window: int = 4
) -> Iterator[list[_Item]]:
    """Batches of similar lengths, sorted only within windows so that every shard is a fair mix."""
    for start in range(0, len(items), batch * window):
        group = sorted(items[start : start + batch * window], key=length)
        for first in range(0, len(group), batch):
            yield group[first : first + batch]


def save_shard(path: Path, examples: Sequence[Example]) -> None:
    """One file: all examples end to end, with the length of each and of its prompt."""
    shard: dict[str, Tensor] = {
        "tokens": torch.cat([e.tokens for e in examples]).to(torch.int32),
        "length": torch.tensor([len(e.tokens) for e in examples]),
        "prompt_length": torch.tensor([e.prompt_length for e in examples]),
        "features": torch.cat([e.features for e in examples]).to(torch.bfloat16),
        "final": torch.cat([e.final for e in examples]).to(torch.bfloat16),
    }
    write_atomically(path, lambda file: torch.save(shard, file))


if __name__ == "__main__":
    main()
