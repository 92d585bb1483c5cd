"""Digests of what the CPU operators compute, one per operator and case: equal digests, equal bits.

Run as a program it prints them as JSON, so that a test can compare processes whose environments
force different instruction sets.
"""

from __future__ import annotations

import hashlib
import json

import backends
import torch
from backends import Problem
from torch import Tensor

from xpress_ext import build_info, ops


def digests() -> dict[str, str]:
    """Name of operator and case -> digest of its outputs."""
    found: dict[str, str] = {}
    for weight in backends.WEIGHT_DTYPES:
        for inputs in (torch.float32, weight):
            case = f"{weight} weights, {inputs} inputs"
            problem = backends.random_problem(
                1, N=3, B=16, V=1613, H=160, r=96, m=160, V_t=2000, weight=weight, inputs=inputs
            )
            found |= _of_problem(case, problem)
    # More rows than any tile takes, and the greatest block and rank.
    batch = backends.random_problem(2, N=40, V=600, V_t=700, weight=torch.bfloat16)
    found |= _of_problem("large batch", batch)
    widest = backends.random_problem(
        3, N=1, B=32, V=700, H=512, r=512, m=544, V_t=1000, strength="mild"
    )
    found |= _of_problem("widest head", widest)
    return found


def _of_problem(case: str, problem: Problem) -> dict[str, str]:
    tokens = problem.random_seeds(0)
    prev = torch.cat([problem.predecessor[:, None], problem.anchor[:, None], tokens[:, :-1]], 1)
    xh = ops.project_hidden(problem.hidden, problem.hidden_proj)
    x = ops.causal_mix(xh, problem.mixer)
    gradients = torch.ops.xpress.causal_mix_backward(x, xh, problem.mixer)
    c = ops.fuse_mix(x, prev, problem.token_table, problem.mixer)
    z = ops.refiner_mlp(c, problem.mlp_gate_up, problem.mlp_down)[:, 1:]
    candidates, logits = ops.top_candidates(problem.base_logits, 33)
    outputs = {
        "project_hidden": (xh,),
        "causal_mix": (x,),
        "causal_mix_backward": gradients,
        "fuse_mix": (c,),
        "refiner_mlp": (z,),
        "top_candidates": (candidates, logits),
        "readout_argmax": ops.readout_argmax(z, problem.base_logits, problem.readout),
        "readout_argmax of candidates": ops.readout_argmax(
            z, problem.base_logits, problem.readout, candidates
        ),
        "refined_logits": (
            ops.refined_logits(z.flatten(0, 1), problem.base_logits.flatten(0, 1), problem.readout),
        ),
        "jacobi_refine": problem.refine("cpu"),
        "jacobi_refine, 2 passes": problem.refine("cpu", num_passes=2, seed_tokens=tokens),
        "jacobi_refine of candidates": problem.refine("cpu", top_c=33),
        "jacobi_refine, exact": problem.refine("cpu", top_c=5, exact=True),
    }
    return {f"{name}: {case}": _digest(tensors) for name, tensors in outputs.items()}


def _digest(tensors: tuple[Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(json.dumps({"isa": build_info().cpu_isa, "digests": digests()}))
