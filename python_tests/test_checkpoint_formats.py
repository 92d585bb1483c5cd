"""Formats A, B and C: the same modules from each, converted bit for bit, and refused by name."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import DRAFT_VOCABULARY, TARGET_VOCABULARY, make_drafter, make_refiner
from torch import Tensor, nn

from xpress_ext import cli
from xpress_ext.checkpoint import (
    CheckpointError,
    convert_checkpoint,
    format_of,
    load_checkpoint,
    save_checkpoint,
)
from xpress_ext.heads import DominoConfig, DominoHead, HeadConfig, MarkovConfig, MarkovHead, NoHead
from xpress_ext.refiner import XPressRefiner

OFFSETS = torch.arange(DRAFT_VOCABULARY) + 1


def make_head(kind: str, reduced: bool = False):
    sizes = (TARGET_VOCABULARY, 32, 5, DRAFT_VOCABULARY if reduced else 0)
    d2t = OFFSETS if reduced else None
    if kind == "markov":
        return MarkovHead(MarkovConfig(*sizes, rank=6), d2t)
    if kind == "domino":
        small = {"gru_hidden_dim": 7, "emb_dim": 6, "pure_draft_prefix_len": 2}
        return DominoHead(DominoConfig(*sizes, **small, shift_label=True), d2t)
    if kind == "xpress":
        return make_refiner(DRAFT_VOCABULARY if reduced else 0, num_passes=4, top_c=7)
    return NoHead(HeadConfig(*sizes), d2t) if kind == "none" else None


def name(tmp_path: Path, format: str, stem: str = "ck") -> Path:
    return tmp_path / (f"{stem}.pt" if format == "C" else stem)


def assert_equal_modules(one: nn.Module | None, other: nn.Module | None) -> None:
    if one is None or other is None:
        assert one is other
        return
    assert type(one) is type(other)
    assert one.config == other.config
    expected, state = one.state_dict(), other.state_dict()
    assert expected.keys() == state.keys()
    for key, tensor in expected.items():
        assert state[key].dtype == tensor.dtype, key
        assert torch.equal(state[key], tensor), key


# kind, reduced, formats that hold it
HELD = [
    ("xpress", False, "ABC"),
    ("xpress", True, "AB"),
    ("drafter", False, "ABC"),
    ("none", True, "AB"),
    ("markov", False, "B"),
    ("markov", True, "B"),
    ("domino", False, "B"),
    ("domino", True, "B"),
]
held = pytest.mark.parametrize(
    ("kind", "reduced", "formats"), HELD, ids=[f"{k}{'-reduced' * r}" for k, r, _ in HELD]
)


@held
@pytest.mark.parametrize("qk_norm", [True, False])
def test_every_format_gives_back_what_was_saved(tmp_path, kind, reduced, formats, qk_norm):
    drafter = make_drafter(qk_norm=qk_norm, draft_vocab_size=DRAFT_VOCABULARY if reduced else None)
    head = make_head(kind, reduced)
    for format in formats:
        path = name(tmp_path, format, format)
        save_checkpoint(path, drafter, head, dtype=None, format=format)
        assert format_of(path) == format
        loaded = load_checkpoint(path)
        assert_equal_modules(drafter, loaded[0])
        assert_equal_modules(head, loaded[1])
        modules = [module for module in loaded if module is not None]
        assert not any(module.training for module in modules)
        assert not any(weight.requires_grad for m in modules for weight in m.parameters())


@held
def test_what_a_format_has_no_place_for_is_refused_and_leaves_nothing(
    tmp_path, kind, reduced, formats
):
    drafter = make_drafter(draft_vocab_size=DRAFT_VOCABULARY if reduced else None)
    for format in sorted(set("ABC") - set(formats)):
        with pytest.raises(CheckpointError, match=f"format {format} has no place for"):
            save_checkpoint(
                tmp_path / "new" / "ck", drafter, make_head(kind, reduced), format=format
            )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("source", "ABC")
@pytest.mark.parametrize("to", "ABC")
def test_conversion_keeps_every_bit(tmp_path, source, to, dtype):
    drafter, head = make_drafter(num_target_layers=9), make_head("xpress")
    first, second, back = (
        name(tmp_path, f, s) for f, s in ((source, "1"), (to, "2"), (source, "3"))
    )
    save_checkpoint(first, drafter, head, dtype, source)
    convert_checkpoint(first, second, to)
    convert_checkpoint(second, back, source)
    assert format_of(second) == to
    for original, converted in zip(load_checkpoint(first), load_checkpoint(second), strict=True):
        assert_equal_modules(original, converted)
    if source != "C":
        for file in ("config.json", "model.safetensors"):
            assert (first / file).read_bytes() == (back / file).read_bytes()


# --- What stands in the files.


def test_format_a_has_its_names_its_layer_ids_and_both_maps(tmp_path):
    save_checkpoint(
        tmp_path,
        make_drafter(draft_vocab_size=DRAFT_VOCABULARY),
        make_refiner(DRAFT_VOCABULARY),
        format="A",
    )
    keys = json.loads((tmp_path / "config.json").read_text())
    assert keys["speculators_model_type"] == "xpress"
    assert keys["architectures"] == ["XPressSpeculator"]
    assert keys["aux_hidden_state_layer_ids"] == [2, 4, 6]  # plain ids 1, 3, 5
    assert (keys["mask_token_id"], keys["block_size"]) == (49, 5)
    assert (keys["xpress_rank"], keys["xpress_mlp_ratio"]) == (8, 2)
    assert (keys["num_jacobi_passes"], keys["sample_from_anchor"]) == (6, False)
    assert keys["draft_vocab_size"] == DRAFT_VOCABULARY
    assert keys["transformer_layer_config"]["vocab_size"] == TARGET_VOCABULARY
    tensors = load_file(tmp_path / "model.safetensors")
    parts = (
        "token_embed",
        "down_h",
        "down_g",
        "in_proj",
        "mlp_gate",
        "mlp_up",
        "mlp_down",
        "readout",
    )
    expected = {f"refiner_head.{part}.weight" for part in parts} | {"refiner_head.mix_l"}
    assert {n for n in tensors if n.startswith("refiner_head.")} == expected
    assert tensors["refiner_head.mix_l"].shape == (8, 5, 5)
    ids = torch.arange(DRAFT_VOCABULARY) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert tensors["t2d"].dtype == torch.bool


def test_format_c_has_its_names_and_the_mixers_mask(tmp_path):
    save_checkpoint(tmp_path / "ck.pt", make_drafter(), make_refiner(), format="C")
    state = torch.load(tmp_path / "ck.pt", weights_only=True)
    assert set(state) == {"draft_state_dict", "refiner_state_dict", "args", "global_step"}
    heads = {f"{n}.weight" for n in ("w1", "w2", "down_h", "down_g", "in_proj")}
    mlp = {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert set(state["refiner_state_dict"]) == heads | mlp | {"mix.L", "mix.tril"}
    assert torch.equal(state["refiner_state_dict"]["mix.tril"], torch.ones(5, 5).tril())
    assert state["args"]["dflash_config"]["target_layer_ids"] == [1, 3, 5]


def test_rivals_keep_their_public_names_and_keys(tmp_path):
    save_checkpoint(tmp_path / "m", make_drafter(), make_head("markov"))
    save_checkpoint(tmp_path / "d", make_drafter(), make_head("domino"))
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} <= set(
        load_file(tmp_path / "m" / "model.safetensors")
    )
    assert {
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    } <= set(load_file(tmp_path / "d" / "model.safetensors"))
    dflash = json.loads((tmp_path / "d" / "config.json").read_text())["dflash_config"]
    assert dflash["projector_type"] == "domino"
    assert (dflash["emb_dim"], dflash["gru_hidden_dim"]) == (6, 7)
    assert (dflash["pure_draft_prefix_len"], dflash["shift_label"]) == (2, True)


def test_a_markov_head_is_known_by_its_tensors_alone(tmp_path):
    save_checkpoint(tmp_path, make_drafter(), make_head("markov"))
    edit_config(
        tmp_path,
        lambda keys: (keys.pop("markov_rank"), keys["dflash_config"].pop("projector_type")),
    )
    head = load_checkpoint(tmp_path)[1]
    assert isinstance(head, MarkovHead)
    assert head.config.rank == 6


@pytest.mark.parametrize("kind", ["markov", "domino"])
def test_a_loaded_head_decodes_like_the_saved_one(tmp_path, kind):
    saved = make_head(kind)
    save_checkpoint(tmp_path, make_drafter(), saved, dtype=None)
    loaded = load_checkpoint(tmp_path)[1]
    slots = saved.config.num_drafted
    base, hidden = torch.randn(3, slots, TARGET_VOCABULARY), torch.randn(3, 5, 32)
    anchor, embedding = torch.arange(3), torch.randn(TARGET_VOCABULARY, 32)
    logits = []
    for head in (saved, loaded):
        if isinstance(head, DominoHead):
            head.attach_embedding(embedding)
        logits.append(head.decode(base, hidden, anchor).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("parts", [["mean"], ["mixer"], ["hidden", "mixer", "mlp"]], ids="-".join)
@pytest.mark.parametrize("format", "ABC")
def test_an_ablated_head_stays_ablated(tmp_path, format, parts):
    head = make_ablated(parts)
    path = name(tmp_path, format)
    save_checkpoint(path, make_drafter(), head, dtype=None, format=format)
    loaded = load_checkpoint(path)[1]
    assert loaded.config.left_out == head.config.left_out == tuple(parts)
    assert_equal_modules(head, loaded)


def make_ablated(parts: list[str]) -> XPressRefiner:
    refiner = make_refiner()
    config = type(refiner.config)(
        TARGET_VOCABULARY, 32, rank=8, block_size=5, **{f"use_{part}": False for part in parts}
    )
    return XPressRefiner(config)


def test_a_part_that_is_left_out_must_be_zero(tmp_path):
    head = make_ablated(["mixer"])
    with torch.no_grad():
        head.mix.L[0, 1, 0] = 1.0
    with pytest.raises(CheckpointError, match=r"xpress_head\.mix\.L .*switches off \(mixer\)"):
        save_checkpoint(tmp_path, make_drafter(), head)
    save_checkpoint(tmp_path, make_drafter(), make_refiner())
    edit_config(tmp_path, lambda keys: keys.update(xpress_without=["mixer"]))
    with pytest.raises(CheckpointError, match=r"mix\.L .* not zero"):
        load_checkpoint(tmp_path)


# --- Files of other programs.


def edit_config(folder: Path, edit) -> None:
    keys = json.loads((folder / "config.json").read_text())
    edit(keys)
    (folder / "config.json").write_text(json.dumps(keys))


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_state(path: Path, edit) -> None:
    state = torch.load(path, weights_only=True)
    edit(state)
    torch.save(state, path)


@pytest.fixture
def in_a(tmp_path):
    drafter = make_drafter(draft_vocab_size=DRAFT_VOCABULARY)
    save_checkpoint(tmp_path / "a", drafter, make_refiner(DRAFT_VOCABULARY), format="A")
    return tmp_path / "a"


@pytest.fixture
def in_c(tmp_path):
    save_checkpoint(tmp_path / "c.pt", make_drafter(), make_refiner(), format="C")
    return tmp_path / "c.pt"


def test_format_a_of_a_full_vocabulary_may_store_both_maps(tmp_path):
    save_checkpoint(tmp_path, make_drafter(), make_refiner(), format="A")

    def add_maps(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.zeros(TARGET_VOCABULARY, dtype=torch.int64)
        tensors["t2d"] = torch.ones(TARGET_VOCABULARY, dtype=torch.bool)
        tensors["verifier_lm_head.weight"] = torch.zeros(2, 2)

    edit_tensors(tmp_path, add_maps)
    assert load_checkpoint(tmp_path)[1].d2t is None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda k: k.pop("transformer_layer_config"), "lacks transformer_layer_config"),
        (lambda k: k.pop("xpress_rank"), "lacks xpress_rank"),
        (lambda k: k.update(transformer_layer_config=3), "transformer_layer_config is 3"),
        (lambda k: k["transformer_layer_config"].pop("hidden_size"), "lacks hidden_size"),
        (lambda k: k.update(aux_hidden_state_layer_ids=[0, 2, 4]), "aux_hidden_state_layer_ids"),
        (lambda k: k.update(aux_hidden_state_layer_ids="2,4"), "aux_hidden_state_layer_ids"),
        (lambda k: k.update(aux_hidden_state_layer_ids=[2, 4, 9]), "target_layer_ids is"),
        (lambda k: k.update(sample_from_anchor=True), "sample_from_anchor is true"),
        (lambda k: k.update(xpress_mlp_ratio="2"), "xpress_mlp_ratio is '2'"),
        (lambda k: k.update(xpress_mlp_ratio=2.03), "no whole width"),
        (lambda k: k.update(xpress_rank=None), "xpress_rank is None"),
        (
            lambda k: k.update(xpress_rank=9),
            r"refiner_head\.token_embed\.weight has shape \[50, 8\]",
        ),
        (lambda k: k.update(draft_vocab_size="x"), "draft_vocab_size is x"),
        (lambda k: k.update(xpress_mlp_ratio=10.0**5, xpress_rank=10**20), "mlp_hidden|rank"),
        (lambda k: k.update(speculators_model_type=["xpress"]), "expected one of"),
        (lambda k: k.update(speculators_model_type="eagle3"), "is 'eagle3', expected one of"),
    ],
)
def test_wrong_configs_of_format_a_are_named(in_a, edit, message):
    edit_config(in_a, edit)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(in_a)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("refiner_head.mix_l"), r"missing refiner_head\.mix_l"),
        (lambda t: t.update({"refiner_head.x": torch.zeros(1)}), r"unknown refiner_head\.x"),
        (
            lambda t: t.update({"refiner_head.mix_l": torch.zeros(5, 5, 8)}),
            r"refiner_head\.mix_l has shape \[5, 5, 8\], expected \[8, 5, 5\]",
        ),
        (lambda t: t.pop("d2t"), "no d2t"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t has shape"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d is not true exactly"),
        (lambda t: t.update(t2d=t["t2d"].int()), "t2d has shape"),
    ],
)
def test_wrong_tensors_of_format_a_are_named(in_a, edit, message):
    edit_tensors(in_a, edit)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(in_a)


def test_a_namespace_and_flat_keys_in_the_args_of_format_c_are_read(in_c):
    expected = load_checkpoint(in_c)

    def flatten(state: dict) -> None:
        args = state["args"]
        args |= args.pop("dflash_config")
        for key in [key for key in args if key.startswith("xpress_")]:
            del args[key]  # the sizes are read off the tensors
        state["args"] = argparse.Namespace(**args, learning_rate=6e-4)
        del state["refiner_state_dict"]["mix.tril"]

    edit_state(in_c, flatten)
    for one, other in zip(expected, load_checkpoint(in_c), strict=True):
        assert_equal_modules(one, other)


def test_what_the_args_of_format_c_lack_can_be_handed_in(in_c, tmp_path):
    save_checkpoint(tmp_path / "b", make_drafter(), make_refiner())
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    expected = load_checkpoint(in_c)
    edit_state(in_c, lambda state: state.update(args={"lr": 1.0}))
    with pytest.raises(CheckpointError, match="args: the drafter's config lacks hidden_size"):
        load_checkpoint(in_c)
    for one, other in zip(expected, load_checkpoint(in_c, config=config), strict=True):
        assert_equal_modules(one, other)
    with pytest.raises(ValueError, match="config is for format C"):
        load_checkpoint(tmp_path / "b", config=config)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.pop("draft_state_dict"), "draft_state_dict is missing"),
        (lambda s: s.update(draft_state_dict=[1]), "draft_state_dict is list"),
        (lambda s: s["draft_state_dict"].update(x=3), "draft_state_dict holds 'x': int"),
        (lambda s: s["draft_state_dict"].pop("fc.weight"), r"missing draft_state_dict\.fc\.weight"),
        (
            lambda s: s["refiner_state_dict"].update({"w2.weight": torch.zeros(3, 8)}),
            r"refiner_state_dict\.w2\.weight has shape \[3, 8\]",
        ),
        (
            lambda s: s["refiner_state_dict"].update({"w2.weight": torch.zeros(50, 8).long()}),
            r"refiner_state_dict\.w2\.weight is stored as torch\.int64",
        ),
        (lambda s: s["refiner_state_dict"].pop("mix.L"), r"refiner_state_dict\.mix\.L is missing"),
        (
            lambda s: s["refiner_state_dict"].update({"mix.tril": torch.ones(5, 5)}),
            r"mix\.tril is not the lower triangle",
        ),
        (
            lambda s: s["draft_state_dict"].update({"fc.weight": torch.zeros(2, 2).to_sparse()}),
            r"draft_state_dict\.fc\.weight is no plain tensor",
        ),
        (lambda s: s.update(args=[1]), "args is list"),
        (lambda s: s["args"].update(block_size=6), "block_size|has shape"),
    ],
)
def test_wrong_files_of_format_c_are_named(in_c, edit, message):
    edit_state(in_c, edit)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(in_c)


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("xpress", lambda k: k.update(xpress_mlp_hidden=10**30), "mlp_hidden must be"),
        ("xpress", lambda k: k.update(xpress_without=["eyes"]), "xpress_without is"),
        ("markov", lambda k: k.update(markov_rank=10**30), "rank must be"),
        ("markov", lambda k: k.update(markov_rank="6"), "rank must be an int"),
        (
            "markov",
            lambda k: k["dflash_config"].update(projector_type="x"),
            "projector_type is 'x'",
        ),
        ("domino", lambda k: k["dflash_config"].pop("shift_label"), "dflash_config.shift_label"),
        (
            "domino",
            lambda k: k["dflash_config"].update(emb_dim=7),
            r"embed_proj\.0\.weight has shape",
        ),
        ("domino", lambda k: k["dflash_config"].update(pure_draft_prefix_len=9), "prefix_len must"),
    ],
)
def test_wrong_configs_of_heads_are_named(tmp_path, kind, edit, message):
    save_checkpoint(tmp_path, make_drafter(), make_head(kind))
    edit_config(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


# --- Files that are not what they say.


class Bomb:
    """An object whose unpickling runs a command."""

    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self):
        return os.system, (self.command,)


def test_code_in_a_file_is_not_run(tmp_path, in_c):
    proof = tmp_path / "proof"
    edit_state(in_c, lambda state: state.update(args=Bomb(proof)))
    with pytest.raises(CheckpointError, match=r"is refused: .*would run code.*system"):
        load_checkpoint(in_c)
    in_c.write_bytes(pickle.dumps({"args": Bomb(proof)}))
    with pytest.raises(CheckpointError, match=r"is not a file of torch\.save"):
        load_checkpoint(in_c)
    assert not proof.exists()


@pytest.mark.parametrize("kept", [0, 1, 7, 100, 0.5, 0.99])
@pytest.mark.parametrize("format", "ABC")
def test_truncated_files_are_refused(tmp_path, format, kept):
    path = name(tmp_path, format)
    save_checkpoint(path, make_drafter(), make_refiner(), format=format)
    file = path if format == "C" else path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(CheckpointError, match="is not a"):
        load_checkpoint(path)


def test_a_pt_file_that_holds_something_else_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.zeros(3), path)
    with pytest.raises(CheckpointError, match="holds Tensor, expected a dictionary"):
        load_checkpoint(path)


# --- Saving and converting.


def test_the_example_of_the_document_runs(monkeypatch):
    root = Path(__file__).resolve().parent.parent
    monkeypatch.chdir(root)
    text = (root / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert isinstance(names["head"], XPressRefiner)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_odd_types_are_not_saved(tmp_path, dtype):
    with pytest.raises(ValueError, match="dtype is torch"):
        save_checkpoint(tmp_path / "ck", make_drafter(), make_refiner(), dtype)
    drafter = make_drafter()
    drafter.fc.weight = nn.Parameter(drafter.fc.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=r"fc\.weight is torch"):
        save_checkpoint(tmp_path / "ck", drafter, None, None)
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda: (make_drafter(), make_refiner().fold()), TypeError, "save the XPressRefiner"),
        (lambda: (make_refiner(), None), TypeError, "drafter must be a DFlashDrafter"),
        (lambda: (make_drafter(), nn.Linear(2, 2)), TypeError, "head must be.*got Linear"),
        (lambda: (make_drafter().to("meta"), None), ValueError, "on the meta device"),
        (lambda: (make_drafter(), None, None, "D"), ValueError, "format is 'D'"),
        (
            lambda: (make_drafter(block_size=6), make_head("markov")),
            CheckpointError,
            "block_size is 6 in the drafter and 5 in the head",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        save_checkpoint(tmp_path / "ck", *arguments())
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_of_another_shape_than_its_config_is_not_saved(tmp_path):
    refiner = make_refiner()
    refiner.w2 = nn.Linear(8, 3, bias=False)
    with pytest.raises(CheckpointError, match=r"xpress_head\.w2\.weight has shape \[3, 8\]"):
        save_checkpoint(tmp_path / "ck", make_drafter(), refiner)


@pytest.mark.parametrize("format", "ABC")
def test_a_failed_save_leaves_neither_files_nor_folders(tmp_path, monkeypatch, format):
    def fail(tensors, file, *rest):
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("xpress_ext.checkpoint.files.save_file", fail)
    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "deep" / "er" / "ck", make_drafter(), format=format)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_converted_onto_something(tmp_path, in_c):
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there exists"):
        convert_checkpoint(in_c, tmp_path / "there", "B")


def test_the_command_converts(tmp_path, in_c, capsys):
    assert cli.main(["convert", str(in_c), str(tmp_path / "b"), "--to", "B"]) == 0
    assert "b written in format B" in capsys.readouterr().out
    for one, other in zip(load_checkpoint(in_c), load_checkpoint(tmp_path / "b"), strict=True):
        assert_equal_modules(one, other)


def test_the_command_takes_a_config_for_what_is_missing(tmp_path, in_c, capsys):
    save_checkpoint(tmp_path / "b", make_drafter())
    edit_state(in_c, lambda state: state.update(args={}))
    command = ["convert", str(in_c), str(tmp_path / "a"), "--to", "A"]
    assert cli.main(command) == 1
    assert "xpress convert: " in (error := capsys.readouterr().err)
    assert "lacks hidden_size" in error
    assert not (tmp_path / "a").exists()
    assert cli.main([*command, "--config", str(tmp_path / "b" / "config.json")]) == 0
    assert format_of(tmp_path / "a") == "A"


@pytest.mark.parametrize("source", ["nowhere", "nowhere.pt"])
def test_the_command_names_what_is_not_there(tmp_path, capsys, source):
    command = ["convert", str(tmp_path / source), str(tmp_path / "a"), "--to", "A"]
    assert cli.main(command) == 1
    assert "does not exist" in capsys.readouterr().err
