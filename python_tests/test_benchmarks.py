"""The benchmarks' promises: inputs need the passes they claim, peers compute the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import latency_vs_K
from benchmarks.inputs import (
    PRESETS,
    Blocks,
    HeadShape,
    PlantedHead,
    assert_ripple,
    lowest_changed_slots,
    planted_blocks,
    planted_head,
)
from benchmarks.peers import FORMS, CandidateLoop, FullLoop, tiled_topk
from benchmarks.timing import Ceilings, Spread, interleaved, table
from xpress_ext import reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {
    "tiny": PRESETS["tiny"],
    "no whole tiles": HeadShape(V=777, r=32, m=64, B=16, H=64),
    "smallest vocabulary": HeadShape(V=32, r=32, m=32, B=16, H=32),
}
# The real ranks, widths and block with fewer words.
REAL = {
    name: HeadShape(V=4096, r=PRESETS[name].r, m=PRESETS[name].m, B=16, H=PRESETS[name].H)
    for name in ("qwen3-8b", "smollm2-135m")
}


def planted(
    shape: HeadShape, N: int, kind: str, dtype: torch.dtype, seed: int = 0
) -> tuple[PlantedHead, Blocks]:
    head = planted_head(shape, dtype, seed)
    return head, planted_blocks(head, N, kind, dtype, seed + 1)


def refine(head: PlantedHead, blocks: Blocks, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    return reference.jacobi_refine(*blocks.tensors(), *head.weights(), *options)


def reference_pass(head: PlantedHead, blocks: Blocks):
    return lambda tokens: refine(head, blocks, 1, 0, False, tokens)[0]


# ------------------------------------------------------------------------------------ the inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
@pytest.mark.parametrize("kind", ["worst", "mild"])
def test_every_pass_changes_first_the_slot_that_was_planted(kind, shape, dtype):
    head, blocks = planted({**SHAPES, **REAL}[shape], 4, kind, DTYPES[dtype])
    assert_ripple(blocks, reference_pass(head, blocks))


@pytest.mark.parametrize("seed", range(5))
def test_worst_case_needs_all_passes_and_ends_at_the_sequential_decode(seed):
    head, blocks = planted(SHAPES["tiny"], 3, "worst", torch.bfloat16, seed)
    tokens, passes, _ = refine(head, blocks, 99)
    sequential = reference.sequential_decode(*blocks.tensors(), *head.weights())
    assert passes.tolist() == [head.shape.B - 1] * 3
    assert tokens.equal(sequential)
    assert tokens.equal(blocks.answer)


@pytest.mark.parametrize("seed", range(5))
def test_mild_blocks_settle_in_two_to_four_passes(seed):
    head, blocks = planted(SHAPES["tiny"], 6, "mild", torch.bfloat16, seed)
    tokens, passes, _ = refine(head, blocks, 99)
    assert tokens.equal(blocks.answer)
    assert passes.tolist() == (blocks.depth + 1).tolist()
    assert set(passes.tolist()) == {2, 3, 4}


@pytest.mark.parametrize("kind", ["worst", "mild"])
@pytest.mark.parametrize("top_c", [2, 32])
def test_candidates_reach_the_planted_answer_in_the_same_passes(kind, top_c):
    head, blocks = planted(SHAPES["tiny"], 3, kind, torch.bfloat16)
    full, restricted = refine(head, blocks, 99), refine(head, blocks, 99, top_c)
    assert restricted[0].equal(blocks.answer)
    assert restricted[1].equal(full[1])


def test_one_candidate_makes_exact_mode_prove_every_slot():
    head, blocks = planted(SHAPES["tiny"], 2, "worst", torch.bfloat16)
    tokens, _, full_readouts = refine(head, blocks, 99, 1, True)
    assert tokens.equal(blocks.answer)
    assert full_readouts.min() >= head.shape.B - 2


def test_inputs_are_reproducible_and_differ_between_seeds():
    shape = SHAPES["tiny"]
    (head, blocks), (again, same), (other, _) = (
        planted(shape, 2, "worst", torch.float32, seed) for seed in (3, 3, 4)
    )
    for left, right in zip(head.weights(), again.weights(), strict=True):
        assert left.equal(right)
    assert blocks.base_logits.equal(same.base_logits)
    assert not head.readout.equal(other.readout)


def test_a_broken_ripple_is_reported():
    _, blocks = planted(SHAPES["tiny"], 2, "worst", torch.float32)
    assert lowest_changed_slots(blocks, lambda tokens: tokens).sum() == 0
    with pytest.raises(AssertionError, match="pass 1 of block 0 changed slot 0"):
        assert_ripple(blocks, lambda tokens: tokens)


@pytest.mark.parametrize("N", [0, 1, 5])
def test_any_number_of_blocks(N):
    head, blocks = planted(SHAPES["tiny"], N, "mild", torch.bfloat16)
    assert blocks.base_logits.shape == (N, head.shape.B - 1, head.shape.V)
    assert refine(head, blocks, 99)[0].equal(blocks.answer)


def test_impossible_inputs_are_refused():
    with pytest.raises(ValueError, match="V=20 is too small"):
        planted_head(HeadShape(V=20, r=32, m=32, B=16, H=32))
    head = planted_head(HeadShape(V=64, r=32, m=32, B=4, H=32))
    with pytest.raises(ValueError, match="need B >= 5"):
        planted_blocks(head, 1, "mild")
    with pytest.raises(ValueError, match="kind='bad'"):
        planted_blocks(head, 1, "bad")


# ------------------------------------------------------------------------------------- the peers


def peers(head: PlantedHead, dtype: torch.dtype) -> dict[str, FullLoop | CandidateLoop]:
    loops: dict[str, FullLoop | CandidateLoop] = {
        f"full {form}": FullLoop(head, dtype, form) for form in FORMS
    }
    return loops | {"candidates": CandidateLoop(head, 16, dtype)}


@pytest.mark.parametrize("early_exit", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["worst", "mild"])
def test_peers_agree_with_the_reference_after_every_pass(kind, shape, dtype, early_exit):
    head, blocks = planted(SHAPES[shape], 3, kind, torch.bfloat16)
    own = blocks.to(DTYPES[dtype])
    for name, loop in peers(head, DTYPES[dtype]).items():
        for K in (1, 2, 5, head.shape.B - 1):
            expected = refine(head, blocks, K)[0]
            assert loop(*own.tensors(), K, early_exit).equal(expected), (name, K)


@pytest.mark.parametrize("dtype", DTYPES)
def test_peers_agree_with_the_reference_on_random_heads_up_to_near_ties(dtype):
    """Random data, nothing planted: a token may differ only where the reference nearly ties."""
    shape = HeadShape(V=1024, r=64, m=128, B=8, H=64)
    head, blocks = random_problem(shape, 8)
    for form in FORMS:
        loop = FullLoop(head, DTYPES[dtype], form)
        one = loop(*blocks.to(DTYPES[dtype]).tensors(), 1)
        expected = refine(head, blocks, 1)[0]
        assert (one != expected).sum() <= near_ties(head, blocks, 0.1 if dtype == "bf16" else 1e-3)


def random_problem(shape: HeadShape, N: int) -> tuple[PlantedHead, Blocks]:
    head, blocks = planted(shape, N, "worst", torch.bfloat16)
    rng = torch.Generator().manual_seed(5)
    logits = torch.empty(blocks.base_logits.shape).normal_(0, 2, generator=rng)
    fields = {**vars(blocks), "base_logits": logits.bfloat16()}
    return head, Blocks(**fields)


def near_ties(head: PlantedHead, blocks: Blocks, bound: float) -> int:
    """Slots whose best two logits lie within the bound after the first pass."""
    seed = blocks.base_logits.float().argmax(-1)
    prev = torch.cat([blocks.predecessor[:, None], blocks.anchor[:, None], seed[:, :-1]], 1)
    xh = reference.project_hidden(blocks.hidden, head.hidden_proj)
    context = reference.causal_mix(xh, head.mixer)
    c = reference.fuse_mix(context, prev, head.token_table, head.mixer)
    z = reference.refiner_mlp(c, head.mlp_gate_up, head.mlp_down)[:, 1:]
    logits = blocks.base_logits.float() + z.float() @ head.readout.float().T
    best = logits.topk(2).values
    return int((best[..., 0] - best[..., 1] < bound).sum())


@pytest.mark.parametrize("V", [1024, 4096, 1000])
def test_tiled_topk_finds_what_topk_finds(V):
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0))
    value, index = tiled_topk(logits, 7)
    expected = torch.topk(logits, 7).values
    assert value.sort(descending=True).values.equal(expected)
    assert logits.gather(1, index).equal(value)


def test_compiled_peer_equals_the_eager_one():
    head, blocks = planted(SHAPES["tiny"], 2, "worst", torch.float32)
    for make in (
        lambda mode: FullLoop(head, form="tiles", mode=mode),
        lambda mode: CandidateLoop(head, 16, mode=mode),
    ):
        eager, compiled = (make(mode)(*blocks.tensors(), 7) for mode in ("eager", "compiled"))
        assert compiled.equal(eager)


def test_unknown_forms_and_modes_are_refused():
    weights = planted_head(SHAPES["tiny"])
    with pytest.raises(ValueError, match="form='rows'"):
        FullLoop(weights, form="rows")
    with pytest.raises(ValueError, match="mode='fast'"):
        FullLoop(weights, mode="fast")


# ------------------------------------------------------------------------------------ the script


def test_interleaved_runs_every_call_once_a_round_in_turn():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = interleaved(calls, repeats=2)
    assert order == list("ababab")  # the first pair warms up
    assert times["a"].p20 <= times["a"].median <= times["a"].p80


def test_spread_is_the_median_and_the_20th_and_80th_percentiles():
    assert Spread.of([5, 1, 2, 3, 4]) == Spread(3, 1.8, 4.2)
    assert Spread.of([7]).scaled(2) == Spread(14, 14, 14)


def test_floor_counts_bytes_once_for_all_blocks_and_arithmetic_for_each():
    ceilings = Ceilings(copy_gb_s=10, matmul_gflop_s=100)
    shape = PRESETS["qwen3-8b"]
    one, eight = (latency_vs_K.pass_floor(shape, N, 0, "bf16", ceilings) for N in (1, 8))
    readout, logits = 151936 * 256 * 2, 15 * 151936 * 2
    assert one["bytes"] == pytest.approx((readout + logits) / 1e4)
    assert eight["bytes"] == pytest.approx((readout / 8 + logits) / 1e4)
    assert one["arithmetic"] == eight["arithmetic"]
    assert one["arithmetic"] == pytest.approx(2 * 15 * 151936 * 256 / 1e5)


def test_table_aligns_its_columns():
    lines = table(["line", "us"], [["a", "1"], ["long name", "1000"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].endswith("   1")


def test_the_curve_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, png = tmp_path / "curve.json", tmp_path / "curve.png"
    options = ["--preset", "tiny", "--no-compile", "--repeats", "2", "--N", "2", "--C", "8"]
    assert latency_vs_K.main([*options, "--json", str(out), "--png", str(png)]) == 0
    result = json.loads(out.read_text())
    assert result["passes"] == list(range(1, 8))
    assert {"cpu", "flags", "threads", "torch"} <= result["machine"].keys()
    assert result["ceilings"]["copy_gb_s"] > 0
    for line in result["lines"]:
        assert line["wrong_tokens"] == 0, line["name"]
        assert line["exact"] or len(line["us_per_block"]) == 7
        assert line["us_to_fixed_point"]["mild"]["median"] > 0
    printed = capsys.readouterr().out
    assert "xpress full bf16" in printed
    assert "torch eager fp32 C=8" in printed
    assert png.stat().st_size > 10_000


def test_the_bars_run_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "bars.json"
    options = ["--preset", "tiny", "--no-compile", "--repeats", "2", "--bars"]
    assert latency_vs_K.main([*options, "--json", str(out)]) in (0, 1)
    result = json.loads(out.read_text())
    assert {bar["N"] for bar in result["bars"]} == {1, 8}
    for bar in result["bars"]:
        assert bar["ratio"] == pytest.approx(bar["other_us"] / bar["ours_us"])
        assert bar["met"] in (True, False, None)
    assert len([bar for bar in result["bars"] if "exact" in bar["name"]]) == 12
    assert "asked" in capsys.readouterr().out
