"""What only the compiled operators can be given wrongly: memory, devices, sizes beyond counting."""

from __future__ import annotations

import backends
import pytest
import torch
from torch import Tensor

from xpress_ext import ops

_xpress = torch.ops.xpress
_NAMES = [
    "base_logits",
    "hidden",
    "anchor",
    "predecessor",
    "hidden_proj",
    "token_table",
    "mixer",
    "mlp_gate_up",
    "mlp_down",
    "readout",
]


def _arguments() -> dict[str, Tensor]:
    problem = backends.random_problem(seed=0, N=2, B=4, V=16, H=32, r=32, m=32, V_t=20)
    assert problem.d2t is not None
    named = dict(zip(_NAMES, problem.tensors, strict=True))
    seed_tokens = torch.zeros(2, 3, dtype=torch.int64)
    return {**named, "seed_tokens": seed_tokens, "d2t": problem.d2t}


def _outputs() -> dict[str, Tensor]:
    return {
        "tokens": torch.empty(2, 3, dtype=torch.int64),
        "passes": torch.empty(2, dtype=torch.int32),
        "full_readouts": torch.empty(2, dtype=torch.int32),
        "workspace": torch.empty(ops.jacobi_workspace(2, 4, 32, 32, 32), dtype=torch.uint8),
    }


@pytest.mark.parametrize("name", [*_NAMES, "seed_tokens", "d2t"])
def test_a_workspace_over_an_input_is_refused(name: str) -> None:
    """Ids are checked once: were they overwritten after that, rows outside the tables were read."""
    arguments, outputs = _arguments(), _outputs()
    given = arguments[name]
    arguments[name] = (
        outputs["workspace"][: given.numel() * given.element_size()].view(given.dtype)
    ).view(given.shape)
    arguments[name].copy_(given)
    with pytest.raises(ValueError, match=f"workspace shares memory with {name}"):
        _xpress.jacobi_refine.out(**arguments, num_passes=3, **outputs)


@pytest.mark.parametrize(("first", "second"), [("passes", "tokens"), ("full_readouts", "passes")])
def test_outputs_that_share_memory_are_refused(first: str, second: str) -> None:
    outputs = _outputs()
    outputs[first] = outputs[second].view(torch.int32).flatten()[:2]
    with pytest.raises(ValueError, match="shares memory with"):
        _xpress.jacobi_refine.out(**_arguments(), num_passes=3, **outputs)


@pytest.mark.parametrize("shift", [0, 1])
def test_logits_over_their_base_logits_are_refused(shift: int) -> None:
    memory = torch.randn(5, 16)
    z, readout = torch.randn(4, 32), torch.randn(16, 32)
    with pytest.raises(ValueError, match="out shares memory with base_logits"):
        ops.refined_logits(z, memory[:4], readout, out=memory[shift : shift + 4])


@pytest.mark.parametrize("name", [*_NAMES, "seed_tokens", "d2t"])
def test_one_tensor_without_data_among_others_is_named(name: str) -> None:
    arguments = _arguments()
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} is on the meta device"):
        _xpress.jacobi_refine(**arguments, num_passes=3)


def test_shapes_come_from_tensors_without_data() -> None:
    arguments = {name: tensor.to("meta") for name, tensor in _arguments().items()}
    tokens, passes, full_readouts = _xpress.jacobi_refine(**arguments, num_passes=3)
    assert tokens.shape == (2, 3)
    assert passes.shape == full_readouts.shape == (2,)


def test_every_offset_is_checked_even_of_ids_that_never_win() -> None:
    arguments = _arguments()
    arguments["d2t"] = arguments["d2t"].clone()
    arguments["d2t"][5] = 1000
    arguments["base_logits"][..., 5] = -torch.inf
    with pytest.raises(IndexError, match=r"d2t\[5\] is 1000; expected 0 <= v \+ d2t\[v\] < 20"):
        _xpress.jacobi_refine(**arguments, num_passes=3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2**62, 4, 32, 32, 32, 0, False), "N = 4611686018427387904"),
        ((-1, 4, 32, 32, 32, 0, False), "N = -1"),
        ((2, 4, 32, 32, 2**60, 0, False), "m = 1152921504606846976"),
        ((2, 4, 2**60, 32, 32, 0, False), "H = 1152921504606846976"),
        ((2, 4, 32, 32, 32, 0, True), "exact is True with top_c = 0"),
        ((2, 4, 32, 32, 32, 1025, False), "top_c is 1025"),
    ],
)
def test_a_workspace_of_impossible_sizes_is_refused(sizes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.jacobi_workspace(*sizes)


def test_a_workspace_for_any_device_is_as_large_as_the_largest() -> None:
    sizes = (2, 4, 32, 32, 32, 8, True)
    largest = max(ops.jacobi_workspace(*sizes, device=device) for device in ("cpu", "cuda:1"))
    assert ops.jacobi_workspace(*sizes) == largest
    with pytest.raises(ValueError, match="device is neither the CPU nor a CUDA device"):
        ops.jacobi_workspace(*sizes, device="xpu")


def test_a_missing_output_is_named() -> None:
    outputs = {**_outputs(), "workspace": None}
    with pytest.raises(ValueError, match="workspace is None; expected a tensor"):
        _xpress.jacobi_refine.out(**_arguments(), num_passes=3, **outputs)


@pytest.mark.parametrize(
    ("name", "dtype"), [("hidden", torch.complex64), ("readout", torch.float8_e5m2)]
)
def test_types_are_called_by_their_names(name: str, dtype: torch.dtype) -> None:
    arguments = _arguments()
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(ValueError, match=f"{name} has dtype {str(dtype).removeprefix('torch.')}"):
        _xpress.jacobi_refine(**arguments, num_passes=3)
