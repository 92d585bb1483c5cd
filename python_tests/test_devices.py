"""Which device an operator runs on: dispatch, shapes on fake GPUs, and, with a GPU, the launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import backends
import pytest
import torch
from test_torch_contract import samples
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_get_all_op_names
from torch._subclasses.fake_tensor import FakeTensorMode

import xpress_ext
from xpress_ext import ops
from xpress_ext.build_info import CUDA_OPERATORS, format_build_info

_xpress = torch.ops.xpress
CUDA_BUILT = xpress_ext.build_info().cuda_built
needs_gpu = pytest.mark.skipif(
    not xpress_ext.build_info().cuda_operators, reason=xpress_ext.build_info().cuda_reason
)


def operator(sample: str) -> Any:
    """The operator that a call of `samples` is of."""
    return getattr(_xpress, sample.replace(",", "").split()[0]).default


def all_operators() -> list[str]:
    """Names of all that take tensors, with their overloads."""
    names = [name for name in _dispatch_get_all_op_names() if name.startswith("xpress::")]
    names = [name.removeprefix("xpress::") for name in names]
    return sorted(name for name in names if name[0] != "_" and name != "jacobi_workspace")


def to(device: str, *values: Any) -> tuple[Any, ...]:
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in values)


# --- dispatch, without a GPU


@pytest.mark.parametrize("name", all_operators())
@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_every_operator_answers_on_every_device(name: str, key: str) -> None:
    """With CUDA operators, or with the message that this build has none."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"xpress::{name}", key)


def test_the_listed_cuda_operators_are_all_there_are() -> None:
    assert sorted(CUDA_OPERATORS) == [name for name in all_operators() if "." not in name]


@pytest.mark.parametrize("name", samples(torch.float32))
def test_the_cuda_operator_wants_its_tensors_on_a_gpu(name: str) -> None:
    arguments = samples(torch.float32)[name]
    first = operator(name)._schema.arguments[0].name
    message = f"{first} is on the CPU; expected a CUDA device"
    error: type[Exception] = ValueError
    if not CUDA_BUILT:
        message, error = r"CUDA operators are not in this build .*XPRESS_CUDA=1", RuntimeError
    with pytest.raises(error, match=message):
        operator(name).redispatch(DispatchKeySet(DispatchKey.CUDA), *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")
def test_info_says_whether_cuda_operators_are_in() -> None:
    info = xpress_ext.build_info()
    line = next(
        line for line in format_build_info(info).splitlines() if line.startswith("CUDA operators")
    )
    assert ("in this build, but none runs here" in line) == CUDA_BUILT
    assert info.cuda_reason in line


# --- shapes, on GPUs that only torch's fake tensors have


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", samples(torch.float32))
def test_outputs_are_where_the_inputs_are(name: str, weight: torch.dtype) -> None:
    arguments = samples(weight)[name]
    expected = operator(name)(*arguments)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        outputs = operator(name)(*to("cuda:1", *fake))
    for got, wanted in zip(_tuple(outputs), _tuple(expected), strict=True):
        assert got.device == torch.device("cuda:1")
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


@pytest.mark.parametrize(("device", "other"), [("cuda:1", "cuda:0"), ("cpu", "cuda:0")])
def test_one_tensor_elsewhere_is_named(device: str, other: str) -> None:
    with FakeTensorMode():
        c, gate_up, down = torch.empty(2, 8, 32), torch.empty(128, 32), torch.empty(32, 64)
        with pytest.raises(ValueError, match=f"mlp_down is on {device}; expected {other}, where c"):
            ops.refiner_mlp(c.to(other), gate_up.to(other), down.to(device))


def test_causal_mix_has_a_gradient_on_every_device() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("xpress::causal_mix", "Autograd")


# --- with a GPU


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@needs_gpu
def test_two_devices_in_one_call_are_refused_by_name() -> None:
    c, gate_up, down = samples(torch.float32)["refiner_mlp"]
    with pytest.raises(ValueError, match=r"mlp_down is on the CPU; expected cuda:0, where c is"):
        ops.refiner_mlp(c.cuda(), gate_up.cuda(), down)


def _gpu_problem() -> backends.Problem:
    problem = backends.random_problem(1, V=40, V_t=60)
    return dataclasses.replace(
        problem,
        **{
            field.name: getattr(problem, field.name).cuda() for field in dataclasses.fields(problem)
        },
    )


def _with_an_outsider(name: str) -> tuple[list[Any], dict[str, Tensor | None]]:
    """Arguments of jacobi_refine of which the last block of one has an id outside its table."""
    problem = _gpu_problem()
    values = {
        "anchor": problem.anchor.clone(),
        "predecessor": problem.predecessor.clone(),
        "seed_tokens": problem.random_seeds(1).cuda(),
    }
    values[name][-1] = 60
    problem = problem.with_(anchor=values["anchor"], predecessor=values["predecessor"])
    return [*problem.tensors, 7], {"seed_tokens": values["seed_tokens"], "d2t": problem.d2t}


@needs_gpu
@pytest.mark.parametrize("name", ["anchor", "predecessor", "seed_tokens"])
def test_a_bad_id_spoils_its_own_block_only(name: str) -> None:
    arguments, options = _with_an_outsider(name)
    tokens, passes, _ = ops.jacobi_refine(*arguments, **options)
    assert tokens[-1].eq(-1).all()
    assert passes.tolist()[-1] == -1
    assert tokens[:-1].ge(0).all()
    assert passes[:-1].ge(1).all()


@needs_gpu
@pytest.mark.parametrize("name", ["anchor", "predecessor", "seed_tokens"])
def test_a_bad_id_is_named_where_checks_are_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, options = _with_an_outsider(name)
    monkeypatch.setenv("XPRESS_CHECK", "1")
    with pytest.raises(IndexError, match=rf"{name}\[1.*\] is 60; expected 0 <= id < 60"):
        ops.jacobi_refine(*arguments, **options)


@needs_gpu
def test_a_call_runs_on_the_current_stream_and_can_be_captured() -> None:
    x, mixer = samples(torch.float32)["causal_mix"]
    x, mixer = x.cuda(), mixer.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.causal_mix(x, mixer)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, ops.causal_mix(x, mixer))
