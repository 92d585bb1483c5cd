"""Capture of jacobi_refine in a CUDA graph, and replay with new inputs: the same as eager calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python_tests")]

import backends  # noqa: E402

MODES = {
    "full": (7, 0, False),
    "2 passes": (2, 0, False),
    "C=9": (7, 9, False),
    "exact": (7, 5, True),
}


def main() -> None:
    checked = 0
    for N in (1, 5):
        problems = [
            backends.random_problem(seed, N=N, B=8, V=613, weight=torch.bfloat16)
            for seed in range(4)
        ]
        for name, options in MODES.items():
            checked += check(f"{name}, N={N}", problems, options)
    print(json.dumps({"outputs_equal": checked}))


def check(name: str, problems: list[backends.Problem], options: tuple[int, int, bool]) -> int:
    """Captures a call, replays it with the inputs of each problem; how many outputs were equal."""
    weights = [w.cuda() for w in problems[0].tensors[4:]]
    inputs = [t.cuda() for t in problems[0].tensors[:4]]

    def call() -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = torch.ops.xpress.jacobi_refine(*inputs, *weights, *options)
        return outputs

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    checked = 0
    for problem in problems:
        for to, value in zip(inputs, problem.tensors[:4], strict=True):
            to.copy_(value)
        graph.replay()
        expected = call()
        torch.cuda.synchronize()
        for got, wanted in zip(captured, expected, strict=True):
            if not torch.equal(got, wanted):
                raise SystemExit(f"{name}: a replay differs from an eager call")
            checked += 1
    return checked


if __name__ == "__main__":
    main()
