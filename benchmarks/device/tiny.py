"""Every operator on tiny shapes on the GPU, for compute-sanitizer to watch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python_tests")]

import backends  # noqa: E402

from xpress_ext import ops  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args(argv).device
    for weight in backends.WEIGHT_DTYPES:
        # 21 rows: tiled; 7 rows: streaming. Odd sizes, so that edges are crossed.
        for N, V in ((1, 143), (3, 77)):
            problem = backends.random_problem(1, N=N, B=8, V=V, V_t=V + 20, weight=weight)
            there = problem.with_(
                **{
                    name: value.to(device)
                    for name, value in vars(problem).items()
                    if value is not None
                }
            )
            prev = torch.cat([there.predecessor[:, None], there.anchor[:, None]], 1)
            prev = prev[:, [0, 1, 1, 1, 1, 1, 1, 1]]
            xh = ops.project_hidden(there.hidden, there.hidden_proj)
            x = ops.causal_mix(xh, there.mixer)
            torch.ops.xpress.causal_mix_backward(x, xh, there.mixer)
            c = ops.fuse_mix(x, prev, there.token_table, there.mixer)
            z = ops.refiner_mlp(c, there.mlp_gate_up, there.mlp_down)[:, 1:]
            candidates = ops.top_candidates(there.base_logits, 9)[0]
            ops.readout_argmax(z, there.base_logits, there.readout)
            ops.readout_argmax(z, there.base_logits, there.readout, candidates)
            ops.refined_logits(z.flatten(0, 1), there.base_logits.flatten(0, 1), there.readout)
            for options in ((7, 0, False), (7, 9, False), (7, 3, True)):
                ops.jacobi_refine(*there.tensors, *options, None, there.d2t)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    print("every operator ran")


if __name__ == "__main__":
    main()
