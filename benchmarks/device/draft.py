"""A whole draft at the size of Qwen3-8B: drafter, LM head and refiner, by random weights.

Checks the refined tokens against the reference (a token may differ where the reference's two best
logits are closer than bf16 rounding explains; such tokens are counted) and splits the time of a
draft into its three parts. Everything is random but of the right size; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python_tests")]

import backends  # noqa: E402

from benchmarks.inputs import PRESETS, planted_head  # noqa: E402
from benchmarks.timing import Spread  # noqa: E402
from xpress_ext import reference  # noqa: E402
from xpress_ext.drafter import DFlashConfig, DFlashDrafter  # noqa: E402

QWEN3_8B = DFlashConfig(
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
)
CONTEXT = 1024  # committed tokens before the block
REPEATS = 20
PASSES = 6


def main() -> None:
    torch.manual_seed(0)
    device, dtype = "cuda", torch.bfloat16
    with torch.device(device), torch.inference_mode():
        drafter = DFlashDrafter(QWEN3_8B).to(dtype).eval()
        embedding = torch.randn(QWEN3_8B.vocab_size, 4096, dtype=dtype) * 0.02
        lm_head = torch.randn(QWEN3_8B.vocab_size, 4096, dtype=dtype) * 0.02
    head = planted_head(PRESETS["qwen3-8b"], dtype)
    weights = tuple(weight.to(device) for weight in head.weights())
    anchor = torch.tensor([5], device=device)
    predecessor = torch.tensor([4], device=device)
    width = len(QWEN3_8B.target_layer_ids) * 4096

    with torch.inference_mode():
        cache = drafter.new_cache()
        context = torch.randn(1, CONTEXT, width, device=device, dtype=dtype)
        block = drafter.block_embeddings(embedding, anchor)
        drafter.draft(block, context, cache, 0)
        # As in decoding: a handful of newly committed tokens a step.
        new = context[:, :4]
        start = CONTEXT

        def draft() -> Tensor:
            return drafter.draft(block, new, cache, start)

        hidden = draft()
        parts: dict[str, Any] = {"drafter": lambda: draft()}
        parts["lm_head"] = lambda: hidden[:, 1:] @ lm_head.T
        base_logits = parts["lm_head"]()

        def refine(top_c: int = 0) -> Any:
            inputs = (base_logits, hidden, anchor, predecessor)
            return torch.ops.xpress.jacobi_refine(*inputs, *weights, PASSES, top_c)

        parts["refiner, full"] = lambda: refine()
        parts["refiner, C=32"] = lambda: refine(32)
        result = {
            "K": PASSES,
            "microseconds": {name: vars(time_of(part)) for name, part in parts.items()},
            **compare(base_logits, hidden, anchor, predecessor, weights, refine),
        }
    print(json.dumps(result, indent=1))
    if result["unexplained"]:
        raise SystemExit(f"{result['unexplained']} tokens differ from the reference")


def time_of(part: Any) -> Spread:
    """Microseconds of a call, launches included, by events."""
    times = []
    for i in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        part()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(1e3 * begin.elapsed_time(end))
    return Spread.of(times)


def compare(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    weights: tuple[Tensor, ...],
    refine: Any,
) -> dict[str, int]:
    """How the GPU's tokens differ from the reference's, computed on the CPU, pass by pass.

    After one pass both have read the same seed, so a token that differs is a near-tie or an error.
    """
    on_cpu = [t.cpu() for t in (base_logits, hidden, anchor, predecessor, *weights)]
    problem = backends.Problem(*on_cpu)
    seed = reference.top_candidates(problem.base_logits, 1)[0][..., 0]
    logits = problem.logits("reference", seed)
    bound = backends.rounding_bound(problem, seed)
    expected = logits.argmax(-1)
    inputs = (base_logits, hidden, anchor, predecessor)
    tokens = torch.ops.xpress.jacobi_refine(*inputs, *weights, 1)[0].cpu()
    differs = tokens != expected
    gap = logits.gather(-1, expected[..., None]) - logits.gather(-1, tokens[..., None])
    unexplained = differs & (gap[..., 0] > 2 * bound)
    exact = refine_exact(inputs, weights)
    return {
        "near_ties": int(differs.sum()),
        "unexplained": int(unexplained.sum()),
        "exact_differs_from_full": int((exact[0] != exact[1]).sum()),
    }


def refine_exact(inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Exact top-C and all passes over the full vocabulary: the same tokens, bit for bit."""
    num_drafted = inputs[0].shape[1]
    full = torch.ops.xpress.jacobi_refine(*inputs, *weights, num_drafted)[0]
    exact = torch.ops.xpress.jacobi_refine(*inputs, *weights, num_drafted, 32, True)[0]
    return full, exact


if __name__ == "__main__":
    main()
