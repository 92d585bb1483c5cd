"""Format B: what is saved loads again, and what cannot be loaded is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from xpress_ext.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from xpress_ext.config import XPressConfig
from xpress_ext.drafter import DFlashConfig, DFlashDrafter
from xpress_ext.refiner import XPressRefiner

TARGET_VOCABULARY, DRAFT_VOCABULARY = 50, 20


def make_drafter(**changes) -> DFlashDrafter:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": TARGET_VOCABULARY,
        "num_target_layers": 7,
        "target_layer_ids": (1, 3, 5),
        "mask_token_id": 49,
        "block_size": 5,
    }
    torch.manual_seed(0)
    drafter = DFlashDrafter(DFlashConfig(**{**sizes, **changes}))
    return drafter


def make_refiner(draft_vocab_size: int = 0, **changes) -> XPressRefiner:
    sizes = {"vocab_size": TARGET_VOCABULARY, "hidden_size": 32, "rank": 8, "block_size": 5}
    d2t = None
    if draft_vocab_size:
        d2t = 2 * torch.arange(draft_vocab_size) + 1 - torch.arange(draft_vocab_size)
    config = XPressConfig(draft_vocab_size=draft_vocab_size, **{**sizes, **changes})
    refiner = XPressRefiner(config, d2t)
    torch.nn.init.normal_(refiner.mix.L)
    return refiner


@pytest.fixture
def folder(tmp_path):
    drafter = make_drafter(draft_vocab_size=DRAFT_VOCABULARY)
    save_checkpoint(tmp_path / "ck", drafter, make_refiner(DRAFT_VOCABULARY), dtype=None)
    return tmp_path / "ck"


def edit_config(folder, **changes):
    path = folder / "config.json"
    keys = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("draft_vocab_size", [0, DRAFT_VOCABULARY])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_checkpoint_survives_a_round_trip_bit_for_bit(tmp_path, draft_vocab_size, qk_norm):
    drafter = make_drafter(qk_norm=qk_norm, draft_vocab_size=draft_vocab_size or None)
    refiner = make_refiner(draft_vocab_size)
    save_checkpoint(tmp_path, drafter, refiner, dtype=None)
    loaded_drafter, loaded_refiner = load_checkpoint(tmp_path)
    assert loaded_drafter.config == drafter.config
    assert loaded_refiner.config == refiner.config
    for ours, theirs in ((drafter, loaded_drafter), (refiner, loaded_refiner)):
        expected, state = ours.state_dict(), theirs.state_dict()
        assert expected.keys() == state.keys()
        assert all(torch.equal(expected[name], state[name]) for name in expected)


def test_names_in_the_file_are_those_of_the_serving_format(folder):
    names = set(load_file(folder / "model.safetensors"))
    heads = {f"xpress_head.{n}.weight" for n in ("w1", "down_h", "down_g", "in_proj", "w2")}
    mlp = {f"xpress_head.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert {n for n in names if n.startswith("xpress_head.")} == heads | mlp | {"xpress_head.mix.L"}
    assert {"d2t", "fc.weight", "hidden_norm.weight", "norm.weight"} <= names
    assert "layers.1.self_attn.q_norm.weight" in names


def test_config_carries_the_serving_keys(folder):
    keys = json.loads((folder / "config.json").read_text())
    assert keys["architectures"] == ["Qwen3XPressModel"]
    assert keys["dflash_config"]["target_layer_ids"] == [1, 3, 5]
    assert keys["sample_from_anchor"] is False
    assert (keys["xpress_rank"], keys["xpress_mlp_hidden"]) == (8, 16)
    assert (keys["xpress_block_size"], keys["block_size"]) == (5, 5)
    assert (keys["xpress_num_passes"], keys["xpress_topc"]) == (6, 0)
    assert keys["draft_vocab_size"] == DRAFT_VOCABULARY


def test_weights_are_stored_in_bf16_and_loaded_in_the_type_asked_for(tmp_path):
    save_checkpoint(tmp_path, make_drafter(), make_refiner(), dtype=torch.bfloat16)
    assert load_checkpoint(tmp_path)[0].fc.weight.dtype == torch.bfloat16
    drafter, refiner = load_checkpoint(tmp_path, dtype=torch.float32)
    assert {p.dtype for m in (drafter, refiner) for p in m.parameters()} == {torch.float32}


def test_a_drafter_alone_loads_without_a_refiner(tmp_path):
    save_checkpoint(tmp_path, make_drafter())
    assert load_checkpoint(tmp_path)[1] is None


def test_the_targets_own_matrices_in_the_file_are_passed_over(folder):
    def add_borrowed(tensors):
        tensors["embed_tokens.weight"] = torch.zeros(4, 4)
        tensors["lm_head.weight"] = torch.zeros(3, 4)

    edit_tensors(folder, add_borrowed)
    load_checkpoint(folder)


def test_a_failed_save_leaves_the_old_checkpoint_whole(folder, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("xpress_ext.checkpoint.files.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(folder, make_drafter())
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.pop("xpress_head.mix.L"), "missing xpress_head.mix.L"),
        (lambda t: t.update(surprise=torch.zeros(1)), "unknown surprise"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), "norm.weight has shape"),
        (lambda t: t.pop("d2t"), "no d2t"),
        (lambda t: t.update(d2t=t["d2t"] + 40), "d2t leads to ids"),
        (lambda t: t.update(d2t=t["d2t"] - 2), "d2t leads to ids -1"),
    ],
)
def test_wrong_tensors_are_named(folder, edit, named):
    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"xpress_block_size": 4}, "xpress_block_size is 4"),
        ({"xpress_rank": 600}, "rank"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type is 'eagle'"),
    ],
)
def test_wrong_configs_are_named(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(folder)


def test_files_that_are_missing_or_something_else_are_refused(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_checkpoint(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 4}, "block_size is 5 in the drafter and 4 in the refiner"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"draft_vocab_size": 10}, "draft_vocab_size"),
    ],
)
def test_a_drafter_and_a_refiner_that_do_not_fit_are_not_saved(tmp_path, changes, named):
    sizes = {"draft_vocab_size": DRAFT_VOCABULARY, **changes}
    refiner = make_refiner(**sizes)
    with pytest.raises(CheckpointError, match=named):
        save_checkpoint(tmp_path, make_drafter(draft_vocab_size=DRAFT_VOCABULARY), refiner)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 10**30),
        ("intermediate_size", 1.5),
        ("num_hidden_layers", True),
        ("num_attention_heads", "4"),
        ("vocab_size", [1]),
        ("block_size", "5"),
        ("num_target_layers", 7.5),
        ("rms_norm_eps", -1),
        ("rope_theta", "x"),
        ("draft_vocab_size", 1.5),
        ("dflash_config", 3),
        ("dflash_config", {"mask_token_id": "x", "target_layer_ids": [1, 3, 5]}),
        ("dflash_config", {"mask_token_id": 49, "target_layer_ids": 3}),
        ("dflash_config", {"mask_token_id": 49, "target_layer_ids": [1.5]}),
    ],
)
def test_a_config_value_of_the_wrong_type_is_named(folder, key, value):
    edit_config(folder, **{key: value})
    name = next(iter(value)) if isinstance(value, dict) and value["mask_token_id"] == "x" else key
    name = "target_layer_ids" if isinstance(value, dict) and name == key else name
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} "):
        load_checkpoint(folder)


def test_a_config_nested_beyond_reason_is_refused(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("fc.weight", torch.int64, r"fc\.weight is stored as torch\.int64"),
        ("fc.weight", torch.float8_e4m3fn, r"fc\.weight is stored as torch\.float8_e4m3fn"),
        ("d2t", torch.float32, r"d2t has shape .* and type torch\.float32, expected integers"),
    ],
)
def test_a_tensor_of_the_wrong_type_is_named(folder, name, dtype, message):
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_offsets_of_another_length_are_refused(folder):
    edit_tensors(folder, lambda tensors: tensors.update(d2t=tensors["d2t"][:-1].clone()))
    with pytest.raises(CheckpointError, match="d2t has shape"):
        load_checkpoint(folder)


def test_parameters_are_loaded_as_floating_point_only(folder):
    with pytest.raises(ValueError, match=r"dtype is torch\.int64"):
        load_checkpoint(folder, torch.int64)
