"""Speculative decoding gives the target's own greedy decode, whatever is drafted, and says how."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
from dataclasses import dataclass, field

import pytest
import torch

transformers = pytest.importorskip("transformers")

from xpress_ext import decoding  # noqa: E402
from xpress_ext.config import XPressConfig  # noqa: E402
from xpress_ext.decoding import (  # noqa: E402
    STAGES,
    SpeculativeDecoder,
    first_difference,
    greedy_generate,
    greedy_steps,
    speculative_generate,
    speculative_steps,
)
from xpress_ext.drafter import DFlashConfig, DFlashDrafter  # noqa: E402
from xpress_ext.heads import (  # noqa: E402
    DominoConfig,
    DominoHead,
    HeadConfig,
    MarkovConfig,
    MarkovHead,
    NoHead,
)
from xpress_ext.refiner import FoldedRefiner, RefineOutput, XPressRefiner  # noqa: E402

V = 61
WIDTH = 32
LAYERS = 4
CONTEXT = 96
BLOCK = 6


def small_target(seed: int = 0, kind: str = "Llama", dtype=torch.float64, **changes):
    """A random target whose greedy decode does not settle into one token."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": V,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def small_drafter(seed: int = 0, dtype=torch.float64, **changes) -> DFlashDrafter:
    torch.manual_seed(1000 + seed)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": V,
        "num_target_layers": LAYERS,
        "target_layer_ids": (0, 2),
        "mask_token_id": V - 1,
        "block_size": BLOCK,
        "max_position_embeddings": CONTEXT,
    }
    return DFlashDrafter(DFlashConfig(**{**sizes, **changes})).to(dtype).eval()


def small_refiner(seed: int = 0, d2t=None, block_size: int = BLOCK) -> FoldedRefiner:
    torch.manual_seed(2000 + seed)
    rows = V if d2t is None else len(d2t)
    config = XPressConfig(V, WIDTH, rank=8, block_size=block_size, draft_vocab_size=rows)
    refiner = XPressRefiner(config, d2t)
    for parameter in refiner.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return refiner.fold(torch.float32)


def small_head(kind: str, seed: int = 0, d2t=None, **changes):
    """One of the heads that are no refiner, with weights large enough to change drafts."""
    torch.manual_seed(3000 + seed)
    sizes = (V, WIDTH, BLOCK, V if d2t is None else len(d2t))
    if kind == "markov":
        head = MarkovHead(MarkovConfig(*sizes, rank=8), d2t)
    elif kind == "domino":
        head = DominoHead(DominoConfig(*sizes, gru_hidden_dim=12, emb_dim=8, **changes), d2t)
    else:
        head = NoHead(HeadConfig(*sizes), d2t)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def watch_inputs(target) -> list[list[int]]:
    """The list to which every forward of `target` adds the ids that it was given."""
    fed = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    return fed


def every_third_id() -> torch.Tensor:
    """Offsets of a draft vocabulary 1, 4, 7, ...: neither the first nor the last target id."""
    draft = torch.arange(V // 3)
    return 3 * draft + 1 - draft


def prompt(seed: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (1, length), generator=generator)


@torch.no_grad()
def own_greedy(target, ids: torch.Tensor, count: int, eos=()) -> list[int]:
    """The target's greedy decode by full forwards: no cache, no blocks, none of our code."""
    start = ids.shape[1]
    while ids.shape[1] < start + count:
        token = target(input_ids=ids, use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, token.view(1, 1)], dim=1)
        if int(token) in eos:
            break
    return ids[0, start:].tolist()


@dataclass
class Prophet:
    """Test double of a refiner: it knows the answer, and gives each step's share of it."""

    answer: list[int]
    prompt: list[int]
    hits: list[int]  # right drafts of each step in turn
    d2t: None = None
    config: XPressConfig = field(
        default_factory=lambda: XPressConfig(V, WIDTH, rank=8, block_size=BLOCK)
    )
    _committed: int = 0
    _step: int = 0

    def watch(self, event) -> None:
        self._committed += len(event.tokens)

    def refine(self, base_logits, hidden, anchor, predecessor, **options) -> RefineOutput:
        known = self.prompt + self.answer[: self._committed]
        assert int(anchor) == known[-1]
        assert int(predecessor) == known[-2], "the true predecessor is passed, not the anchor"
        assert hidden.shape == (1, BLOCK, WIDTH)
        assert base_logits.shape == (1, BLOCK - 1, V)
        following = self.answer[self._committed :][: BLOCK - 1]
        following += [0] * (BLOCK - 1 - len(following))
        hits = self.hits[self._step % len(self.hits)]
        self._step += 1
        drafts = [t if k < hits else (t + 1) % V for k, t in enumerate(following)]
        one = torch.ones(1, dtype=torch.int32)
        return RefineOutput(torch.tensor([drafts]), one, 0 * one)


@functools.cache
def small_case(seed: int, length: int):
    """A target, a prompt, and the target's own 45 next tokens (fewer at the context's end)."""
    target, ids = small_target(seed), prompt(seed, length)
    return target, ids, own_greedy(target, ids, min(45, CONTEXT - length))


def decode_with_prophet(target, ids, answer, hits, *, count, eos=()):
    """Decode with drafts of which the first hits[step] equal `answer`."""
    prophet = Prophet(answer, ids[0].tolist(), hits)
    return speculative_generate(
        target,
        small_drafter(),
        prophet,
        ids,
        max_new_tokens=count,
        eos_token_id=eos,
        callback=prophet.watch,
    )


# --- The output is the target's own greedy decode.


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"refined": False}, id="drafter-alone"),
        pytest.param({"num_passes": 1}, id="one-pass"),
        pytest.param({"num_passes": 6}, id="six-passes"),
        pytest.param({"top_c": 4}, id="candidates"),
        pytest.param({"top_c": 3, "exact": True}, id="exact-candidates"),
    ],
)
@pytest.mark.parametrize("reduced", [False, True], ids=["full-vocabulary", "reduced-vocabulary"])
def test_output_equals_the_targets_own_greedy_decode(options, reduced):
    d2t = every_third_id() if reduced else None
    settings = {key: value for key, value in options.items() if key != "refined"}
    for seed in range(4):
        refiner = small_refiner(seed, d2t) if options.get("refined", True) else None
        drafter = small_drafter(seed)
        for length in (1, 2, 9):
            target, ids, answer = small_case(seed, length)
            decoder = SpeculativeDecoder(target, drafter, refiner, d2t=d2t, **settings)
            output = decoder.generate(ids, max_new_tokens=20)
            assert output.tokens.tolist() == [answer[:20]], (seed, length)


@pytest.mark.parametrize("kind", ["markov", "domino", "none"])
@pytest.mark.parametrize("reduced", [False, True], ids=["full-vocabulary", "reduced-vocabulary"])
def test_every_head_drafts_for_the_same_output(kind, reduced):
    d2t = every_third_id() if reduced else None
    steps = {"markov": BLOCK - 1, "domino": BLOCK - 2, "none": 0}[kind]
    for seed in range(3):
        target, ids, answer = small_case(seed, 5)
        head, drafter = small_head(kind, seed, d2t), small_drafter(seed)
        output = speculative_generate(target, drafter, head, ids, max_new_tokens=20)
        assert output.tokens.tolist() == [answer[:20]], seed
        assert output.stats.mean_passes == steps
        alone = speculative_generate(target, drafter, None, ids, max_new_tokens=20, d2t=d2t)
        if kind == "none":
            assert output.stats.acceptance_lengths == alone.stats.acceptance_lengths


@pytest.mark.parametrize("kind", ["markov", "domino"])
def test_the_loop_verifies_the_drafts_of_the_serial_head(kind):
    """What the target is fed behind the anchor are the head's own tokens."""
    target, ids, _ = small_case(2, 6)
    head = small_head(kind, 2)
    drafts = []
    refine = head.refine

    def watched(*arguments, **options):
        assert not options
        output = refine(*arguments)
        drafts.append(output.tokens[0].tolist())
        return output

    head.refine = watched
    fed = watch_inputs(target)
    speculative_generate(target, small_drafter(2), head, ids, max_new_tokens=12)
    assert len(drafts) > 2
    for block, tokens in zip(fed[1:], drafts, strict=False):  # the last step may need no draft
        assert block[1:] == tokens[: len(block) - 1]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral", "Gemma2", "GPTNeoX"])
def test_any_causal_lm_with_an_attention_cache_is_a_target(kind):
    # Mistral and Gemma2 with a window that the decode slides past.
    changes = {"sliding_window": 7} if kind in ("Mistral", "Gemma2") else {}
    target = small_target(3, kind, **changes)
    ids = prompt(3, 11)
    answer = own_greedy(target, ids, 30)
    output = decode_with_prophet(target, ids, answer, [5, 0, 2, 1], count=30)
    assert output.tokens.tolist() == [answer]
    assert greedy_generate(target, ids, max_new_tokens=30).tokens.tolist() == [answer]


def test_plain_decoding_equals_transformers_generate():
    target, ids = small_target(1), prompt(1, 5)
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)[:, 5:]
    output = greedy_generate(target, ids, max_new_tokens=20)
    assert torch.equal(output.tokens, expected)
    assert output.stats.acceptance_lengths == [1] * 19


def test_single_precision_targets_differ_at_near_ties_only():
    for seed in range(4):
        target, ids = small_target(seed, dtype=torch.float32), prompt(seed, 7)
        drafter = small_drafter(seed, torch.float32)
        plain = greedy_generate(target, ids, max_new_tokens=30)
        drafted = speculative_generate(target, drafter, small_refiner(seed), ids, max_new_tokens=30)
        difference = first_difference(plain, drafted)
        assert difference is None or difference.near_tie


def test_drafter_and_target_may_have_different_dtypes():
    target, ids = small_target(0, dtype=torch.bfloat16), prompt(0, 4)
    output = speculative_generate(
        target, small_drafter(0, torch.float32), small_refiner(), ids, max_new_tokens=8
    )
    assert output.tokens.shape == (1, 8)


def test_a_long_prompt_is_read_in_chunks_with_the_same_result(monkeypatch):
    target, ids, answer = small_case(2, 23)
    monkeypatch.setattr(decoding, "PROMPT_CHUNK", 4)
    fed = watch_inputs(target)
    output = decode_with_prophet(target, ids, answer, [3], count=12)
    assert output.tokens.tolist() == [answer[:12]]
    assert [len(ids) for ids in fed[:6]] == [4, 4, 4, 4, 4, 3]


# --- Acceptance, the bonus token, ends and limits.


def test_each_step_takes_the_right_drafts_and_the_bonus_token():
    target, ids, answer = small_case(4, 5)
    output = decode_with_prophet(target, ids, answer, [0, 1, 2, 3, 4, 5], count=22)
    assert output.tokens.tolist() == [answer[:22]]
    assert output.stats.acceptance_lengths == [1, 2, 3, 4, 5, 6]
    assert output.stats.acceptance_histogram == [0, 1, 1, 1, 1, 1, 1]
    assert output.stats.whole_block_share == pytest.approx(1 / 6)
    assert output.stats.mean_acceptance_length == pytest.approx(3.5)


@pytest.mark.parametrize("count", range(1, 15))
def test_max_new_tokens_cuts_inside_a_block(count):
    target, ids, answer = small_case(5, 3)
    output = decode_with_prophet(target, ids, answer, [BLOCK - 1], count=count)
    assert output.tokens.tolist() == [answer[:count]]
    assert output.stats.finish_reason == "length"
    assert 1 + sum(output.stats.acceptance_lengths) == count


@pytest.mark.parametrize("place", range(14))
@pytest.mark.parametrize("hits", [0, 2, BLOCK - 1])
def test_an_end_token_ends_the_decode_wherever_it_falls(place, hits):
    target, ids, answer = small_case(6, 4)
    end = answer[place]
    expected = answer[: answer.index(end) + 1]
    output = decode_with_prophet(target, ids, answer, [hits], count=40, eos=end)
    assert output.tokens.tolist() == [expected]
    assert output.stats.finish_reason == "eos"
    assert output.stats.num_tokens == 1 + sum(output.stats.acceptance_lengths) == len(expected)
    assert greedy_generate(target, ids, max_new_tokens=40, eos_token_id=end).tokens.tolist() == [
        expected
    ]


def test_end_tokens_come_from_the_generation_config_unless_given():
    target, ids = small_target(6), prompt(6, 4)
    answer = own_greedy(target, ids, 20)
    target.generation_config.eos_token_id = [answer[3], V - 1]
    ended = greedy_generate(target, ids, max_new_tokens=20)
    assert ended.tokens.tolist() == [answer[: answer.index(answer[3]) + 1]]
    endless = greedy_generate(target, ids, max_new_tokens=20, eos_token_id=())
    assert endless.tokens.tolist() == [answer]


@pytest.mark.parametrize("left", [*range(1, BLOCK + 2), 2 * BLOCK])
@pytest.mark.parametrize("hits", [0, 3, BLOCK - 1])
def test_a_prompt_near_the_contexts_end_uses_every_position_and_none_beyond(left, hits):
    target, ids, answer = small_case(7, CONTEXT - left)
    positions = []
    rotary = target.model.rotary_emb.register_forward_hook(
        lambda module, args, kwargs, output: positions.append(int(kwargs["position_ids"].max())),
        with_kwargs=True,
    )
    output = decode_with_prophet(target, ids, answer, [hits], count=50)
    rotary.remove()
    assert output.tokens.tolist() == [answer]
    assert output.stats.finish_reason == "context"
    assert max(positions) < CONTEXT


def test_a_prompt_of_one_token_has_that_token_as_predecessor():
    target, ids, answer = small_case(8, 1)
    output = decode_with_prophet(target, ids, answer, [4, 0], count=20)  # which checks it
    assert output.tokens.tolist() == [answer[:20]]


# --- What the drafter is given.


class WatchedDrafter(DFlashDrafter):
    """A drafter that compares every draft with one made anew from the whole context."""

    target: object
    sequence: list[int]

    def draft(self, block_embeds, new_context, cache, start_position):
        committed = torch.tensor([self.sequence])
        with torch.no_grad():
            states = self.target(input_ids=committed, output_hidden_states=True).hidden_states
        context = torch.cat([states[layer + 1] for layer in self.target_layer_ids], dim=-1)
        context = context[:, :-1]  # the anchor's own hidden state is not known yet
        anchor = self.target.get_input_embeddings().weight[self.sequence[-1]]
        assert start_position == context.shape[1]
        torch.testing.assert_close(block_embeds[0, 0], anchor)
        anew = super().draft(block_embeds, context, self.new_cache(), start_position)
        hidden = super().draft(block_embeds, new_context, cache, start_position)
        torch.testing.assert_close(hidden, anew, rtol=1e-5, atol=1e-5)
        return hidden


@pytest.mark.parametrize("hits", [[0], [2, 0, 5], [BLOCK - 1]])
def test_the_context_is_the_hidden_states_of_all_committed_tokens(hits):
    target, ids, answer = small_case(9, 6)
    drafter = WatchedDrafter(small_drafter(9).config).double().eval()
    drafter.target, drafter.sequence = target, ids[0].tolist()
    prophet = Prophet(answer, ids[0].tolist(), hits)

    def watch(event):
        prophet.watch(event)
        drafter.sequence += event.tokens

    output = speculative_generate(target, drafter, prophet, ids, max_new_tokens=25, callback=watch)
    assert output.tokens.tolist() == [answer[:25]]
    assert drafter.sequence == ids[0].tolist() + output.tokens[0].tolist()


@pytest.mark.parametrize("refined", [False, True])
def test_a_reduced_draft_vocabulary_drafts_target_ids(refined):
    d2t = every_third_id()
    target = small_target(10)
    decoder = SpeculativeDecoder(
        target, small_drafter(10), small_refiner(10, d2t) if refined else None, d2t=d2t
    )
    fed = watch_inputs(target)
    decoder.generate(prompt(10, 4), max_new_tokens=16)
    drafts = {token for block in fed[1:] for token in block[1:]}
    assert drafts
    assert all(token % 3 == 1 for token in drafts)


def test_drafter_alone_drafts_the_argmax_of_its_base_logits():
    target, drafter, ids = small_target(11), small_drafter(11), prompt(11, 5)
    with torch.no_grad():
        output = target(input_ids=ids, output_hidden_states=True)
        anchor = output.logits[0, -1:].argmax(-1)
        context = torch.cat([output.hidden_states[i + 1] for i in drafter.target_layer_ids], -1)
        embeds = drafter.block_embeddings(target.get_input_embeddings().weight, anchor)
        hidden = drafter.draft(embeds, context, drafter.new_cache(), 5)
        expected = target.lm_head(hidden[:, 1:]).argmax(-1)[0].tolist()
    fed = watch_inputs(target)
    speculative_generate(target, drafter, None, ids, max_new_tokens=12)
    assert fed[1] == [int(anchor), *expected]


# --- Statistics, near-ties, events.


def test_statistics_add_up():
    target, ids = small_target(12), prompt(12, 5)
    output = speculative_generate(
        target, small_drafter(12), small_refiner(12), ids, max_new_tokens=30
    )
    stats = output.stats
    assert stats.num_tokens == output.tokens.shape[1] == 1 + sum(stats.acceptance_lengths) == 30
    steps = stats.verification_steps
    per_step = (stats.acceptance_lengths, stats.drafted, stats.passes, stats.full_readouts)
    assert all(len(values) == steps for values in per_step)
    assert sum(stats.acceptance_histogram) == steps
    assert all(
        1 <= used <= BLOCK - 1 for used, n in zip(stats.passes, stats.drafted, strict=True) if n
    )
    assert all(stats.milliseconds[stage] > 0 for stage in STAGES)
    total = stats.prompt_milliseconds + stats.decode_milliseconds
    assert sum(stats.milliseconds.values()) <= total
    assert stats.tokens_per_second == pytest.approx(29e3 / stats.decode_milliseconds)
    assert json.loads(json.dumps(stats.to_dict()))["verification_steps"] == steps


def test_passes_of_exact_candidates_and_full_readouts_are_reported():
    target, ids = small_target(12), prompt(12, 5)
    output = speculative_generate(
        target, small_drafter(12), small_refiner(12), ids, max_new_tokens=12, top_c=2, exact=True
    )
    drafted = [
        n
        for n, count in zip(output.stats.full_readouts, output.stats.drafted, strict=True)
        if count
    ]
    assert min(drafted) >= 1
    plain = speculative_generate(
        target, small_drafter(12), small_refiner(12), ids, max_new_tokens=12
    )
    assert set(plain.stats.full_readouts) == {0}


def test_callback_receives_every_step_in_order():
    target, ids = small_target(13), prompt(13, 5)
    events = []
    output = speculative_generate(
        target, small_drafter(), None, ids, max_new_tokens=15, callback=events.append
    )
    assert [event.step for event in events] == list(range(len(events)))
    assert [token for event in events for token in event.tokens] == output.tokens[0].tolist()
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert events[0].drafted == 0
    assert all(event.accepted in (len(event.tokens), len(event.tokens) - 1) for event in events)
    assert all(event.wall_milliseconds >= sum(event.milliseconds.values()) for event in events)


def test_near_ties_are_counted_where_the_best_two_logits_are_close():
    target, ids = small_target(14), prompt(14, 5)
    answer = own_greedy(target, ids, 20)
    assert greedy_generate(target, ids, max_new_tokens=20).stats.near_ties == []
    twin = next(token for token in range(V) if token not in answer and token not in ids)
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[answer[0]] * (1 - 1e-6)
    places = [i for i, token in enumerate(answer) if token == answer[0]]
    for output in (
        greedy_generate(target, ids, max_new_tokens=20),
        decode_with_prophet(target, ids, answer, [4, 1], count=20),
    ):
        assert output.tokens.tolist() == [answer]
        assert output.stats.near_ties == places


def test_first_difference_says_whether_a_near_tie_explains_it():
    target, ids = small_target(14), prompt(14, 5)
    one = greedy_generate(target, ids, max_new_tokens=10)
    other = greedy_generate(target, ids, max_new_tokens=10)
    assert first_difference(one, other) is None
    other.tokens[0, 6] += 1
    assert first_difference(one, other) == decoding.Difference(6, near_tie=False)
    one.stats.near_ties.append(6)
    assert first_difference(one, other) == decoding.Difference(6, near_tie=True)
    shorter = greedy_generate(target, ids, max_new_tokens=7)
    assert first_difference(shorter, greedy_generate(target, ids, max_new_tokens=9)).index == 7


def test_steps_are_lazy_interleave_and_leave_the_gradient_mode_alone():
    target, ids = small_target(15), prompt(15, 5)
    calls = []
    target.register_forward_pre_hook(lambda *_: calls.append(1))
    both = (
        greedy_steps(target, ids, max_new_tokens=12),
        speculative_steps(target, small_drafter(), None, ids, max_new_tokens=12),
    )
    assert not calls
    tokens = ([], [])
    while len(tokens[0]) < 12 or len(tokens[1]) < 12:
        for steps, seen in zip(both, tokens, strict=True):
            with contextlib.suppress(StopIteration):
                seen += next(steps).tokens
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
    assert tokens[0] == tokens[1] == own_greedy(target, ids, 12)


# --- Profiling ranges.


def test_every_stage_is_a_named_range_for_a_profiler(monkeypatch):
    opened = []

    def named(stage):
        @contextlib.contextmanager
        def range_():
            opened.append(stage)
            yield

        return range_

    class Ranges(dict):
        def __getitem__(self, stage):
            return named(stage)()

    monkeypatch.setattr(decoding, "_RANGES", Ranges())
    target, ids = small_target(), prompt(0, 3)
    output = speculative_generate(target, small_drafter(), small_refiner(), ids, max_new_tokens=9)
    assert set(opened) == set(STAGES)
    assert opened.count("target") == output.stats.verification_steps


def load_copy(monkeypatch):
    """A second copy of the module, imported anew and known to nobody else."""
    name = "xpress_ext_decoding_copy"
    spec = importlib.util.spec_from_file_location(name, decoding.__file__)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, copy)
    spec.loader.exec_module(copy)
    return copy


def test_ranges_carry_the_stages_names(monkeypatch):
    nvtx = pytest.importorskip("nvtx")
    names = []
    monkeypatch.setattr(nvtx, "annotate", lambda name, domain: names.append((name, domain)))
    load_copy(monkeypatch)
    assert names == [(f"xpress:{stage}", "xpress") for stage in STAGES]


def test_decoding_needs_no_nvtx(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    output = load_copy(monkeypatch).greedy_generate(small_target(), prompt(0, 3), max_new_tokens=3)
    assert output.tokens.tolist() == [own_greedy(small_target(), prompt(0, 3), 3)]


def test_importing_the_module_needs_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    load_copy(monkeypatch)


# --- Refused arguments.


def generate(**changes):
    arguments = {
        "target": small_target(),
        "drafter": small_drafter(),
        "refiner": small_refiner(),
        "input_ids": prompt(0, 4),
        "max_new_tokens": 4,
    }
    arguments.update(changes)
    return speculative_generate(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": [1, 2]}, TypeError, "input_ids must be a tensor"),
        ({"input_ids": torch.zeros(1, 3)}, TypeError, "input_ids must be int64, got torch.float32"),
        ({"input_ids": torch.zeros(2, 3).long()}, ValueError, r"must be \[1, T\].*\[2, 3\]"),
        ({"input_ids": torch.zeros(1, 0).long()}, ValueError, r"T >= 1.*\[1, 0\]"),
        ({"input_ids": torch.zeros(3).long()}, ValueError, r"must be \[1, T\].*\[3\]"),
        ({"input_ids": torch.tensor([[0, V]])}, ValueError, f"span 0..{V}.*0..{V - 1}"),
        ({"input_ids": torch.tensor([[-1]])}, ValueError, "span -1..-1"),
        ({"input_ids": prompt(0, CONTEXT)}, ValueError, f"{CONTEXT} tokens.*no room"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int"),
        ({"num_passes": 0}, ValueError, "num_passes must be at least 1, got 0"),
        ({"top_c": -1}, ValueError, "top_c must be 0"),
        ({"top_c": V + 1}, ValueError, f"got {V + 1}"),
        ({"exact": True}, ValueError, "exact=True needs top_c >= 1"),
        ({"exact": True, "top_c": 2, "num_passes": 2}, ValueError, "num_passes >= 5"),
        ({"refiner": small_refiner(block_size=4)}, ValueError, "block_size is 4, the drafter's 6"),
        ({"refiner": object()}, TypeError, "must be a FoldedRefiner, .* or None, got object"),
        (
            {"refiner": XPressRefiner(XPressConfig(V, WIDTH, rank=8, block_size=BLOCK))},
            TypeError,
            r"call \.fold\(\)",
        ),
        (
            {"refiner": small_head("markov"), "num_passes": 3},
            ValueError,
            "a MarkovHead makes no passes",
        ),
        (
            {"refiner": small_head("domino", shift_label=True)},
            ValueError,
            "drafts 6 of 6 slots.*fill-in layout only",
        ),
        (
            {"d2t": every_third_id()},
            ValueError,
            "the refiner scores 61 tokens, the LM head gives 20",
        ),
        ({"refiner": None, "d2t": torch.full((4,), V)}, ValueError, "d2t leads to target ids"),
        ({"refiner": None, "d2t": torch.zeros(4)}, ValueError, r"d2t must be \[V\] int64"),
        ({"drafter": small_drafter(hidden_size=16)}, ValueError, "hidden_size is 16.*is 32"),
        (
            {"drafter": small_drafter(num_target_layers=9, target_layer_ids=(1, 8))},
            ValueError,
            r"reads target layers \[1, 8\], the target has 0..3",
        ),
        (
            {"drafter": small_drafter(vocab_size=99, mask_token_id=98)},
            ValueError,
            "mask_token_id is 98.*0..60",
        ),
        ({"num_passes": 2.5}, TypeError, "num_passes must be an int, got 2.5"),
        ({"top_c": True}, TypeError, "top_c must be an int, got True"),
        ({"exact": "no"}, TypeError, "exact must be a bool, got 'no'"),
        ({"eos_token_id": "x"}, TypeError, "eos_token_id must be an int, got 'x'"),
        ({"eos_token_id": [2.5]}, TypeError, r"eos_token_id must be an int, got 2\.5"),
        ({"drafter": None}, TypeError, "drafter must be a DFlashDrafter, got NoneType"),
        ({"refiner": None, "d2t": [1]}, TypeError, "d2t must be a tensor, got list"),
        ({"target": torch.nn.Linear(2, 2)}, TypeError, "Hugging Face causal LM.*got Linear"),
        ({"target": small_target().train()}, ValueError, r"call target\.eval\(\)"),
        ({"target": small_target().model}, TypeError, "no LM head"),
    ],
)
def test_wrong_arguments_are_refused_with_the_value_and_what_to_do(changes, error, message):
    with pytest.raises(error, match=message):
        generate(**changes)


def test_arguments_are_checked_at_the_call_not_at_the_first_step():
    with pytest.raises(ValueError, match="max_new_tokens"):
        greedy_steps(small_target(), prompt(0, 4), max_new_tokens=0)
    with pytest.raises(ValueError, match="num_passes"):
        speculative_steps(
            small_target(), small_drafter(), None, prompt(0, 4), max_new_tokens=4, num_passes=0
        )


def test_a_target_whose_cache_cannot_be_cropped_is_refused():
    config = transformers.MambaConfig(
        vocab_size=V, hidden_size=WIDTH, state_size=4, num_hidden_layers=LAYERS, eos_token_id=None
    )
    target = transformers.MambaForCausalLM(config).double().eval()
    with pytest.raises(TypeError, match="cache cannot be cropped"):
        generate(target=target)


def test_nan_logits_are_reported_not_decoded():
    target = small_target()
    with torch.no_grad():
        target.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="logits hold NaN"):
        greedy_generate(target, prompt(0, 3), max_new_tokens=3)
