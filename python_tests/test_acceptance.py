"""The acceptance benchmark: statistics, prompts, and the committed checkpoint and result."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import acceptance
from xpress_ext.checkpoint import load_checkpoint

REPOSITORY = Path(__file__).parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "acceptance_smollm2.json"


def test_intervals_are_paired_over_prompts():
    """A gain that every prompt shares has no spread, however much the prompts differ."""
    baseline = torch.linspace(1, 5, 40, dtype=torch.float64)
    intervals = acceptance.bootstrap(baseline + 0.25, baseline)
    assert intervals["difference_95"] == [0.25, 0.25]
    low, high = intervals["mean_95"]
    assert low < 3.25 < high
    assert high - low > 0.5


def test_rows_hold_means_over_prompts_and_pooled_steps():
    lengths = {acceptance.DRAFTER: [[1, 1, 2], [2]], "XPress K=6": [[2, 2], [2]]}
    drafter, refined = acceptance.summarise(lengths)
    assert drafter["mean_acceptance_length"] == pytest.approx((4 / 3 + 2) / 2, abs=1e-4)
    assert drafter["pooled_tokens_per_step"] == pytest.approx(6 / 4)
    assert refined["ratio"] == pytest.approx(2 / (5 / 3), abs=1e-4)


def test_prompts_are_spread_evenly():
    assert acceptance.evenly([str(i) for i in range(200)], 40)[:3] == ["0", "5", "10"]
    assert len(acceptance.evenly(acceptance.human_eval_prompts(), 40)) == 40


def test_the_committed_checkpoint_fits_and_is_small():
    folder = acceptance.DEFAULT_CHECKPOINT
    drafter, refiner = load_checkpoint(folder)
    assert refiner is not None
    assert drafter.config.block_size == refiner.config.block_size == 16
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 32 * 2**20


@pytest.mark.parametrize(("name", "least_ratio"), [("GSM8K", 1.10), ("HumanEval", 1.0)])
def test_the_committed_result_shows_that_refining_pays(name, least_ratio):
    rows = {row["draft"]: row for row in json.loads(RESULT.read_text())["sets"][name]}
    refined = rows["XPress K=6"]
    assert refined["prompts"] == 40
    assert refined["difference_95"][0] > 0
    assert refined["ratio"] >= least_ratio
    if name == "GSM8K":
        assert rows[acceptance.DRAFTER]["mean_acceptance_length"] >= 1.5
