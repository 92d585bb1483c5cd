"""XPressRefiner, its fold and FoldedRefiner.refine."""

from __future__ import annotations

import backends
import pytest
import torch
from backends import assert_close_as_torch
from torch import Tensor

from xpress_ext.config import XPressConfig
from xpress_ext.refiner import FoldedRefiner, XPressRefiner

QWEN3_8B = XPressConfig(vocab_size=151936, hidden_size=4096)
ODD_SIZES = XPressConfig(vocab_size=32, hidden_size=16, rank=8, block_size=5)
# Sizes of real heads in miniature, and one that pads nothing.
CONFIGS = {
    "odd": ODD_SIZES,
    "unpadded": XPressConfig(vocab_size=97, hidden_size=64, rank=32, block_size=8),
    "odd MLP": XPressConfig(vocab_size=50, hidden_size=33, rank=40, mlp_hidden=7, block_size=16),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
each_backend = pytest.mark.parametrize("backend", ["ops", "reference"])


def random_refiner(config: XPressConfig, seed: int = 0, d2t: Tensor | None = None) -> XPressRefiner:
    """A refiner whose latent and corrections are of order one, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    refiner = XPressRefiner(config, d2t).double()
    with torch.no_grad():
        for name, weight in refiner.named_parameters():
            fan_in = 4 if name == "mix.L" else 1 if name == "w1.weight" else weight.shape[1]
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_((drawn * fan_in**-0.5).float())  # so that fp32 holds them exactly
    return refiner


def random_inputs(config: XPressConfig, N: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    """base_logits [N,B-1,V], hidden [N,B,H] fp32; anchor, predecessor [N], tokens [N,B-1]."""
    generator = torch.Generator().manual_seed(1000 + seed)
    base_logits = torch.randn(N, config.num_drafted, config.draft_vocab_size, generator=generator)
    hidden = torch.randn(N, config.block_size, config.hidden_size, generator=generator)
    ids = torch.randint(config.vocab_size, (N, config.block_size + 1), generator=generator)
    return base_logits, hidden, ids[:, 1], ids[:, 0], ids[:, 2:]


def as_problem(folded: FoldedRefiner, inputs: tuple[Tensor, ...]) -> backends.Problem:
    base_logits, hidden, anchor, predecessor, _ = inputs
    return backends.Problem(
        base_logits,
        folded.pad_hidden(hidden),
        anchor,
        predecessor,
        *folded.weights(),
        folded.d2t,
    )


@torch.no_grad()
def sequential_decode(refiner: XPressRefiner, inputs: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """Slot after slot with the unfolded module in fp64: tokens, and the closest best two logits."""
    base_logits, hidden, anchor, predecessor, _ = inputs
    prev = torch.stack([predecessor, anchor], 1)
    prev = torch.cat([prev, anchor[:, None].repeat(1, base_logits.shape[1])], 1)
    closest = float("inf")
    for k in range(base_logits.shape[1]):
        logits = refiner(base_logits.double(), hidden.double(), prev[:, :-1])[:, k]
        best_two = logits.topk(2).values
        closest = min(closest, float((best_two[:, 0] - best_two[:, 1]).min()))
        best = logits.argmax(-1)
        prev[:, k + 2] = best if refiner.d2t is None else best + refiner.d2t[best]
    return prev[:, 2:], closest


# ------------------------------------------------------------------------------------- the module


def test_qwen3_8b_parameter_counts() -> None:
    with torch.device("meta"):
        refiner = XPressRefiner(QWEN3_8B)
    sizes = {name: weight.numel() for name, weight in refiner.named_parameters()}
    assert sizes["w1.weight"] == sizes["w2.weight"] == 38_895_616
    assert sizes["down_h.weight"] + sizes["down_g.weight"] == 2_097_152
    assert sizes["in_proj.weight"] == 196_608
    assert sizes["mix.L"] == 65_536
    assert sum(size for name, size in sizes.items() if name.startswith("mlp.")) == 393_216
    assert sum(sizes.values()) == 80_543_744
    assert round(2 * sum(sizes.values()) / 1e6, 1) == 161.1


def test_parameters_carry_the_serving_format_s_names_and_shapes() -> None:
    shapes = {
        name: tuple(weight.shape) for name, weight in XPressRefiner(ODD_SIZES).state_dict().items()
    }
    assert shapes == {
        "w1.weight": (32, 8),
        "down_h.weight": (8, 16),
        "down_g.weight": (8, 16),
        "in_proj.weight": (8, 24),
        "mix.L": (8, 5, 5),
        "mlp.gate_proj.weight": (16, 8),
        "mlp.up_proj.weight": (16, 8),
        "mlp.down_proj.weight": (8, 16),
        "w2.weight": (32, 8),
    }


def test_weights_start_small_and_the_mixer_from_zeros() -> None:
    torch.manual_seed(0)
    for name, weight in XPressRefiner(CONFIGS["unpadded"]).named_parameters():
        if name == "mix.L":
            assert weight.eq(0).all()
        else:
            assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.1), name
            assert abs(float(weight.detach().mean())) < 0.002, name


def test_every_parameter_learns_and_the_mixer_only_below_its_diagonal() -> None:
    refiner = random_refiner(ODD_SIZES)
    base_logits, hidden, anchor, predecessor, tokens = random_inputs(ODD_SIZES)
    prev = torch.cat([predecessor[:, None], anchor[:, None], tokens[:, :-1]], 1)
    logits = refiner(base_logits.double(), hidden.double(), prev)
    logits.logsumexp(-1).sum().backward()
    for name, weight in refiner.named_parameters():
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0, name
    above = refiner.mix.L.grad.triu(1)
    assert above.eq(0).all()


def test_a_slot_reads_no_later_token() -> None:
    refiner = random_refiner(ODD_SIZES)
    _, hidden, _, _, _ = random_inputs(ODD_SIZES)
    prev = torch.zeros(3, 5, dtype=torch.int64)
    changed = prev.clone()
    changed[:, 3] = 7
    before, after = refiner.latent(hidden.double(), prev), refiner.latent(hidden.double(), changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(-1).all()


# --------------------------------------------------------------------------------------- the fold


@each_config
@pytest.mark.parametrize("weight", backends.WEIGHT_DTYPES, ids=str)
def test_folded_equals_unfolded_within_rounding(config: XPressConfig, weight: torch.dtype) -> None:
    refiner = random_refiner(config)
    inputs = base_logits, hidden, anchor, predecessor, tokens = random_inputs(config)
    prev = torch.cat([predecessor[:, None], anchor[:, None], tokens[:, :-1]], 1)
    exact = refiner(base_logits.double(), hidden.double(), prev)
    folded = as_problem(refiner.fold(weight), inputs).logits("reference", tokens)
    plain = refiner.to(weight)(base_logits.to(weight), hidden.to(weight), prev)
    assert_close_as_torch("logits", folded, exact, plain)


@each_config
def test_fold_pads_with_zeros_to_what_the_operators_take(config: XPressConfig) -> None:
    folded = random_refiner(config).fold(torch.bfloat16)
    r, H, m = (-(-n // 32) * 32 for n in (config.rank, config.hidden_size, config.mlp_hidden))
    B, V = config.block_size, config.vocab_size
    shapes = [(2, r, H), (V, r), (B, B, r), (2 * m, r), (r, m), (V, r)]
    assert [tuple(weight.shape) for weight in folded.weights()] == shapes
    for weight in folded.weights():
        assert weight.is_contiguous()
        assert weight.dtype is (torch.float32 if weight is folded.mixer else torch.bfloat16)
    for weight in (folded.token_table, folded.mixer, folded.readout, folded.mlp_gate_up):
        assert weight[..., config.rank :].eq(0).all()
    assert folded.hidden_proj[:, config.rank :].eq(0).all()
    assert folded.hidden_proj[..., config.hidden_size :].eq(0).all()
    assert folded.mlp_down[:, config.mlp_hidden :].eq(0).all()
    assert folded.mlp_gate_up.view(2, m, r)[:, config.mlp_hidden :].eq(0).all()


def test_fold_rounds_once_from_fp64() -> None:
    refiner = random_refiner(CONFIGS["unpadded"])
    folded = refiner.fold(torch.bfloat16)
    table = refiner.w1.weight @ refiner.in_proj.weight[:, 64:].T
    assert torch.equal(folded.token_table, table.to(torch.bfloat16))
    a_g = refiner.in_proj.weight[:, 32:64] @ refiner.down_g.weight
    assert torch.equal(folded.hidden_proj[1], a_g.to(torch.bfloat16))
    mixer = refiner.mix.L.tril() + torch.eye(8)
    assert torch.equal(folded.mixer, mixer.permute(1, 2, 0).float())


# ------------------------------------------------------------------------------------------ refine


@each_backend
@each_config
def test_refine_equals_the_unfolded_sequential_decode(config: XPressConfig, backend: str) -> None:
    for seed in range(5):
        refiner = random_refiner(config, seed)
        inputs = base_logits, hidden, anchor, predecessor, _ = random_inputs(config, seed=seed)
        expected, gap = sequential_decode(refiner, inputs)
        assert gap > 1e-4, "choose another seed: a near-tie would decide"
        folded = refiner.fold(torch.float32)
        for options in ({"num_passes": 15}, {"top_c": 2, "exact": True}):
            tokens = folded.refine(
                base_logits, hidden, anchor, predecessor, backend=backend, **options
            ).tokens
            assert torch.equal(tokens, expected)


@each_backend
def test_refine_speaks_target_ids_of_a_reduced_vocabulary(backend: str) -> None:
    config = XPressConfig(vocab_size=97, hidden_size=16, rank=8, block_size=5, draft_vocab_size=32)
    d2t = torch.arange(32) * 2 + 1  # target id = v + d2t[v] = 3v + 1
    refiner = random_refiner(config, d2t=d2t)
    inputs = base_logits, hidden, anchor, predecessor, _ = random_inputs(config)
    anchor[:] = torch.tensor([0, 96, 2])  # none of them in the draft's vocabulary
    expected, gap = sequential_decode(refiner, inputs)
    assert gap > 1e-4
    folded = refiner.fold(torch.float32)
    tokens = folded.refine(base_logits, hidden, anchor, predecessor, backend=backend).tokens
    assert torch.equal(tokens, expected)
    assert (tokens % 3 == 1).all()


@each_backend
def test_refine_takes_its_defaults_from_the_config(backend: str) -> None:
    config = XPressConfig(
        vocab_size=97, hidden_size=16, rank=8, block_size=16, num_passes=2, top_c=3
    )
    folded = random_refiner(config).fold(torch.float32)
    base_logits, hidden, anchor, predecessor, _ = random_inputs(config)
    default = folded.refine(base_logits, hidden, anchor, predecessor, backend=backend)
    told = folded.refine(base_logits, hidden, anchor, predecessor, 2, 3, backend=backend)
    for got, expected in zip(default, told, strict=True):
        assert torch.equal(got, expected)
    assert default.passes.max() == 2
    exact = folded.refine(base_logits, hidden, anchor, predecessor, exact=True, backend=backend)
    full = folded.refine(base_logits, hidden, anchor, predecessor, 15, 0, backend=backend)
    assert torch.equal(exact.tokens, full.tokens)
    assert exact.full_readouts.min() >= 1


@each_backend
def test_the_anchor_stands_in_for_an_unknown_predecessor(backend: str) -> None:
    folded = random_refiner(ODD_SIZES).fold(torch.float32)
    base_logits, hidden, anchor, _, _ = random_inputs(ODD_SIZES)
    without = folded.refine(base_logits, hidden, anchor, backend=backend)
    stated = folded.refine(base_logits, hidden, anchor, anchor, backend=backend)
    assert torch.equal(without.tokens, stated.tokens)


@each_backend
def test_refine_names_what_does_not_fit(backend: str) -> None:
    folded = random_refiner(ODD_SIZES).fold(torch.float32)
    base_logits, hidden, anchor, _, _ = random_inputs(ODD_SIZES)
    with pytest.raises(ValueError, match=r"hidden has 4 slots.*mixer.*block_size=5"):
        folded.refine(base_logits, hidden[:, :4], anchor, backend=backend)
    with pytest.raises(ValueError, match=r"hidden must be \[N,5,16\].*15"):
        folded.refine(base_logits, hidden[..., :15], anchor, backend=backend)
    with pytest.raises(ValueError, match=r"base_logits must be \[N,4,32\].*\[3, 3, 32\]"):
        folded.refine(base_logits[:, 1:], hidden, anchor, backend=backend)
    with pytest.raises(ValueError, match=r"backend must be"):
        folded.refine(base_logits, hidden, anchor, backend="numpy")


def test_folded_head_survives_its_state_dict() -> None:
    folded, other = (random_refiner(ODD_SIZES, seed).fold(torch.bfloat16) for seed in (0, 1))
    other.load_state_dict(folded.state_dict())
    for weight, loaded in zip(folded.weights(), other.weights(), strict=True):
        assert torch.equal(weight, loaded)


# ------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"rank": 513}, "rank must be from 1 to 512, got 513"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 33}, "block_size must be from 2 to 32, got 33"),
        ({"draft_vocab_size": 101}, "draft_vocab_size must be from 1 to 100"),
        ({"num_passes": 0}, "num_passes"),
        ({"top_c": 101}, "top_c must be from 0 to 100"),
        ({"rank": 2.5}, "rank must be an int"),
        ({"rank": None}, "rank must be an int, got None"),
        ({"rank": False}, "rank must be an int, got False"),
        ({"mlp_hidden": 0.0}, "mlp_hidden must be an int, got 0.0"),
        ({"draft_vocab_size": False}, "draft_vocab_size must be an int, got False"),
        ({"use_mlp": 1}, "use_mlp must be True or False, got 1"),
    ],
    ids=str,
)
def test_config_names_what_is_out_of_range(change: dict, names: str) -> None:
    sizes: dict = {"vocab_size": 100, "hidden_size": 16}
    with pytest.raises(ValueError, match=names):
        XPressConfig(**{**sizes, **change})


def test_a_reduced_vocabulary_needs_its_offsets() -> None:
    config = XPressConfig(vocab_size=97, hidden_size=16, rank=8, draft_vocab_size=32)
    with pytest.raises(ValueError, match=r"d2t is needed where draft_vocab_size=32"):
        XPressRefiner(config)
    with pytest.raises(ValueError, match=r"d2t must be \[32\] int64, got \[31\] int64"):
        XPressRefiner(config, torch.zeros(31, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"d2t must be \[32\] int64, got \[32\] int32"):
        XPressRefiner(config, torch.zeros(32, dtype=torch.int32))
    with pytest.raises(ValueError, match="d2t leads to ids 66 to 97, expected 0 to 96"):
        XPressRefiner(config, torch.full((32,), 66))
    with pytest.raises(ValueError, match="d2t leads to ids -1 to 30"):
        XPressRefiner(config, torch.full((32,), -1))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hidden_proj", lambda t: t[:1], r"hidden_proj must have shape \[2, 32, 32\]"),
        ("token_table", lambda t: t[:-1], r"token_table must have shape \[32, 32\].*\[31, 32\]"),
        ("mixer", lambda t: t[1:], r"mixer must have shape \[5, 5, 32\]"),
        ("mixer", lambda t: t.bfloat16(), r"mixer must be torch\.float32"),
        ("mlp_gate_up", lambda t: t.T, r"mlp_gate_up must have shape \[64, 32\]"),
        ("mlp_down", lambda t: t.half(), r"mlp_down must be torch\.bfloat16, got torch\.float16"),
        ("readout", lambda t: t.long(), "readout must be float32, bfloat16 or float16"),
        ("d2t", lambda t: torch.full((32,), 1), "d2t leads to ids 1 to 32"),
    ],
)
def test_folded_weights_that_do_not_fit_are_refused(name, change, message) -> None:
    weights = dict(XPressRefiner(ODD_SIZES).fold().named_buffers())
    with pytest.raises(ValueError, match=message):
        FoldedRefiner(ODD_SIZES, **{**weights, name: change(weights.get(name))})


def test_ids_that_the_head_cannot_read_are_named() -> None:
    head = XPressRefiner(ODD_SIZES)
    hidden, prev = torch.zeros(1, 5, 16), torch.zeros(1, 5, dtype=torch.int64)
    prev[0, 3] = 32
    with pytest.raises(IndexError, match="prev has ids 0 to 32, expected 0 <= id < 32"):
        head.latent(hidden, prev)
    with pytest.raises(IndexError, match="prev has ids -1 to 0"):
        head.latent(hidden, prev.clamp(max=0) - prev.eq(32).long())
    with pytest.raises(ValueError, match="prev must be int64, got int32"):
        head.latent(hidden, prev.int())


@each_backend
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"anchor": torch.zeros(3, dtype=torch.int32)}, ValueError),
        ({"predecessor": torch.zeros(3, dtype=torch.int32)}, ValueError),
        ({"seed_tokens": torch.zeros(3, 4, dtype=torch.int32)}, ValueError),
        ({"num_passes": 2.5}, (TypeError, RuntimeError)),
        ({"top_c": 2.0}, (TypeError, RuntimeError)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_both_backends_refuse_other_types(backend: str, change: dict, error) -> None:
    base_logits, hidden, anchor, _, _ = random_inputs(ODD_SIZES)
    arguments = {"base_logits": base_logits, "hidden": hidden, "anchor": anchor, **change}
    with pytest.raises(error, match=r"int64|int"):
        random_refiner(ODD_SIZES).fold(torch.float32).refine(**arguments, backend=backend)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64, None])
def test_weights_fold_to_the_operators_types_only(dtype: torch.dtype) -> None:
    head = XPressRefiner(XPressConfig(vocab_size=32, hidden_size=16, rank=8, block_size=5))
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16"):
        head.fold(dtype)


@pytest.mark.parametrize("backend", ["ops", "reference"])
def test_a_cast_mixer_is_refused(backend: str) -> None:
    head = XPressRefiner(XPressConfig(vocab_size=32, hidden_size=16, rank=8, block_size=5))
    cast = head.fold(torch.float32).bfloat16()
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"the mixer must stay float32, got torch\.bfloat16"):
        cast.refine(torch.zeros(1, 4, 32), torch.zeros(1, 5, 16), ids, backend=backend)


def test_logits_of_one_block_are_not_spread_over_others() -> None:
    head = XPressRefiner(XPressConfig(vocab_size=32, hidden_size=16, rank=8, block_size=5))
    prev = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="base_logits has N=1 blocks, expected hidden's 2"):
        head(torch.zeros(1, 4, 32), torch.zeros(2, 5, 16), prev)
