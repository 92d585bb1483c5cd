"""Random sizes, types, layouts and mistakes. `make fuzz` draws many fresh examples.

The test decides which calls are valid, from the tensors alone: valid calls must equal the
reference, the others must raise an exception that names an argument at fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import backends
import pytest
import torch
from backends import Problem, assert_close_as_torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from xpress_ext import reference

pytestmark = pytest.mark.parametrize("backend", backends.CHECKED)
# A strategy that builds tensors is slow by hypothesis's measure; its time is not at issue.
relaxed = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


class Call(dict[str, Any]):
    """Keyword arguments of `jacobi_refine`, shown by shape and layout."""

    def __repr__(self) -> str:
        def show(value: Any) -> str:
            if not isinstance(value, Tensor):
                return repr(value)
            text = f"{value.dtype}{list(value.shape)} strides {value.stride()}"
            return text + (f" = {value.tolist()}" if value.numel() < 9 else "")

        return "Call(" + ", ".join(f"{name}={show(value)}" for name, value in self.items()) + ")"


multiples_of_32 = st.sampled_from([32, 32, 64, 96, 160])
float_types = st.sampled_from(backends.WEIGHT_DTYPES)


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of `backends.random_problem`."""
    V = draw(st.integers(1, 40) | st.integers(500, 700))
    return {
        "seed": draw(st.integers(0, 2**31)),
        "N": draw(st.integers(0, 5)),
        "B": draw(st.integers(2, 9) | st.integers(2, 32)),
        "V": V,
        "H": draw(multiples_of_32),
        "r": draw(multiples_of_32),
        "m": draw(multiples_of_32),
        "V_t": draw(st.just(0) | st.integers(V + 2, V + 50)),
        "weight": draw(float_types),
        "inputs": draw(float_types),
    }


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return backends.random_problem(
        **draw(sizes()), strength=draw(st.sampled_from(sorted(backends.STRENGTHS)))
    )


# ------------------------------------------------------------------------------- valid or refused

TENSORS = (
    *("base_logits", "hidden", "anchor", "predecessor", "hidden_proj", "token_table", "mixer"),
    *("mlp_gate_up", "mlp_down", "readout", "seed_tokens", "d2t"),
)
WEIGHTS = ("hidden_proj", "token_table", "mlp_gate_up", "mlp_down", "readout")
IDS = ("anchor", "predecessor", "seed_tokens")


def resized(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    dim = draw(st.integers(0, tensor.dim() - 1))
    if draw(st.booleans()) and tensor.shape[dim]:
        return tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()
    shape = list(tensor.shape)
    shape[dim] = 1
    return torch.cat([tensor, torch.zeros(shape, dtype=tensor.dtype)], dim=dim)


def other_type(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    types = [*backends.WEIGHT_DTYPES, torch.float64, torch.int32, torch.int64]
    return tensor.to(draw(st.sampled_from(types)))


def other_rank(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(draw(st.integers(0, tensor.dim())))


def other_layout(draw: st.DrawFn, tensor: Tensor, steps: Sequence[int] = (1, 1, 2)) -> Tensor:
    """The same values off alignment, with gaps between rows and, where step > 1, elements."""
    pads = draw(st.sampled_from([(1, 0), (0, 1), (3, 8)]))
    step = draw(st.sampled_from(steps))
    width = tensor.shape[-1]
    wide = torch.zeros(*tensor.shape[:-1], pads[0] + step * width + pads[1], dtype=tensor.dtype)
    view = wide[..., pads[0] : pads[0] + step * width : step]
    return view.copy_(tensor)


def shifted(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """The same values, contiguous, some elements past an aligned address."""
    offset = draw(st.integers(0, 9))
    storage = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype)
    return storage[offset:].view(tensor.shape).copy_(tensor)


def odd_id(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    odd = tensor.clone()
    if tensor.numel():
        position = draw(st.integers(0, tensor.numel() - 1))
        odd.view(-1)[position] = draw(st.integers(-3, 100) | st.sampled_from([-(2**62), 2**62]))
    return odd


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call of exact arithmetic, with up to two odd arguments, some of which are valid."""
    drawn = draw(sizes())
    drawn["V"] = min(drawn["V"], 40)
    problem = backends.quantised_problem(**drawn)
    num_drafted = problem.num_drafted
    call = Call((name, getattr(problem, name, None)) for name in TENSORS)
    call["seed_tokens"] = draw(st.sampled_from([None, problem.random_seeds(drawn["seed"])]))
    call["num_passes"] = draw(st.integers(1, num_drafted + 2))
    call["top_c"] = draw(st.just(0) | st.integers(1, drawn["V"]))
    call["exact"] = call["top_c"] > 0 and call["num_passes"] >= num_drafted and draw(st.booleans())
    for name in draw(st.lists(st.sampled_from(["base_logits", "hidden"]), max_size=2)):
        call[name] = other_layout(draw, call[name], steps=[1])
    for _ in range(draw(st.integers(0, 2))):
        spoil(draw, call)
    return call


def spoil(draw: st.DrawFn, call: Call) -> None:
    option = draw(st.sampled_from(["num_passes", "top_c", "exact", *TENSORS, *IDS]))
    if option == "num_passes":
        call[option] = draw(st.integers(-2, 40))
    elif option == "top_c":
        call[option] = draw(st.integers(-2, 44) | st.just(1025))
    elif option == "exact":
        call[option] = not call[option]
    elif call[option] is not None:
        change = [resized, other_type, other_rank, other_layout, shifted]
        change += [odd_id] * 4 if option in IDS else []
        call[option] = draw(st.sampled_from(change))(draw, call[option])


def arguments_at_fault(call: Call) -> set[str]:
    """The arguments that an exception may name; empty where the call is valid."""
    fault: set[str] = set()

    def need(condition: bool, *names: str) -> None:
        fault.update(() if condition else names)

    need(call["num_passes"] >= 1, "num_passes")
    need(call["top_c"] >= 0, "top_c")
    need(not call["exact"] or call["top_c"] >= 1, "top_c", "exact")
    passed = {name: call[name] for name in TENSORS if call[name] is not None}
    owners = {"hidden": 3, "readout": 2, "token_table": 2, "mlp_down": 2}
    if any(call[name].dim() != rank for name, rank in owners.items()):
        return set(TENSORS)  # the tensors that sizes are taken from have none: blame any

    N, B, H = call["hidden"].shape
    V, r = call["readout"].shape
    V_t, m = len(call["token_table"]), call["mlp_down"].shape[1]
    shapes = {
        "base_logits": (N, B - 1, V),
        "anchor": (N,),
        "predecessor": (N,),
        "seed_tokens": (N, B - 1),
        "hidden_proj": (2, r, H),
        "token_table": (V_t, r),
        "mixer": (B, B, r),
        "mlp_gate_up": (2 * m, r),
        "mlp_down": (r, m),
        "d2t": (V,),
    }
    # Where two sizes disagree, either tensor may be blamed: the one that disagrees, or the one
    # that the size was taken from.
    for name, shape in shapes.items():
        need(name not in passed or tuple(passed[name].shape) == shape, name, "hidden", "readout")
    need(2 <= B <= 32, "hidden")
    need(r % 32 == 0 and 32 <= r <= 512, "readout")
    need(H % 32 == 0 and H > 0, "hidden")
    need(m % 32 == 0 and m > 0, "mlp_down")
    need("d2t" in passed or V_t >= V, "readout", "d2t", "token_table")

    for name, tensor in passed.items():
        if name in IDS or name == "d2t":
            need(tensor.dtype is torch.int64, name)
        elif name == "mixer":
            need(tensor.dtype is torch.float32, name)
        else:
            need(tensor.dtype in backends.WEIGHT_DTYPES, name)
    need(len({call[name].dtype for name in WEIGHTS}) == 1, *WEIGHTS)
    for name in (*WEIGHTS, "mixer"):
        need(call[name].is_contiguous() and call[name].data_ptr() % 16 == 0, name)
    for name in ("base_logits", "hidden"):
        need(call[name].shape[-1] <= 1 or call[name].stride(-1) == 1, name)
    need("d2t" not in passed or call["d2t"].is_contiguous(), "d2t")

    need(call["top_c"] <= min(V, 1024), "top_c")
    need(not call["exact"] or call["num_passes"] >= B - 1, "num_passes", "exact")
    for name in IDS:
        if name in passed and passed[name].numel():
            need(bool(passed[name].min() >= 0) and bool(passed[name].max() < V_t), name)
    return fault


def leaves_the_table(call: Call) -> bool:
    """Some d2t is out of range: whether a backend meets it depends on the drafts."""
    d2t, table = call["d2t"], call["token_table"]
    if d2t is None or d2t.dim() != 1 or not len(d2t):
        return False
    return bool((torch.arange(len(d2t)) + d2t).max() >= len(table))


@relaxed
@given(call=calls())
def test_valid_calls_equal_the_reference_and_others_name_the_argument(
    backend: str, call: Call
) -> None:
    fault = arguments_at_fault(call)
    assume(not leaves_the_table(call))
    if fault:
        with pytest.raises((ValueError, IndexError, RuntimeError)) as caught:
            backends.get(backend).jacobi_refine(**call)
        message = str(caught.value)
        assert any(name in message for name in fault), f"{message!r} names none of {fault}"
        return
    got = backends.get(backend).jacobi_refine(**call)
    expected = reference.jacobi_refine(**call)
    for name, one, other in zip(("tokens", "passes", "full_readouts"), got, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other), name


# -------------------------------------------------------------------------- loops and arithmetic


@relaxed
@given(problem=problems(), data=st.data())
def test_all_loops_reach_the_sequential_decode(
    backend: str, problem: Problem, data: st.DataObject
) -> None:
    expected = problem.sequential(backend)
    seeds = problem.random_seeds(data.draw(st.integers(0, 2**31), label="seeds"))
    C = data.draw(st.integers(1, len(problem.readout)), label="C")
    for seed_tokens in (None, seeds):
        assert torch.equal(problem.refine(backend, seed_tokens=seed_tokens)[0], expected)
        exact, _, full_readouts = problem.refine(
            backend, top_c=C, exact=True, seed_tokens=seed_tokens
        )
        assert torch.equal(exact, expected)
        assert ((full_readouts >= 1) & (full_readouts <= problem.num_drafted)).all()
    candidates = backends.get(backend).top_candidates(problem.base_logits, C)[0]
    restricted = problem.sequential(backend, candidates)
    assert torch.equal(problem.refine(backend, top_c=C)[0], restricted)


@relaxed
@given(problem=problems())
def test_candidates_equal_the_reference(backend: str, problem: Problem) -> None:
    for C in {1, (len(problem.readout) + 1) // 2, len(problem.readout)}:
        got = backends.get(backend).top_candidates(problem.base_logits, C)
        for one, other in zip(got, reference.top_candidates(problem.base_logits, C), strict=True):
            assert torch.equal(one, other)


@relaxed
@given(drawn=sizes())
def test_outputs_are_as_accurate_as_torch(backend: str, drawn: dict[str, Any]) -> None:
    drawn["N"] += 1
    # Of one small head, the greatest error is a matter of luck: of six it can be compared.
    calls = [operator_calls(backends.random_problem(**drawn | {"seed": i})) for i in range(6)]
    for name in calls[0]:
        results = (
            torch.cat([getattr(backends.get(each), name)(*call[name]) for call in calls])
            for each in (backend, "reference", "plain")
        )
        assert_close_as_torch(name, *results)


def operator_calls(problem: Problem) -> dict[str, tuple[Tensor, ...]]:
    """Arguments of every operator with a floating output, taken from the reference's walk."""
    tokens = problem.random_seeds(0)
    prev = torch.cat([problem.predecessor[:, None], problem.anchor[:, None], tokens[:, :-1]], 1)
    xh = reference.project_hidden(problem.hidden, problem.hidden_proj)
    x = reference.causal_mix(xh, problem.mixer)
    c = reference.fuse_mix(x, prev, problem.token_table, problem.mixer)
    z = reference.refiner_mlp(c, problem.mlp_gate_up, problem.mlp_down)
    return {
        "project_hidden": (problem.hidden, problem.hidden_proj),
        "causal_mix": (xh, problem.mixer),
        "fuse_mix": (x, prev, problem.token_table, problem.mixer),
        "refiner_mlp": (c, problem.mlp_gate_up, problem.mlp_down),
        "refined_logits": (z[0, 1:], problem.base_logits[0], problem.readout),
    }
