"""The operators on a real GPU, on tensors of the CPU: a backend for tests.

Inputs are moved to the GPU as they lie in memory, gaps and offsets included, outputs back. With
XPRESS_CHECK=1 bad ids raise here too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xpress_ext import ops

os.environ.setdefault("XPRESS_CHECK", "1")


def _to_gpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.requires_grad:
        return value.cuda()
    moved = torch.empty(0, dtype=value.dtype, device="cuda")
    storage = value.untyped_storage().cuda()
    return moved.set_(storage, value.storage_offset(), value.shape, value.stride())


def _from_gpu(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.cpu()
    return tuple(output.cpu() for output in outputs)


def _on_gpu(operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        moved = {name: _to_gpu(value) for name, value in named.items()}
        return _from_gpu(operator(*map(_to_gpu, arguments), **moved))

    return call


project_hidden = _on_gpu(ops.project_hidden)
causal_mix = _on_gpu(ops.causal_mix)
causal_mix_backward = _on_gpu(torch.ops.xpress.causal_mix_backward)
fuse_mix = _on_gpu(ops.fuse_mix)
refiner_mlp = _on_gpu(ops.refiner_mlp)
top_candidates = _on_gpu(ops.top_candidates)
readout_argmax = _on_gpu(ops.readout_argmax)
refined_logits = _on_gpu(ops.refined_logits)
jacobi_refine = _on_gpu(ops.jacobi_refine)
