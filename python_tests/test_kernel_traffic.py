"""Bytes that the kernels ask for at the size of Qwen3-8B's head, counted by the emulator."""

from __future__ import annotations

import json

import pytest

from benchmarks import kernel_traffic
from benchmarks.kernel_traffic import Inputs, Row


@pytest.fixture(scope="module")
def one() -> Inputs:
    return Inputs(1)


@pytest.fixture(scope="module")
def committed() -> dict[str, Row]:
    rows = json.loads(kernel_traffic.RESULT.read_text())["rows"]
    return {row["name"]: Row(**row) for row in rows}


def test_the_streaming_readout_loads_every_weight_once_and_little_else(one: Inputs) -> None:
    row = kernel_traffic.readout_row(one)
    assert row.readout == row.once
    assert row.ratio <= 1.05


def test_the_tiled_readout_loads_weights_once_per_tile_of_rows() -> None:
    # 135 rows, more than a tile of 128 holds.
    row = kernel_traffic.readout_row(Inputs(9))
    assert row.readout == 2 * row.once


def test_logits_cost_one_sweep_over_the_weights(one: Inputs) -> None:
    row = kernel_traffic.logits_row(one)
    assert row.readout == row.once
    assert row.ratio <= 1.05


def test_a_pass_over_the_vocabulary_costs_one_readout_and_the_latents(one: Inputs) -> None:
    full, few = kernel_traffic.pass_rows(one)
    assert full.readout == full.once
    assert full.ratio <= 1.05
    assert few.ratio <= 1.2


@pytest.mark.parametrize("make", ["latent_rows", "candidate_rows"])
def test_the_table_is_of_these_kernels(one: Inputs, committed: dict[str, Row], make: str) -> None:
    for row in getattr(kernel_traffic, make)(one):
        assert committed[row.name] == row, "run `python benchmarks/kernel_traffic.py`"
