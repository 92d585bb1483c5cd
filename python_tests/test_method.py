"""What the method promises (docs/method.md, sections 3 and 4), on every backend."""

from __future__ import annotations

import backends
import pytest
import torch
from backends import Problem, assert_tokens_match, random_problem
from torch import Tensor

INF, NAN = float("inf"), float("nan")
NEGATIVE_NAN = torch.tensor([-1], dtype=torch.int32).view(torch.float32).item()

pytestmark = pytest.mark.parametrize("backend", backends.NAMES)
each_weight = pytest.mark.parametrize("weight", backends.WEIGHT_DTYPES, ids=str)
each_strength = pytest.mark.parametrize("strength", backends.STRENGTHS)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    differs = (actual != expected).nonzero()
    assert len(differs) == 0, (
        f"{what}: {len(differs)} of {actual.numel()} differ, first at {differs[0].tolist()}: "
        f"{actual[tuple(differs[0])]} instead of {expected[tuple(differs[0])]}"
    )


# -------------------------------------------------------------------- passes, seeds, early exit


@each_weight
@each_strength
def test_b_minus_1_passes_equal_the_sequential_decode(
    backend: str, strength: str, weight: torch.dtype
) -> None:
    for seed in backends.heads(backend, 12):
        problem = random_problem(seed, strength=strength, weight=weight)
        expected = problem.sequential(backend)
        assert_same(problem.refine(backend)[0], expected, f"head {seed}")
        seeded = problem.refine(backend, seed_tokens=problem.random_seeds(seed))[0]
        assert_same(seeded, expected, f"head {seed}, seeded at random")


@pytest.mark.parametrize("B", [2, 3, 16, 32])
def test_b_minus_1_passes_suffice_at_every_block_size(backend: str, B: int) -> None:
    problem = random_problem(B, B=B)
    assert_same(problem.refine(backend)[0], problem.sequential(backend), f"B={B}")


@each_weight
@each_strength
def test_early_exit_equals_more_passes(backend: str, strength: str, weight: torch.dtype) -> None:
    for seed in backends.heads(backend, 6):
        problem = random_problem(100 + seed, strength=strength, weight=weight)
        tokens = seeds = problem.random_seeds(seed)
        for num_passes in range(1, problem.num_drafted + 3):
            # One pass from a given state settles nothing beforehand, so it skips nothing.
            tokens = problem.refine(backend, num_passes=1, seed_tokens=tokens)[0]
            capped = problem.refine(backend, num_passes=num_passes, seed_tokens=seeds)[0]
            assert_same(capped, tokens, f"head {seed}, {num_passes} passes")


def test_slot_k_is_final_after_pass_k(backend: str) -> None:
    for seed in range(12):
        problem = random_problem(200 + seed)
        seeds = problem.random_seeds(seed)
        final = problem.refine(backend, seed_tokens=seeds)[0]
        for k in range(1, problem.num_drafted + 1):
            tokens = problem.refine(backend, num_passes=k, seed_tokens=seeds)[0]
            assert_same(tokens[:, :k], final[:, :k], f"head {seed}, pass {k}")


def test_counting_head_settles_one_slot_a_pass(backend: str) -> None:
    problem = backends.counting_problem()
    counted = (problem.anchor[:, None] + torch.arange(1, problem.num_drafted + 1)) % 32
    for K in range(1, problem.num_drafted + 1):
        tokens, passes, full_readouts = problem.refine(backend, num_passes=K)
        expected = torch.where(torch.arange(problem.num_drafted) < K, counted, K)
        assert_same(tokens, expected, f"{K} passes")
        assert passes.tolist() == [K] * 3
        assert full_readouts.tolist() == [0] * 3


def test_passes_count_the_one_that_found_no_change(backend: str) -> None:
    problem = backends.counting_problem()
    right = problem.refine(backend)[0]
    assert problem.refine(backend, seed_tokens=right)[1].tolist() == [1] * 3


def test_settling_the_last_slot_ends_the_block(backend: str) -> None:
    problem = backends.counting_problem()
    right = problem.refine(backend)[0]
    wrong_tail = right.clone()
    wrong_tail[:, -1] = 0
    tokens, passes, _ = problem.refine(backend, seed_tokens=wrong_tail)
    assert_same(tokens, right, "tokens")
    assert passes.tolist() == [1] * 3


def test_more_passes_than_slots_act_as_that_many(backend: str) -> None:
    problem = backends.counting_problem()
    for num_passes in (7, 8, 1000):
        assert problem.refine(backend, num_passes=num_passes)[1].tolist() == [7] * 3


def test_blocks_of_a_batch_do_not_touch_each_other(backend: str) -> None:
    problem = random_problem(1, N=5)
    for options in ({}, {"num_passes": 2}, {"top_c": 3}, {"top_c": 3, "exact": True}):
        together = problem.refine(backend, **options)
        for n in range(5):
            for got, alone in zip(
                together, problem.block(n).refine(backend, **options), strict=True
            ):
                assert_same(got[n : n + 1], alone, f"block {n} with {options}")


def test_blocks_of_a_batch_beyond_every_tile_are_alone_too(backend: str) -> None:
    """More rows than one sweep over the MLP, the readout or the projection takes."""
    problem = random_problem(2, N=20, B=16, V=1100, H=4096, weight=torch.bfloat16)
    for options in ({"num_passes": 2}, {"num_passes": 2, "top_c": 40}):
        tokens = problem.refine(backend, **options)[0]
        for n in backends.few(backend, (0, 7, 8, 15, 16, 19)):
            alone = problem.block(n).refine(backend, **options)[0]
            assert_same(tokens[n : n + 1], alone, f"block {n} with {options}")


def test_no_blocks_give_empty_tensors(backend: str) -> None:
    problem = random_problem(1, N=0)
    for options in ({}, {"top_c": 3}, {"top_c": 3, "exact": True}):
        tokens, passes, full_readouts = problem.refine(backend, **options)
        assert (tokens.shape, tokens.dtype) == ((0, 7), torch.int64)
        assert (passes.shape, passes.dtype) == ((0,), torch.int32)
        assert (full_readouts.shape, full_readouts.dtype) == ((0,), torch.int32)


# ----------------------------------------------------------------------------------- candidates


@each_weight
def test_candidates_give_the_decode_of_the_restricted_problem(
    backend: str, weight: torch.dtype
) -> None:
    for seed in backends.heads(backend, 4):
        problem = random_problem(300 + seed, weight=weight)
        for C in (1, 2, 7, 97):
            candidates = backends.get(backend).top_candidates(problem.base_logits, C)[0]
            tokens = problem.refine(backend, top_c=C)[0]
            assert_same(tokens, problem.sequential(backend, candidates), f"head {seed}, C={C}")


@each_weight
@each_strength
def test_exact_candidates_equal_the_full_readout_for_every_c(
    backend: str, strength: str, weight: torch.dtype
) -> None:
    for seed in backends.heads(backend, 2):
        problem = random_problem(400 + seed, V=40, strength=strength, weight=weight)
        expected = problem.refine(backend)[0]
        seeds = problem.random_seeds(seed)
        for C in backends.few(backend, range(1, 41)):
            tokens, _, full_readouts = problem.refine(backend, top_c=C, exact=True)
            assert_same(tokens, expected, f"head {seed}, C={C}")
            assert full_readouts.min() >= 1
            assert full_readouts.max() <= problem.num_drafted
            seeded = problem.refine(backend, top_c=C, exact=True, seed_tokens=seeds)[0]
            assert_same(seeded, expected, f"head {seed}, C={C}, seeded at random")


@each_weight
@pytest.mark.parametrize("C", [1, 2, 16, 48])
def test_exact_candidates_find_tokens_that_never_were_candidates(
    backend: str, C: int, weight: torch.dtype
) -> None:
    for seed in backends.heads(backend, 4):
        problem = backends.hidden_winner_problem(seed, weight=weight)
        tokens = problem.refine(backend, top_c=C, exact=True)[0]
        assert tokens.min() >= 97 // 2
        assert_same(tokens, problem.sequential(backend), f"head {seed}")


def test_exact_counts_a_full_readout_for_every_slot_at_worst(backend: str) -> None:
    problem = backends.counting_problem()
    tokens, passes, full_readouts = problem.refine(backend, top_c=1, exact=True)
    assert_same(tokens, problem.refine(backend)[0], "tokens")
    assert full_readouts.tolist() == [problem.num_drafted] * 3
    # Round t starts with t-1 slots proven and finds its candidates' fixed point in some passes.
    assert passes.min() >= problem.num_drafted


@pytest.mark.not_emulated
@pytest.mark.parametrize(
    ("strength", "share", "readouts"),
    [
        (1.0, (0.98, 1.0), (1.0, 1.3)),
        (3.0, (0.75, 0.9), (2.0, 4.0)),
        (7.0, (0.38, 0.6), (4.5, 7.5)),
    ],
    ids=["mild", "medium", "large"],
)
def test_full_readouts_grow_as_candidates_miss(
    backend: str, strength: float, share: tuple[float, float], readouts: tuple[float, float]
) -> None:
    """The figures of docs/method.md, section 4: B=16, V=300, here with C=32."""
    counts, found = [], []
    for seed in range(6):
        problem = random_problem(500 + seed, B=16, V=300, N=3, strength="mild")
        problem = problem.with_(readout=problem.readout * (strength / backends.STRENGTHS["mild"]))
        tokens, _, full_readouts = problem.refine(backend, top_c=32, exact=True)
        candidates = backends.get(backend).top_candidates(problem.base_logits, 32)[0]
        found.append((candidates == tokens[..., None]).any(-1))
        counts.append(full_readouts)
    assert share[0] <= torch.cat(found).double().mean() <= share[1]
    assert readouts[0] <= torch.cat(counts).double().mean() <= readouts[1]


# ------------------------------------------------------------------------ ties and special values


@each_weight
def test_ties_go_to_the_lowest_id_in_every_loop(backend: str, weight: torch.dtype) -> None:
    for seed in range(6):
        problem = backends.quantised_problem(seed, weight=weight)
        expected = problem.sequential("reference")
        logits = problem.logits("reference", expected)
        assert (logits == logits.amax(-1, keepdim=True)).sum() > 1.5 * expected.numel()  # ties
        assert_same(logits.argmax(-1), expected, "torch.argmax")
        assert_same(problem.refine(backend)[0], expected, "full")
        for C in (1, 5, 60):
            assert_same(problem.refine(backend, top_c=C, exact=True)[0], expected, f"exact C={C}")
            assert_same(
                problem.refine(backend, top_c=C)[0],
                problem.refine("reference", top_c=C)[0],
                f"C={C}",
            )


SPECIAL_ROWS = {
    "all equal": [1.0] * 8,
    "all -inf": [-INF] * 8,
    "all +inf": [INF] * 8,
    "all nan": [NAN] * 8,
    "nan among numbers": [3.0, 9.0, NAN, 1.0, NAN, INF, 0.0, 2.0],
    "negative nan": [3.0, 9.0, 1.0, NEGATIVE_NAN, NAN, INF, 0.0, 2.0],
    "nan last": [3.0, 9.0, 1.0, 1.0, 2.0, INF, 0.0, NAN],
    "-0 before +0": [-1.0, -0.0, 0.0, -2.0, -0.0, 0.0, -1.0, -1.0],
    "+0 before -0": [-1.0, 0.0, -0.0, -2.0, -0.0, 0.0, -1.0, -1.0],
    "infinities": [-INF, 1.0, INF, -INF, INF, 2.0, -INF, 0.0],
    "-inf and one number": [-INF] * 5 + [-3.4e38, -INF, -INF],
    "denormals": [1e-45, 2e-45, -1e-45, 0.0, 2e-45, 1e-45, 0.0, -2e-45],
    "winner at the first id": [5.0, 4.0, 4.0, 4.0, 5.0, 4.0, 4.0, 5.0],
    "winner at the last id": [1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.5],
}


def special_problem(dtype: torch.dtype, V: int) -> Problem:
    """One block a special row, that row (padded with small numbers) in every slot, W_r zero."""
    problem = random_problem(0, N=len(SPECIAL_ROWS), B=3, V=V, inputs=dtype)
    base_logits = torch.full((len(SPECIAL_ROWS), 2, V), -INF)
    base_logits[..., :8] = torch.tensor(list(SPECIAL_ROWS.values()))[:, None]
    if V > 8:
        base_logits = base_logits.roll(V - 8, dims=-1)  # the row ends at the last id
    return problem.with_(
        base_logits=base_logits.to(dtype), readout=torch.zeros_like(problem.readout)
    )


def expected_order(row: Tensor) -> list[int]:
    """Ids by value descending, then id ascending, NaN first: in plain Python."""
    values = [INF if value != value else value for value in row.float().tolist()]
    is_nan = row.isnan().tolist()
    return sorted(range(len(values)), key=lambda v: (not is_nan[v], -values[v], v))


@pytest.mark.parametrize("V", [8, 9, 77])
@pytest.mark.parametrize("dtype", backends.WEIGHT_DTYPES, ids=str)
def test_special_values_are_ordered_as_promised(backend: str, dtype: torch.dtype, V: int) -> None:
    problem = special_problem(dtype, V)
    ids, logits = backends.get(backend).top_candidates(problem.base_logits, V)
    z = torch.zeros(len(SPECIAL_ROWS), 2, 32)
    index, value = backends.get(backend).readout_argmax(z, problem.base_logits, problem.readout)
    refined = {
        "full": problem.refine(backend)[0],
        "C=3": problem.refine(backend, top_c=3)[0],
        "exact": problem.refine(backend, top_c=1, exact=True)[0],
    }
    for n, name in enumerate(SPECIAL_ROWS):
        row = problem.base_logits[n, 0].float()
        order = expected_order(row)
        assert order[0] == int(row.argmax()), name
        assert ids[n].tolist() == [order] * 2, name
        torch.testing.assert_close(logits[n, 1], row[order], rtol=0, atol=0, equal_nan=True)
        assert index[n].tolist() == [order[0]] * 2, name
        torch.testing.assert_close(value[n, 0], row[order[0]], rtol=0, atol=0, equal_nan=True)
        for loop, tokens in refined.items():
            assert tokens[n].tolist() == [order[0]] * 2, f"{name}, {loop}"


def test_candidates_in_any_order_and_repeated_give_the_same_winner(backend: str) -> None:
    problem = special_problem(torch.float32, 77)
    z = torch.zeros(len(SPECIAL_ROWS), 2, 32)
    ids = backends.get(backend).top_candidates(problem.base_logits, 5)[0]
    for candidates in (ids, ids.flip(-1), torch.cat([ids.flip(-1), ids], dim=-1)):
        index = backends.get(backend).readout_argmax(
            z, problem.base_logits, problem.readout, candidates.contiguous()
        )[0]
        assert_same(index, ids[..., 0], "winner")


@pytest.mark.parametrize("cause", ["latent", "weight"])
def test_nan_beats_infinity_wherever_it_lies(backend: str, cause: str) -> None:
    """0 * inf at one id, far behind ids whose logit is +inf: no bound may rule it out."""
    V, nan_id = 4000, 2500
    z, readout = torch.zeros(1, 1, 32), torch.zeros(V, 32)
    base_logits = torch.zeros(1, 1, V)
    if cause == "latent":
        z[..., 0] = INF
        readout[:, 0] = 1.0
        readout[nan_id, 0] = 0.0
    else:
        readout[nan_id, 0] = INF
        base_logits[..., 3] = INF
    index, value = backends.get(backend).readout_argmax(z, base_logits, readout)
    assert index.item() == nan_id
    assert value.isnan().all()


def test_nan_weights_spoil_only_what_reads_them(backend: str) -> None:
    problem = random_problem(3, V=97)
    clean = problem.refine(backend, num_passes=1)[0]
    readout = problem.readout.clone()
    readout[41] = NAN
    tokens = problem.with_(readout=readout).refine(backend, num_passes=1)[0]
    assert (tokens == 41).all()
    hidden = problem.hidden.clone()
    hidden[1] = NAN
    tokens = problem.with_(hidden=hidden).refine(backend, num_passes=1)[0]
    assert_same(tokens[0], clean[0], "the other block")
    assert (tokens[1] == 0).all()  # all logits are NaN: the lowest id wins


def test_a_nan_token_spoils_later_slots_only(backend: str) -> None:
    problem = random_problem(4, N=1)
    clean = problem.refine(backend)[0]
    bad = next(v for v in range(97) if v not in clean and v not in problem.anchor)
    table = problem.token_table.clone()
    table[bad] = NAN
    seeds = clean.clone()
    seeds[0, 3] = bad
    tokens = problem.with_(token_table=table).refine(backend, num_passes=1, seed_tokens=seeds)[0]
    assert_same(tokens[:, :4], clean[:, :4], "slots up to the bad one")
    assert (tokens[:, 4:] == 0).all()


def test_the_mixer_is_never_read_above_its_diagonal(backend: str) -> None:
    problem = random_problem(5)
    above = torch.ones(8, 8).triu(1).bool()
    mixer = problem.mixer.clone()
    mixer[above] = NAN
    poisoned = problem.with_(mixer=mixer)
    assert_same(poisoned.refine(backend)[0], problem.refine(backend)[0], "tokens")
    for options in ({"top_c": 3}, {"top_c": 3, "exact": True}):
        got, expected = poisoned.refine(backend, **options), problem.refine(backend, **options)
        assert_same(got[0], expected[0], str(options))


# -------------------------------------------------------------------------- ids and vocabularies


def test_ids_at_the_edges_of_the_table(backend: str) -> None:
    for first, second in ((0, 0), (0, 96), (96, 0), (96, 96)):
        problem = random_problem(6).with_(
            anchor=torch.full((2,), first), predecessor=torch.full((2,), second)
        )
        seeds = torch.full((2, 7), second)
        expected = problem.sequential(backend)
        assert_same(problem.refine(backend, seed_tokens=seeds)[0], expected, "tokens")


@pytest.mark.not_emulated
@pytest.mark.parametrize("bad", [-1, 97, 2**40, -(2**63)])
@pytest.mark.parametrize("name", ["anchor", "predecessor", "seed_tokens"])
def test_ids_outside_the_table_are_named(backend: str, name: str, bad: int) -> None:
    problem = random_problem(7)
    seeds = problem.random_seeds(7)
    tensors = {"anchor": problem.anchor, "predecessor": problem.predecessor, "seed_tokens": seeds}
    spoiled = tensors[name].clone()
    spoiled.view(-1)[-1] = bad
    if name == "seed_tokens":
        seeds = spoiled
    else:
        problem = problem.with_(**{name: spoiled})
    with pytest.raises((IndexError, ValueError, RuntimeError), match=f"{name}.*{bad}.*97"):
        problem.refine(backend, seed_tokens=seeds)


@pytest.mark.not_emulated
@pytest.mark.parametrize("bad", [-1, 97])
def test_candidates_and_prev_outside_their_tables_are_named(backend: str, bad: int) -> None:
    problem = random_problem(8)
    z = problem.latent(backend, problem.random_seeds(8))[:, 1:]
    candidates = torch.zeros(2, 7, 4, dtype=torch.int64)
    candidates[1, 6, 3] = bad
    with pytest.raises((IndexError, ValueError, RuntimeError), match=f"candidates.*{bad}.*97"):
        backends.get(backend).readout_argmax(z, problem.base_logits, problem.readout, candidates)
    prev = torch.zeros(2, 8, dtype=torch.int64)
    prev[1, 7] = bad
    with pytest.raises((IndexError, ValueError, RuntimeError), match=f"prev.*{bad}.*97"):
        backends.get(backend).fuse_mix(
            torch.zeros(2, 8, 32), prev, problem.token_table, problem.mixer
        )


@pytest.mark.not_emulated
def test_offsets_that_leave_the_table_are_named(backend: str) -> None:
    problem = random_problem(9, V=40, V_t=97)
    problem.base_logits[..., 39] += 1000.0  # so that every backend meets it
    for bad in (97 - 39, -40):  # draft id 39 would become target id 97 or -1
        d2t = problem.d2t.clone()
        d2t[39] = bad
        with pytest.raises((IndexError, ValueError, RuntimeError), match="d2t"):
            problem.with_(d2t=d2t).refine(backend)


@pytest.mark.not_emulated
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"num_passes": 0}, "num_passes"),
        ({"num_passes": -3}, "num_passes"),
        ({"top_c": -1}, "top_c"),
        ({"top_c": 98}, "top_c"),
        ({"exact": True}, "exact|top_c"),
        ({"exact": True, "top_c": 4, "num_passes": 6}, "exact|num_passes"),
    ],
    ids=str,
)
def test_options_out_of_range_are_named(backend: str, options: dict, names: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=names):
        random_problem(10).refine(backend, **options)


def outsiders(problem: Problem) -> Problem:
    """The same problem with an anchor and a predecessor that the draft never says."""
    edge = len(problem.token_table) - 1
    zeros = torch.zeros_like(problem.anchor)
    return problem.with_(anchor=zeros, predecessor=zeros + edge)


@each_weight
def test_reduced_vocabulary_equals_the_full_one_with_the_rest_forbidden(
    backend: str, weight: torch.dtype
) -> None:
    for seed in range(4):
        reduced = outsiders(random_problem(600 + seed, V=40, V_t=97, weight=weight))
        targets = torch.arange(40) + reduced.d2t
        assert 0 not in targets
        assert 96 not in targets
        base_logits = torch.full((2, 7, 97), -INF, dtype=weight)
        base_logits[..., targets] = reduced.base_logits
        readout = torch.zeros(97, 32, dtype=weight)
        readout[targets] = reduced.readout
        full = reduced.with_(base_logits=base_logits, readout=readout, d2t=None)
        seeds = torch.tensor([[0, 96, 0, 96, 0, 96, 0]]).repeat(2, 1)  # outside the draft's, too
        for options in ({}, {"num_passes": 2}, {"top_c": 5}, {"top_c": 5, "exact": True}):
            for seed_tokens in (None, seeds):
                got = reduced.refine(backend, seed_tokens=seed_tokens, **options)
                expected = full.refine(backend, seed_tokens=seed_tokens, **options)
                for name, one, other in zip(
                    ("tokens", "passes", "readouts"), got, expected, strict=True
                ):
                    assert_same(one, other, f"{name} of head {seed} with {options}")


def test_ties_of_a_reduced_vocabulary_go_by_draft_id(backend: str) -> None:
    problem = random_problem(11, V=40, V_t=97)
    targets = torch.arange(40) + problem.d2t
    backwards = targets.flip(0) - torch.arange(40)  # the lowest draft id is the highest target id
    tied = problem.with_(
        base_logits=torch.zeros_like(problem.base_logits),
        readout=torch.zeros_like(problem.readout),
        d2t=backwards,
    )
    for options in ({}, {"top_c": 5}, {"top_c": 5, "exact": True}):
        assert (tied.refine(backend, **options)[0] == targets.max()).all()


# -------------------------------------------------------------- layouts, and the other backends


def test_strided_inputs_are_taken_as_they_are(backend: str) -> None:
    problem = random_problem(12, V=97)
    wide_logits = torch.full((2, 8, 130), NAN)
    wide_logits[:, 1:, 3:100] = problem.base_logits
    wide_hidden = torch.full((2, 9, 40), NAN)
    wide_hidden[:, 1:, 5:37] = problem.hidden
    strided = problem.with_(base_logits=wide_logits[:, 1:, 3:100], hidden=wide_hidden[:, 1:, 5:37])
    for options in ({}, {"top_c": 3}, {"top_c": 3, "exact": True}):
        got = strided.refine(backend, **options)[0]
        assert_same(got, problem.refine(backend, **options)[0], str(options))


@each_weight
@each_strength
@pytest.mark.parametrize("inputs", backends.WEIGHT_DTYPES, ids=str)
def test_every_pass_equals_the_reference(
    backend: str, strength: str, inputs: torch.dtype, weight: torch.dtype
) -> None:
    near_ties = total = 0
    for seed in range(4):
        problem = random_problem(
            700 + seed, B=16, V=300, strength=strength, weight=weight, inputs=inputs
        )
        state = problem.random_seeds(seed)
        for _ in range(4):
            tokens = problem.refine(backend, num_passes=1, seed_tokens=state)[0]
            expected = problem.refine("reference", num_passes=1, seed_tokens=state)[0]
            near_ties += assert_tokens_match(
                problem.logits("reference", state),
                tokens,
                expected,
                backends.rounding_bound(problem, state),
            )
            total += tokens.numel()
            state = expected
    assert near_ties <= 0.01 * total, f"{near_ties} of {total} tokens were near-ties"
