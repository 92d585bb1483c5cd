"""The torch layer's CUDA half, over the emulator: tensors in the CPU's memory pass for a GPU's.

Run by `test_cuda_layer.py` in a process of its own, with a copy of the package whose library is the
emulated one (csrc/emulator/torch_gpu.cpp). What kernels compute is tested elsewhere, here whether
the layer hands them the right things, and what it says where it refuses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_torch_contract import samples
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from xpress_ext import ops
from xpress_ext._library import LIBRARY_PATH

_gpu = ctypes.CDLL(str(LIBRARY_PATH))
_gpu.gpu_num_waits.restype = ctypes.c_int64
OK, INVALID_ARGUMENT, UNSUPPORTED_SHAPE, NO_KERNEL_IMAGE, CUDA_ERROR = range(5)
OUTPUTS = ("tokens", "passes", "full_readouts")


@contextmanager
def switched_on(status: int = OK, places: dict[Tensor, int] | None = None) -> Iterator[None]:
    """While it lasts all tensors are on cuda:0, or where `places` puts them (-1: the CPU).

    Waiting for a stream reports `status`.
    """
    _gpu.gpu_switch(True)
    _gpu.gpu_report(status)
    for tensor, index in (places or {}).items():
        _gpu.gpu_place(ctypes.c_void_p(tensor.data_ptr()), index)
    try:
        yield
    finally:
        _gpu.gpu_switch(False)


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """An operator, by the name of a sample, as tensors on a GPU get it."""
    overload = "out" if "out" in options or "workspace" in options else "default"
    operator = getattr(getattr(torch.ops.xpress, name.replace(",", "").split()[0]), overload)
    return operator.redispatch(DispatchKeySet(DispatchKey.CUDA), *arguments, **options)


def on_cpu(name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(torch.ops.xpress, name.replace(",", "").split()[0])(*arguments, **options)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.fixture
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPRESS_CHECK", "1")


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", samples(torch.float32))
def test_results_are_those_of_the_cpu(name: str, weight: torch.dtype) -> None:
    arguments = samples(weight)[name]
    expected = on_cpu(name, *arguments)
    with switched_on():
        outputs = call(name, *arguments)
    for got, wanted in zip(as_tuple(outputs), as_tuple(expected), strict=True):
        torch.testing.assert_close(got, wanted, check_stride=True)


def test_the_out_forms_write_what_the_others_return_and_nothing_else() -> None:
    calls = samples(torch.bfloat16)
    rows = calls["refined_logits"]
    out = torch.full((7, 40), torch.nan)
    with switched_on():
        call("refined_logits", *rows, out=out)
        assert torch.equal(out, call("refined_logits", *rows))
    for name, options in {"jacobi_refine": (0, False), "jacobi_refine, exact": (5, True)}.items():
        size = ops.jacobi_workspace(2, 8, 32, 32, 64, *options, device="cuda")
        memory = _aligned_bytes(size + 4096)
        outputs = (torch.full((2, 7), -7), *torch.full((2, 2), -7, dtype=torch.int32))
        with switched_on():
            named = dict(zip(OUTPUTS, outputs, strict=True))
            call(name, *calls[name], **named, workspace=memory[:size])
            expected = call(name, *calls[name])
        for got, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(got, wanted)
        assert memory[size:].eq(0xA5).all()


@pytest.mark.parametrize(
    ("size", "offset", "message"),
    [(-1, 0, "workspace has [0-9]+ bytes; expected at least"), (0, 64, "not aligned to 128 bytes")],
)
def test_a_workspace_that_does_not_do_is_refused(size: int, offset: int, message: str) -> None:
    arguments = samples(torch.float32)["jacobi_refine"]
    size += ops.jacobi_workspace(2, 8, 32, 32, 64, device="cuda")
    memory = _aligned_bytes(size + offset)
    outputs = (torch.empty(2, 7, dtype=torch.int64), *torch.empty(2, 2, dtype=torch.int32))
    named = dict(zip(OUTPUTS, outputs, strict=True))
    with switched_on(), pytest.raises(ValueError, match=message):
        call("jacobi_refine", *arguments, **named, workspace=memory[offset:])


def _aligned_bytes(size: int) -> Tensor:
    memory = torch.full((size + 128,), 0xA5, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 128 :][:size]


@pytest.mark.parametrize("name", samples(torch.float32))
def test_a_call_runs_on_the_device_of_its_tensors(name: str) -> None:
    arguments = samples(torch.float32)[name]
    with switched_on(places={a: 1 for a in arguments if isinstance(a, Tensor)}):
        call(name, *arguments)
        assert _gpu.gpu_guarded() == 1


@pytest.mark.parametrize(("place", "where"), [(-1, "the CPU"), (1, "cuda:1")])
@pytest.mark.parametrize("name", samples(torch.float32))
def test_a_tensor_elsewhere_is_named(name: str, place: int, where: str) -> None:
    arguments = samples(torch.float32)[name]
    schema = getattr(torch.ops.xpress, name.replace(",", "").split()[0]).default._schema
    tensors = [i for i, argument in enumerate(arguments) if isinstance(argument, Tensor)]
    for i in tensors[1:]:
        message = f"{schema.arguments[i].name} is on {where}; expected cuda:0, where"
        with (
            switched_on(places={arguments[i]: place}),
            pytest.raises(ValueError, match=message),
        ):
            call(name, *arguments)


# --- ids


def _with_an_id(name: str, argument: int, value: int) -> list[Any]:
    """A sample of which the last id of one argument is `value`."""
    arguments = list(samples(torch.float32)[name])
    arguments[argument] = arguments[argument].clone()
    arguments[argument].view(-1)[-1] = value
    return arguments


BAD_IDS = [
    ("fuse_mix", 1, 60),
    ("readout_argmax of candidates", 3, 40),
    ("jacobi_refine", 2, -1),
    ("jacobi_refine", 3, 60),
    ("jacobi_refine from seeds", 13, 60),
    ("jacobi_refine", 14, 60),
    ("jacobi_refine, exact", 14, -(2**62)),
]


@pytest.mark.usefixtures("_checks")
@pytest.mark.parametrize(("name", "argument", "value"), BAD_IDS)
def test_a_check_names_a_bad_id_as_the_cpu_does(name: str, argument: int, value: int) -> None:
    arguments = _with_an_id(name, argument, value)
    with pytest.raises(IndexError) as expected:
        on_cpu(name, *arguments)
    with switched_on(), pytest.raises(IndexError) as got:
        call(name, *arguments)
    assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize(("name", "argument", "value"), BAD_IDS)
def test_without_a_check_nothing_is_raised_or_waited_for(
    name: str, argument: int, value: int
) -> None:
    with switched_on():
        call(name, *_with_an_id(name, argument, value))
        assert _gpu.gpu_num_waits() == 0


@pytest.mark.usefixtures("_checks")
@pytest.mark.parametrize("name", samples(torch.float32))
def test_a_check_waits_for_the_end_of_the_call(name: str) -> None:
    with switched_on():
        call(name, *samples(torch.float32)[name])
        assert _gpu.gpu_num_waits() == 1


# --- failures


@pytest.mark.usefixtures("_checks")
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (
            INVALID_ARGUMENT,
            ValueError,
            r"causal_mix\(N = 2, B = 8, r = 32\): no CUDA kernel .* 12.0",
        ),
        (UNSUPPORTED_SHAPE, ValueError, r"causal_mix\(N = 2, B = 8, r = 32\): no CUDA kernel"),
        (NO_KERNEL_IMAGE, RuntimeError, r"this GPU is 12.0; build .* TORCH_CUDA_ARCH_LIST=12.0"),
        (CUDA_ERROR, RuntimeError, r"N = 2, .*: CUDA error: an illegal memory access"),
    ],
)
def test_a_failure_says_what_and_why(status: int, error: type[Exception], message: str) -> None:
    with switched_on(status), pytest.raises(error, match=message):
        call("causal_mix", *samples(torch.float32)["causal_mix"])


@pytest.mark.parametrize("name", samples(torch.float32))
def test_shapes_are_refused_as_on_the_cpu(name: str) -> None:
    for i, argument in enumerate(samples(torch.float32)[name]):
        if not isinstance(argument, Tensor):
            continue
        for wrong in (argument[None], argument.to(torch.complex64)):
            arguments = list(samples(torch.float32)[name])
            arguments[i] = wrong
            with pytest.raises(ValueError, match="expected") as expected:
                on_cpu(name, *arguments)
            with switched_on(), pytest.raises(ValueError, match="expected") as got:
                call(name, *arguments)
            assert str(got.value).splitlines()[0] == str(expected.value).splitlines()[0]
