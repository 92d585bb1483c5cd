"""What the compiler made of the kernels: resources, and the instructions that designs promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from xpress_ext import build_info

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import kernel_report

pytestmark = pytest.mark.skipif(
    not build_info().cuda_built, reason="the library was built without CUDA"
)

TENSOR_CORES = "HMMA."
LOADS_OF_16_BYTES = ("LDG.E.128", "LDGSTS.E.BYPASS.128")
# Kernel -> whether its products are on tensor cores where the weights have 16 bits.
DESIGNS = {
    "project_hidden_kernel": True,
    "mlp_hidden_kernel": True,
    "mlp_down_kernel": True,
    "readout_stream_kernel": True,
    "readout_tiled_kernel": True,
    "readout_candidates_kernel": True,
    "jacobi_latent_kernel": True,
    "jacobi_candidates_kernel": True,
    "top_candidates_kernel": False,
}


@pytest.fixture(scope="module")
def resources() -> kernel_report.Resources:
    return kernel_report.resources()


@pytest.fixture(scope="module")
def sass() -> dict[str, list[str]]:
    found = kernel_report.disassembly()
    if "sm_90a" not in found:
        pytest.skip("the library was not built for 9.0a")
    return found["sm_90a"]


def test_no_kernel_uses_local_memory(resources: kernel_report.Resources) -> None:
    used = {
        f"{architecture} {name}": row["local"]
        for architecture, kernels in resources.items()
        for name, row in kernels.items()
        if row["local"]
    }
    assert not used


def test_resources_are_those_of_the_committed_table(resources: kernel_report.Resources) -> None:
    table = json.loads(kernel_report.TABLE.read_text())
    if table["nvcc"] != build_info().nvcc:
        pytest.skip(f"the table is of nvcc {table['nvcc']}, this build of {build_info().nvcc}")
    committed = {a: kernels for a, kernels in table["kernels"].items() if a in resources}
    built = {a: kernels for a, kernels in resources.items() if a in table["kernels"]}
    assert built, f"none of {sorted(resources)} is in the table"
    assert built == committed, "run `python tools/kernel_report.py --write` and look at the change"


@pytest.mark.parametrize("name", DESIGNS)
def test_instructions_are_those_of_the_design(sass: dict[str, list[str]], name: str) -> None:
    variants = {full: code for full, code in sass.items() if full.split("<")[0] == name}
    assert variants
    for full, code in variants.items():
        assert any(i.startswith(LOADS_OF_16_BYTES) for i in code), f"{full}: no load of 16 bytes"
        if DESIGNS[name] and "float32" not in full:
            assert any(i.startswith(TENSOR_CORES) for i in code), f"{full}: no tensor-core product"


def test_no_instruction_touches_local_memory(sass: dict[str, list[str]]) -> None:
    found = {name: i for name, code in sass.items() for i in code if i.startswith(("LDL", "STL"))}
    assert not found


def test_the_streaming_readout_loads_weights_16_bytes_at_a_time(sass: dict[str, list[str]]) -> None:
    # Two panels by four steps, asked for before the first product.
    code = sass["readout_stream_kernel<bfloat16>"]
    first_product = next(i for i, text in enumerate(code) if text.startswith(TENSOR_CORES))
    loads = [i for i, text in enumerate(code) if text.startswith("LDG.E.128") and i < first_product]
    assert len(loads) >= 8


def test_names_are_demangled() -> None:
    names = {
        "_ZN6xpress7kernels21readout_stream_kernelINS_4fp16EEEvNS0_13ReadoutStreamIT_E6ParamsE": (
            "readout_stream_kernel<float16>"
        ),
        "_ZN6xpress7kernels21project_hidden_kernelIfLi2ELi1EEEvNS0_13ProjectHiddenIT_E6ParamsE": (
            "project_hidden_kernel<float32, 2, 1>"
        ),
        "_ZN6xpress41_GLOBAL__N__fef28027_9_device_cu_934cd37d19device_probe_kernelENS0_1PE": (
            "device_probe_kernel"
        ),
    }
    assert {symbol: kernel_report.kernel_name(symbol) for symbol in names} == names
