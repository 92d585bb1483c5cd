"""Every operator on tiny shapes on the GPU, for compute-sanitizer to watch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python_tests")]

import backends  # noqa: E402

from xpress_ext import ops  # noqa: E402


def main() -> None:
    for weight in backends.WEIGHT_DTYPES:
        # 21 rows: tiled; 7 rows: streaming. Odd sizes, so that edges are crossed.
        for N, V in ((1, 143), (3, 77)):
            problem = backends.random_problem(1, N=N, B=8, V=V, V_t=V + 20, weight=weight)
            on_gpu = problem.with_(
                **{name: value.cuda() for name, value in vars(problem).items() if value is not None}
            )
            prev = torch.cat([on_gpu.predecessor[:, None], on_gpu.anchor[:, None]], 1)
            prev = prev[:, [0, 1, 1, 1, 1, 1, 1, 1]]
            xh = ops.project_hidden(on_gpu.hidden, on_gpu.hidden_proj)
            x = ops.causal_mix(xh, on_gpu.mixer)
            torch.ops.xpress.causal_mix_backward(x, xh, on_gpu.mixer)
            c = ops.fuse_mix(x, prev, on_gpu.token_table, on_gpu.mixer)
            z = ops.refiner_mlp(c, on_gpu.mlp_gate_up, on_gpu.mlp_down)[:, 1:]
            candidates = ops.top_candidates(on_gpu.base_logits, 9)[0]
            ops.readout_argmax(z, on_gpu.base_logits, on_gpu.readout)
            ops.readout_argmax(z, on_gpu.base_logits, on_gpu.readout, candidates)
            ops.refined_logits(z.flatten(0, 1), on_gpu.base_logits.flatten(0, 1), on_gpu.readout)
            for options in ((7, 0, False), (7, 9, False), (7, 3, True)):
                ops.jacobi_refine(*on_gpu.tensors, *options, None, on_gpu.d2t)
    torch.cuda.synchronize()
    print("every operator ran")


if __name__ == "__main__":
    main()
