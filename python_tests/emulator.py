"""The operators on the emulated GPU (csrc/emulator), on torch tensors: a backend for tests.

The functions have the names and signatures of `xpress_ext.ops`. Which GPU is emulated, and in which
order its threads run, is set by `on`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from xpress_ext import ops

# XPRESS_EMULATOR_MODULE names another folder: a mutated emulator's (test_mutations.py).
_DEFAULT = Path(__file__).resolve().parent.parent / "build" / "emulator"
BUILD = Path(os.environ.get("XPRESS_EMULATOR_MODULE") or _DEFAULT)


def _load() -> ModuleType:
    found = sorted(BUILD.glob("xpress_emulator.*.so"))
    if not found:
        raise ImportError(f"no emulator in {BUILD}: build it with `XPRESS_EMULATOR=1 make build`")
    spec = importlib.util.spec_from_file_location("xpress_emulator", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module = _load()
_gpu = _module.Gpu()
Fault = _module.Fault


@contextmanager
def on(**gpu: Any) -> Iterator[None]:
    """Within it, operators run on this GPU.

    Args:
        gpu: seed (the order of threads), num_sms, shared_bytes_per_cta, has_clusters.
    """
    global _gpu
    before, _gpu = _gpu, _module.Gpu(**gpu)
    try:
        yield
    finally:
        _gpu = before


def traffic() -> dict[str, tuple[int, int]]:
    """Name of tensor -> bytes loaded and stored by the last call."""
    return dict(_module.traffic())


def _call(name: str, *arguments: Any) -> Any:
    outputs = getattr(_module, name)(_gpu, *map(_to_numpy, arguments))
    if isinstance(outputs, tuple):
        return tuple(_to_torch(output) for output in outputs)
    return _to_torch(outputs)


def _to_numpy(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    argument = argument.detach()
    return (argument.view(torch.uint16) if argument.dtype is torch.bfloat16 else argument).numpy()


def _to_torch(array: Any) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype is torch.uint16 else tensor


def _operator(name: str) -> Callable[..., Any]:
    """The operator of that name, with the signature of `xpress_ext.ops`."""
    signature = inspect.signature(getattr(ops, name))

    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return _call(name, *bound.args)

    return call


project_hidden = _operator("project_hidden")
fuse_mix = _operator("fuse_mix")
refiner_mlp = _operator("refiner_mlp")
top_candidates = _operator("top_candidates")
readout_argmax = _operator("readout_argmax")
refined_logits = _operator("refined_logits")
jacobi_refine = _operator("jacobi_refine")


class _CausalMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mixer: Tensor) -> Tensor:
        ctx.save_for_backward(x, mixer)
        return _call("causal_mix", x.contiguous(), mixer.contiguous())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        return causal_mix_backward(grad_out.contiguous(), *ctx.saved_tensors)


def causal_mix(x: Tensor, mixer: Tensor) -> Tensor:
    return _CausalMix.apply(x, mixer)


def causal_mix_backward(grad_out: Tensor, x: Tensor, mixer: Tensor) -> tuple[Tensor, Tensor]:
    return _call("causal_mix_backward", grad_out, x, mixer)
