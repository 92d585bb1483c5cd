"""A whole draft with random weights: drafter, LM head and refiner, at the size of Qwen3-8B.

Checks the refined tokens against the reference (a token may differ where the reference's two best
logits are closer than bf16 rounding explains; such tokens are counted) and splits the time of a
draft into its parts, each a graph replayed with cold caches, as in a draft each part follows the
gigabytes of another. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python_tests")]

import backends  # noqa: E402

from benchmarks.cuda_latency import Replay, time_all  # noqa: E402
from benchmarks.inputs import PRESETS, planted_head  # noqa: E402
from benchmarks.timing import Spread, interleaved  # noqa: E402
from xpress_ext import ops, reference  # noqa: E402
from xpress_ext.drafter import DFlashConfig, DFlashDrafter  # noqa: E402

DRAFTERS = {
    "qwen3-8b": DFlashConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        block_size=16,
    ),
    "tiny": DFlashConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1024,
        num_target_layers=8,
        target_layer_ids=(1, 4),
        mask_token_id=1000,
        block_size=8,
    ),
}
CONTEXT = 1024  # tokens committed before the last step
NEW_TOKENS = 4  # committed by the last step
REPEATS = 20
PASSES = 6
C = 32


class Draft:
    """Random weights and the parts of one draft."""

    def __init__(self, size: str, device: str) -> None:
        config, dtype = DRAFTERS[size], torch.bfloat16
        torch.manual_seed(0)
        with torch.device(device):
            self.drafter = DFlashDrafter(config).to(dtype).eval()
            table = (config.vocab_size, config.hidden_size)
            embedding = (torch.randn(table) * 0.02).to(dtype)
            self.lm_head = (torch.randn(table) * 0.02).to(dtype)
            self.anchor, self.predecessor = torch.tensor([5]), torch.tensor([4])
            width = len(config.target_layer_ids) * config.hidden_size
            context = torch.randn(1, CONTEXT, width, dtype=dtype)
            self.new_context = torch.randn(1, NEW_TOKENS, width, dtype=dtype)
        head = planted_head(PRESETS[size], dtype)
        # Larger than training begins with, so that tokens matter to each other and passes change
        # them.
        head = replace(head, token_table=32 * head.token_table, readout=8 * head.readout)
        self.weights = tuple(weight.to(device) for weight in head.weights())
        self.block = self.drafter.block_embeddings(embedding, self.anchor)
        self.cache = self.drafter.new_cache()
        self.drafter.draft(self.block, context, self.cache, CONTEXT)

    def hidden(self) -> Tensor:
        """The drafter's part: always the same step."""
        self.cache.length = CONTEXT
        return self.drafter.draft(self.block, self.new_context, self.cache, CONTEXT + NEW_TOKENS)

    def base_logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, 1:] @ self.lm_head.T

    def refine(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        num_passes: int,
        top_c: int = 0,
        exact: bool = False,
    ) -> Tensor:
        """Tokens [1, B-1]."""
        inputs = (base_logits, hidden, self.anchor, self.predecessor)
        return ops.jacobi_refine(*inputs, *self.weights, num_passes, top_c, exact)[0]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=DRAFTERS, default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    with torch.inference_mode():
        draft = Draft(args.size, args.device)
        hidden = draft.hidden()
        base_logits = draft.base_logits(hidden)
        result: dict[str, Any] = compare(draft, base_logits, hidden)
        times = time_parts(draft, base_logits, hidden, args.device)
    result["K"] = PASSES
    result["microseconds"] = {name: asdict(spread) for name, spread in times.items()}
    print(json.dumps(result, indent=1))
    wrong = result["unexplained"] + result["exact_differs_from_full"]
    if wrong:
        print(f"{wrong} tokens are wrong", file=sys.stderr)
    return int(wrong > 0)


def time_parts(draft: Draft, base_logits: Tensor, hidden: Tensor, device: str) -> dict[str, Spread]:
    """Microseconds of each part, and of all of them in one graph."""

    def whole(top_c: int) -> Tensor:
        hidden = draft.hidden()
        return draft.refine(draft.base_logits(hidden), hidden, PASSES, top_c)

    parts: dict[str, Callable[[], Tensor]] = {
        "drafter": draft.hidden,
        "lm_head": lambda: draft.base_logits(hidden),
        "refiner, full": lambda: draft.refine(base_logits, hidden, PASSES),
        f"refiner, C={C}": lambda: draft.refine(base_logits, hidden, PASSES, C),
        "draft, full": lambda: whole(0),
        f"draft, C={C}": lambda: whole(C),
    }
    if not device.startswith("cuda"):
        return interleaved(parts, REPEATS)
    replays = {name: Replay(part, captured=True) for name, part in parts.items()}
    return time_all(replays, REPEATS, cold=True)


def compare(draft: Draft, base_logits: Tensor, hidden: Tensor) -> dict[str, Any]:
    """How the tokens differ from what the reference, on the CPU, makes of the same block.

    Twice: after one pass from the seed; and at the end, where one more pass of the reference must
    change nothing. A token that differs is a near-tie or an error. Exact top-C must give the tokens
    of the full vocabulary, bit for bit.
    """
    inputs = (base_logits, hidden, draft.anchor, draft.predecessor)
    problem = backends.Problem(*(tensor.cpu() for tensor in (*inputs, *draft.weights)))
    seed = reference.top_candidates(problem.base_logits, 1)[0][..., 0]
    first = draft.refine(base_logits, hidden, 1).cpu()
    last = draft.refine(base_logits, hidden, problem.num_drafted).cpu()
    exact = draft.refine(base_logits, hidden, problem.num_drafted, C, exact=True).cpu()
    near, unexplained = 0, 0
    for before, after in ((seed, first), (last, last)):
        logits = problem.logits("reference", before)
        expected = logits.argmax(-1)
        behind = logits.amax(-1) - logits.gather(-1, after[..., None])[..., 0]
        beyond = behind > 2 * backends.rounding_bound(problem, before)
        near += int(((after != expected) & ~beyond).sum())
        unexplained += int(beyond.sum())
    return {
        "tokens": problem.num_drafted,
        "changed_by_refining": int((last != seed).sum()),
        "near_ties": near,
        "unexplained": unexplained,
        "exact_differs_from_full": int((exact != last).sum()),
    }


if __name__ == "__main__":
    sys.exit(main())
