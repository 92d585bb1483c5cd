"""vLLM's XPress head as a peer: loads its two files from an unpacked wheel of vLLM 0.33.

vLLM itself is not imported, and nothing of it is part of this project: the two files that hold the
head and its Triton kernels are executed as they are, with stand-ins for the rest of the package
(configuration, logger, layers). The greedy refinement calls one of them: vLLM's choice of the top
candidates is torch.topk here, as it is there wherever FlashInfer is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import FoldedWeights

HEAD = "vllm.model_executor.models.qwen3_xpress"
KERNELS = "vllm.v1.worker.gpu.spec_decode.xpress.kernels"


class _StandIn(types.ModuleType):
    """A module of vLLM of which only names are needed: every one of them is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})


def load(folder: Path) -> type[torch.nn.Module]:
    """The class of the head.

    Args:
        folder: where a vLLM 0.33 wheel was unpacked (it holds ``vllm/``).

    Raises:
        FileNotFoundError: one of the two files is not there.
        RuntimeError: Triton is missing.
    """
    files = {name: folder / (name.replace(".", "/") + ".py") for name in (KERNELS, HEAD)}
    for path in files.values():
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; give --peer-vllm the folder of an unpacked vLLM 0.33 wheel"
            )
    added = set[str]()
    try:
        for name in ("vllm.config", "vllm.logger", *_parents(HEAD), *_parents(KERNELS)):
            _add(name, added)
        for name in ("qwen3_dflash", "utils"):
            _add(f"vllm.model_executor.models.{name}", added)
        _add("vllm.model_executor.layers.vocab_parallel_embedding", added)
        sys.modules["vllm.logger"].__dict__["init_logger"] = lambda name: types.SimpleNamespace(
            info=lambda *_: None
        )
        processor = _add("vllm.model_executor.layers.logits_processor", added)
        processor.__dict__["_topk"] = lambda logits, k: torch.topk(logits, k, dim=-1, sorted=False)
        triton_utils = _add("vllm.triton_utils", added)
        triton_utils.__dict__.update(zip(("triton", "tl"), _triton(), strict=True))
        kernels = _execute(KERNELS, files[KERNELS], added)
        sys.modules["vllm.v1.worker.gpu.spec_decode.xpress"].__dict__["kernels"] = kernels
        head = _execute(HEAD, files[HEAD], added)
    finally:
        for name in added:
            sys.modules.pop(name, None)
    found: type[torch.nn.Module] = head.XPressRefinerHead
    return found


def _triton() -> tuple[Any, Any]:
    try:
        import triton
        import triton.language
    except ImportError:
        raise RuntimeError("vLLM's head needs Triton, which is not installed") from None
    return triton, triton.language


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _add(name: str, added: set[str]) -> types.ModuleType:
    """A stand-in under this name, and under its parents' names."""
    for module in (*_parents(name), name):
        if module not in sys.modules:
            sys.modules[module] = _StandIn(module)
            sys.modules[module].__path__ = []
            added.add(module)
    return sys.modules[name]


def _execute(name: str, path: Path, added: set[str]) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    added.add(name)
    spec.loader.exec_module(module)
    return module


class VllmHead:
    """The head with our folded weights, on the weights' device.

    Its fuse is unfolded: `in_proj = [I, I, I]` makes its projections our folded ones.

    Args:
        head_class: from `load`.
        weights: folded weights in bf16.
        N: blocks.
        C: candidates, 0 for the full vocabulary.
    """

    def __init__(
        self, head_class: type[torch.nn.Module], weights: FoldedWeights, N: int, C: int
    ) -> None:
        proj_h, proj_g = weights.hidden_proj
        rank, hidden_size = proj_h.shape
        width, vocab, num_slots = (
            len(weights.mlp_gate_up) // 2,
            len(weights.readout),
            len(weights.mixer),
        )
        with torch.device(proj_h.device):
            head: Any = head_class(
                vocab, hidden_size, num_slots, rank, width, max_num_reqs=N, topc=C
            ).to(proj_h.dtype)
        eye = torch.eye(rank, dtype=proj_h.dtype, device=proj_h.device)
        below = weights.mixer.movedim(-1, 0).tril()
        gate, up = weights.mlp_gate_up.chunk(2)
        with torch.no_grad():
            for parameter, value in (
                (head.w1.weight, weights.token_table),
                (head.down_h.weight, proj_h),
                (head.down_g.weight, proj_g),
                (head.in_proj.weight, torch.cat([eye, eye, eye], dim=1)),
                (head.mix_L, below),
                (head.mlp_gate.weight, gate),
                (head.mlp_up.weight, up),
                (head.mlp_down.weight, weights.mlp_down),
                (head.w2.weight, weights.readout),
            ):
                parameter.copy_(value)
        head.build_fused_buffers()
        self.head = head

    def __call__(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        predecessor: Tensor,
        num_passes: int,
    ) -> Tensor:
        """Tokens [N, B-1]. `base_logits` [N, B, V], slot 0's row unused: its own layout."""
        tokens: Tensor = self.head.jacobi_refine_greedy(
            base_logits, hidden, anchor, predecessor, num_passes
        )
        return tokens
