"""The serial rivals: their equations, their decoding, and the face that they share with XPress."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_refiner import random_refiner
from torch import Tensor, nn

from xpress_ext.config import XPressConfig
from xpress_ext.heads import (
    DominoConfig,
    DominoHead,
    DraftHead,
    HeadConfig,
    InferenceHead,
    MarkovConfig,
    MarkovHead,
    NoHead,
    SerialHead,
    for_inference,
)
from xpress_ext.refiner import FoldedRefiner

V_T, V, H, B, N = 47, 19, 12, 6, 4
REDUCED = torch.arange(V) + 3  # target id = 2v + 3


def config(kind: type[HeadConfig], reduced: bool = False, **changes) -> HeadConfig:
    sizes = {"vocab_size": V_T, "hidden_size": H, "block_size": B}
    return kind(**sizes, draft_vocab_size=V if reduced else 0, **changes)


def random_head(kind: str, reduced: bool = False, **changes) -> SerialHead:
    """A head in fp64 with weights of order one."""
    torch.manual_seed(0)
    d2t = REDUCED if reduced else None
    head: SerialHead
    if kind == "markov":
        head = MarkovHead(config(MarkovConfig, reduced, rank=5), d2t)
    elif kind == "none":
        head = NoHead(config(HeadConfig, reduced), d2t)
    else:
        sizes = {"gru_hidden_dim": 7, "emb_dim": 5, **changes}
        head = DominoHead(config(DominoConfig, reduced, **sizes), d2t)
        head.attach_embedding(torch.randn(V_T, H, dtype=torch.float64))
    for weight in head.parameters():
        nn.init.normal_(weight)
    return head.double().requires_grad_(True)


def random_inputs(head: SerialHead, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """base_logits [N,D,V], hidden [N,B,H] fp64, anchor [N]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = head.config
    return (
        torch.randn(
            N, sizes.num_drafted, sizes.draft_vocab_size, generator=generator, dtype=torch.float64
        ),
        torch.randn(N, B, H, generator=generator, dtype=torch.float64),
        torch.randint(V_T, (N,), generator=generator),
    )


def previous(head: SerialHead, anchor: Tensor, tokens: Tensor) -> Tensor:
    """prev [N,B] for the tokens [N,D]; in the fill-in layout the predecessor comes first."""
    prev = torch.cat([anchor[:, None], tokens[:, :-1]], 1)
    if head.config.num_drafted == B:
        return prev
    return torch.cat([torch.full_like(anchor, 1)[:, None], prev], 1)


CASES = {
    "markov": ("markov", {}),
    "domino": ("domino", {}),
    "domino, no prefix": ("domino", {"pure_draft_prefix_len": 0}),
    "domino, prefix 3": ("domino", {"pure_draft_prefix_len": 3}),
    "domino, all prefix": ("domino", {"pure_draft_prefix_len": B - 1}),
    "domino, shift": ("domino", {"shift_label": True}),
    "domino, shift, prefix 2": ("domino", {"shift_label": True, "pure_draft_prefix_len": 2}),
    "none": ("none", {}),
}
each_case = pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
each_vocabulary = pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])


# --- The equations, written out slot by slot.


def markov_logits(head: MarkovHead, s: Tensor, hidden: Tensor, before: list[Tensor]) -> Tensor:
    return s + head.markov_w1.weight[before[-1]] @ head.markov_w2.weight.T


def gru_state(head: DominoHead, before: list[Tensor]) -> Tensor:
    """The GRU without biases over the tokens in `before` (gates in torch's order: r, z, n)."""
    state = torch.zeros(N, head.config.gru_hidden_dim, dtype=torch.float64)
    w_i = head.prefix_gru.weight_ih_l0.chunk(3)
    w_h = head.prefix_gru.weight_hh_l0.chunk(3)
    for token in before:
        x = head._embedded(token)
        r, z = (torch.sigmoid(x @ w_i[i].T + state @ w_h[i].T) for i in (0, 1))
        n = torch.tanh(x @ w_i[2].T + r * (state @ w_h[2].T))
        state = (1 - z) * n + z * state
    return state


def domino_logits(head: DominoHead, s: Tensor, hidden: Tensor, before: list[Tensor]) -> Tensor:
    if len(before) <= head.config.pure_draft_prefix_len:
        return s
    w_a, _, w_b = head.embed_proj
    inner = torch.cat([hidden, gru_state(head, before)], -1) @ w_a.weight.T
    return s + (inner * torch.sigmoid(inner)) @ w_b.weight.T


def logits_by_formula(head: SerialHead, base: Tensor, hidden: Tensor, inputs: Tensor) -> Tensor:
    """inputs [N,D]: anchor and the tokens behind it -> logits [N,D,V]."""
    formula = {MarkovHead: markov_logits, DominoHead: domino_logits}.get(type(head))
    if formula is None:
        return base
    first = B - head.config.num_drafted
    rows = [
        formula(head, base[:, k], hidden[:, first + k], list(inputs[:, : k + 1].T))
        for k in range(head.config.num_drafted)
    ]
    return torch.stack(rows, 1)


@each_vocabulary
@each_case
def test_teacher_forced_logits_are_those_of_the_formula(kind, changes, reduced) -> None:
    head = random_head(kind, reduced, **changes)
    base, hidden, anchor = random_inputs(head)
    tokens = torch.randint(V_T, (N, head.config.num_drafted))
    expected = logits_by_formula(
        head, base, hidden, torch.cat([anchor[:, None], tokens[:, :-1]], 1)
    )
    logits = head(base, hidden, previous(head, anchor, tokens))
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@each_vocabulary
@each_case
def test_the_greedy_decode_is_the_argmax_of_its_teacher_forced_logits(
    kind, changes, reduced
) -> None:
    head = random_head(kind, reduced, **changes)
    base, hidden, anchor = random_inputs(head)
    tokens, logits = head.decode(base, hidden, anchor)
    forced = head(base, hidden, previous(head, anchor, tokens))
    torch.testing.assert_close(logits, forced, rtol=1e-10, atol=1e-10)
    best = forced.argmax(-1)
    assert torch.equal(tokens, 2 * best + 3 if reduced else best)
    output = head.refine(base, hidden, anchor)
    assert torch.equal(output.tokens, tokens)
    assert output.passes.tolist() == [head.serial_steps] * N
    assert output.full_readouts.tolist() == [0] * N


@each_case
def test_latent_and_readout_give_the_logits_in_low_rank_form(kind, changes) -> None:
    head = random_head(kind, **changes)
    base, hidden, anchor = random_inputs(head)
    prev = previous(head, anchor, torch.randint(V_T, (N, head.config.num_drafted)))
    z = head.latent(hidden, prev)
    assert z.shape == (N, B, head.readout.shape[1])
    expected = base + z[:, -head.config.num_drafted :] @ head.readout.T
    torch.testing.assert_close(head(base, hidden, prev), expected, rtol=1e-10, atol=1e-10)


# --- Sampling.


@each_case
def test_samples_follow_the_distribution_of_their_logits(kind, changes) -> None:
    """Of many equal blocks: slot 1's tokens, and those of the last slot given all before it."""
    head = random_head(kind, **changes)
    base, hidden, anchor = (t[:1] for t in random_inputs(head))
    generator = torch.Generator().manual_seed(1)
    count = 20_000
    tokens, logits = head.decode(
        base.expand(count, -1, -1),
        hidden.expand(count, -1, -1),
        anchor.expand(count),
        0.8,
        generator,
    )
    counts = torch.nn.functional.one_hot(tokens, V_T).double()
    expected = (logits / 0.8).softmax(-1)
    # The sum over blocks of (drawn - probability) has the variance of its independent terms.
    variance = (expected * (1 - expected)).sum(0)
    deviation = ((counts - expected).sum(0).abs() / variance.clamp(min=1.0).sqrt()).max()
    assert deviation < 5.0


def test_sampling_is_repeated_by_the_seed_and_cold_sampling_is_greedy() -> None:
    head = random_head("markov")
    inputs = random_inputs(head)
    first, again, other = (
        head.decode(*inputs, 1.0, torch.Generator().manual_seed(seed)).tokens for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(head.decode(*inputs, 1e-6).tokens, head.decode(*inputs).tokens)


# --- The face shared with XPress.


def test_xpress_without_hidden_input_mixer_and_mlp_is_a_markov_head() -> None:
    sizes = XPressConfig(
        V_T, H, rank=5, block_size=B, use_hidden=False, use_mixer=False, use_mlp=False
    )
    xpress = random_refiner(sizes)
    with torch.no_grad():
        for name in xpress.parameters_left_out():
            xpress.get_parameter(name).zero_()
    markov = random_head("markov")
    assert isinstance(markov, MarkovHead)
    with torch.no_grad():
        markov.markov_w1.weight.copy_(xpress.w1.weight @ xpress.in_proj.weight[:, 10:].T)
        markov.markov_w2.weight.copy_(xpress.w2.weight)
    base, hidden, anchor = random_inputs(markov)
    prev = previous(markov, anchor, torch.randint(V_T, (N, B - 1)))
    torch.testing.assert_close(
        xpress(base, hidden, prev), markov(base, hidden, prev), rtol=1e-10, atol=1e-10
    )
    serial = markov.refine(base.float(), hidden.float(), anchor).tokens
    folded = xpress.fold(torch.float32)
    parallel = folded.refine(base.float(), hidden.float(), anchor, num_passes=B - 1).tokens
    assert torch.equal(serial, parallel)


@pytest.mark.parametrize("kind", ["xpress", "markov", "domino", "none"])
def test_training_and_evaluation_can_swap_heads(kind) -> None:
    """The same lines train and draft with each of them."""
    head: DraftHead
    if kind == "xpress":
        head = random_refiner(XPressConfig(V_T, H, rank=8, block_size=B))
    else:
        head = random_head(kind)
    base, hidden, anchor = random_inputs(random_head("markov"))
    prev = torch.cat([anchor[:, None], anchor[:, None], torch.randint(V_T, (N, B - 2))], 1)
    base.requires_grad_(True)
    head(base, hidden, prev).logsumexp(-1).sum().backward()
    assert isinstance(head, nn.Module)
    assert all(weight.grad is not None and weight.grad.any() for weight in head.parameters())
    drafting: InferenceHead | FoldedRefiner = for_inference(head, torch.float32)
    output = drafting.refine(base.detach().float(), hidden.float(), anchor, anchor)
    assert output.tokens.shape == (N, B - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["markov", "domino", "none"])
def test_weights_hidden_states_and_logits_may_differ_in_type(kind, dtype) -> None:
    head = random_head(kind).to(dtype)
    base, hidden, anchor = random_inputs(head)
    for logits_type in (torch.float32, torch.bfloat16):
        output = head.decode(base.to(logits_type), hidden.float(), anchor)
        assert output.logits.dtype == torch.float32


def test_parameters_carry_their_public_names() -> None:
    markov = MarkovHead(MarkovConfig(V_T, H, draft_vocab_size=V, rank=5), REDUCED)
    domino = DominoHead(
        DominoConfig(V_T, H, draft_vocab_size=V, gru_hidden_dim=7, emb_dim=5), REDUCED
    )
    domino.attach_embedding(nn.Embedding(V_T, H))
    shapes = {n: tuple(t.shape) for h in (markov, domino) for n, t in h.named_parameters()}
    assert shapes == {
        "markov_w1.weight": (V_T, 5),
        "markov_w2.weight": (V, 5),
        "prefix_gru.weight_ih_l0": (21, H),
        "prefix_gru.weight_hh_l0": (21, 7),
        "embed_proj.0.weight": (5, H + 7),
        "embed_proj.2.weight": (V, 5),
    }


def test_qwen3_8b_parameter_counts() -> None:
    with torch.device("meta"):
        markov = MarkovHead(MarkovConfig(151936, 4096))
        domino = DominoHead(DominoConfig(151936, 4096))
    assert sum(p.numel() for p in markov.parameters()) == 2 * 38_895_616
    sizes = {name: p.numel() for name, p in domino.named_parameters()}
    assert sizes["embed_proj.2.weight"] == 38_895_616
    assert sizes["prefix_gru.weight_ih_l0"] == 3 * 1024 * 4096


def test_the_borrowed_embedding_is_read_and_not_owned() -> None:
    head = random_head("domino")
    assert isinstance(head, DominoHead)
    embedding = nn.Embedding(V_T, H)
    head.attach_embedding(embedding)
    base, hidden, anchor = random_inputs(head)
    before = head.decode(base, hidden, anchor).logits
    with torch.no_grad():
        embedding.weight.neg_()
    assert not torch.equal(head.decode(base, hidden, anchor).logits, before)
    assert not any("_embed." in name for name in head.state_dict())


# --- Refusals.


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (HeadConfig, {"vocab_size": 0}, "vocab_size"),
        (HeadConfig, {"hidden_size": None}, "hidden_size must be an int"),
        (HeadConfig, {"block_size": 33}, "block_size must be from 2 to 32"),
        (HeadConfig, {"draft_vocab_size": V_T + 1}, "draft_vocab_size"),
        (HeadConfig, {"draft_vocab_size": False}, "draft_vocab_size must be an int"),
        (MarkovConfig, {"rank": 0}, "rank must be at least 1"),
        (DominoConfig, {"gru_hidden_dim": 1.5}, "gru_hidden_dim must be an int"),
        (DominoConfig, {"emb_dim": 0}, "emb_dim"),
        (DominoConfig, {"shift_label": 1}, "shift_label must be True or False"),
        (DominoConfig, {"pure_draft_prefix_len": 16}, "pure_draft_prefix_len must be from 0 to 15"),
    ],
)
def test_configs_name_what_is_out_of_range(kind, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**{"vocab_size": V_T, "hidden_size": H, **change})


def arguments(**changes) -> dict:
    base, hidden, anchor = random_inputs(random_head("markov"))
    return {"base_logits": base, "hidden": hidden, "anchor": anchor, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"base_logits": torch.zeros(N, B, V_T)}, ValueError, r"base_logits must be \[N,5,47\]"),
        (
            {"base_logits": torch.zeros(1, B - 1, V_T)},
            ValueError,
            "N=1 blocks, expected hidden's 4",
        ),
        ({"hidden": torch.zeros(N, B, H + 1)}, ValueError, r"hidden must be \[N,6,12\]"),
        ({"anchor": torch.zeros(N, 1).long()}, ValueError, r"anchor must be \[N\]"),
        ({"anchor": torch.zeros(N).int()}, ValueError, "anchor must be int64, got int32"),
        ({"anchor": torch.full((N,), V_T)}, IndexError, "anchor has ids 47 to 47"),
        ({"temperature": -1.0}, ValueError, "temperature must be 0 or a positive number"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
    ],
)
def test_decode_names_what_does_not_fit(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        random_head("markov").decode(**arguments(**changes))


@pytest.mark.parametrize("kind", ["markov", "domino", "none"])
def test_teacher_forcing_names_what_does_not_fit(kind) -> None:
    head = random_head(kind)
    base, hidden, _ = random_inputs(head)
    with pytest.raises(IndexError, match="prev has ids 47 to 47"):
        head(base, hidden, torch.full((N, B), V_T))
    with pytest.raises(ValueError, match=r"prev must be \[N,6\]"):
        head(base, hidden, torch.zeros(N, B - 1).long())
    with pytest.raises(ValueError, match="prev has N=1 blocks"):
        head(base, hidden, torch.zeros(1, B).long())


def test_a_reduced_vocabulary_needs_offsets_that_stay_inside() -> None:
    with pytest.raises(ValueError, match="d2t is needed"):
        MarkovHead(MarkovConfig(V_T, H, draft_vocab_size=V))
    with pytest.raises(ValueError, match="d2t leads to ids"):
        NoHead(HeadConfig(V_T, H, draft_vocab_size=V), torch.full((V,), V_T))


def test_a_domino_head_asks_for_its_embedding() -> None:
    head = DominoHead(dataclasses.replace(DominoConfig(V_T, H), block_size=B))
    with pytest.raises(RuntimeError, match="call attach_embedding first"):
        head.refine(torch.zeros(1, B - 1, V_T), torch.zeros(1, B, H), torch.zeros(1).long())
    with pytest.raises(ValueError, match=r"embedding must be \[47,12\].*\[47, 13\]"):
        head.attach_embedding(torch.zeros(V_T, H + 1))
