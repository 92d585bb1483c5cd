"""`xpress demo`: one prompt decoded three ways, side by side, on SmolLM2-135M-Instruct.

Autoregressive decoding, the drafter alone and XPress run in turns, one verification step each, so
that the panes advance by what each step accepted. The panes live in demo_terminal, the page that
replays the race in demo_page.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from xpress_ext._library import load_library
from xpress_ext.build_info import build_info
from xpress_ext.decoding import (
    NEAR_TIE_GAP,
    DecodeStatistics,
    GenerateOutput,
    SpeculativeDecoder,
    StepEvent,
    first_difference,
    greedy_steps,
)

if TYPE_CHECKING:
    from xpress_ext.drafter import DFlashDrafter
    from xpress_ext.refiner import XPressRefiner

CHECKPOINT_NAME = "smollm2-135m-xpress"
CHECKPOINT_VARIABLE = "XPRESS_CHECKPOINT"
NUM_PASSES = 6
DEFAULT_PROMPTS = (
    "A baker fills 4 trays with 18 rolls each. She sells 45 rolls in the morning and half of "
    "the rest in the afternoon. How many rolls are left in the evening?",
    "Write a Python function that returns the n-th Fibonacci number with a loop, and explain it.",
)
PROMPT_FIELDS = ("prompt", "question", "turns")  # of a JSON line; the first that it has

Row = tuple[str, list[str]]


class DemoError(RuntimeError):
    """The demo cannot run; the message says what is missing and what to do."""


@dataclass(frozen=True)
class DemoOptions:
    """The command line; without `prompt` and `prompts` (a file) two prompts of our own."""

    prompt: str | None = None
    prompts: Path | None = None
    plain: bool = False
    html: Path | None = None
    max_new_tokens: int = 96
    checkpoint: Path | None = None


@dataclass
class Lane:
    """One of the three decodes: its steps so far, and its text in pieces, one per token."""

    key: str
    title: str
    steps: Iterator[StepEvent]
    stats: DecodeStatistics
    tokenizer: Any
    events: list[StepEvent] = field(default_factory=list)
    pieces: list[list[tuple[str, bool]]] = field(default_factory=list)
    fast_forward: bool = False
    _tokens: list[int] = field(default_factory=list)
    _shown: str = ""

    @property
    def finished(self) -> bool:
        """Whether the decode reached an end token or a limit."""
        return self.stats.finish_reason is not None

    @property
    def text(self) -> str:
        """The decoded text so far."""
        return self._shown

    def advance(self) -> None:
        """One step; each of its tokens becomes a piece (text, whether it was drafted)."""
        event = next(self.steps)
        self.stats.record(event)
        self.events.append(event)
        pieces = [
            (self._read(token), index < event.accepted) for index, token in enumerate(event.tokens)
        ]
        self.pieces.append(pieces)

    def advance_to_end(self) -> None:
        """All steps that are left."""
        while not self.finished:
            self.advance()

    def output(self) -> GenerateOutput:
        """What the decode has given so far."""
        return GenerateOutput(torch.tensor([self._tokens]), self.stats)

    def _read(self, token: int) -> str:
        """The text that `token` adds; "" while a character of several bytes is unfinished."""
        self._tokens.append(token)
        text = self.tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        added = text[len(self._shown) :]
        self._shown = text
        return added


@dataclass(frozen=True)
class Race:
    """A finished race: the prompt, its three lanes, the table's rows and the verdict's lines."""

    prompt: str
    lanes: list[Lane]
    figures: list[Row]
    verdict: list[str]


class View(Protocol):
    """Where a race is shown."""

    def start(self, heading: str, prompt: str, lanes: list[Lane]) -> None: ...
    def update(self, lanes: list[Lane]) -> None: ...
    def finish(self, race: Race) -> None: ...
    def summary(self, title: str, figures: list[Row], notes: list[str]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Models:
    """The target with its tokenizer, and the two decoders that share its drafter."""

    target: Any
    tokenizer: Any
    drafter_alone: SpeculativeDecoder
    xpress: SpeculativeDecoder

    def lanes(self, prompt: str, max_new_tokens: int) -> list[Lane]:
        """The three decodes of `prompt`, not yet begun. ValueError if it does not fit."""
        ids = chat_ids(self.tokenizer, prompt)
        plain = greedy_steps(self.target, ids, max_new_tokens=max_new_tokens)
        lanes = [self._lane("autoregressive", "Autoregressive", plain, 1)]
        for key, title, decoder in (
            ("drafter", "Drafter alone", self.drafter_alone),
            ("xpress", "XPress", self.xpress),
        ):
            steps = decoder.steps(ids, max_new_tokens=max_new_tokens)
            lanes.append(self._lane(key, title, steps, decoder.block_size))
        return lanes

    def _lane(self, key: str, title: str, steps: Iterator[StepEvent], block_size: int) -> Lane:
        return Lane(key, title, steps, DecodeStatistics(block_size), self.tokenizer)


def run_demo(options: DemoOptions) -> None:
    """Run the races and show them. Raises DemoError with a message for the user."""
    if options.max_new_tokens < 1:
        raise DemoError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    prompts = read_prompts(options)
    _check_page_path(options.html)
    view = _view(options)
    models = load_models(find_checkpoint(options.checkpoint))
    races = []
    try:
        for number, prompt in enumerate(prompts, 1):
            lanes = _lanes(models, prompt, number, options.max_new_tokens)
            heading = f"Prompt {number} of {len(prompts)}" if len(prompts) > 1 else "Prompt"
            view.start(heading, prompt, lanes)
            run_race(lanes, view)
            races.append(Race(prompt, lanes, figures(_stats(lanes)), verdict(lanes)))
            view.finish(races[-1])
        pooled = [pool(lane) for lane in zip(*(_stats(race.lanes) for race in races), strict=True)]
        notes = [cost_note(pooled), setting()]
        all_figures = figures(pooled)
        view.summary(f"All {len(races)} prompts" if len(races) > 1 else "", all_figures, notes)
    finally:
        view.close()
    if options.html is not None:
        _write_page(options.html, races, all_figures, notes)


def run_race(lanes: list[Lane], view: View) -> None:
    """One verification step of each unfinished lane per round, until all have finished.

    Once the drafted lanes have, nothing is left to compare: plain decoding runs on unwatched.
    """
    plain, *drafted = lanes
    while not all(lane.finished for lane in drafted):
        for lane in lanes:
            if not lane.finished:
                lane.advance()
        view.update(lanes)
    plain.fast_forward = not plain.finished
    view.update(lanes)
    plain.advance_to_end()
    view.update(lanes)


def figures(stats: Sequence[DecodeStatistics]) -> list[Row]:
    """The table: label with unit, and a value per lane. Times are means over verification steps."""
    rows = [
        _row("tokens", stats, lambda s: f"{s.num_tokens}"),
        _row("verification steps", stats, lambda s: f"{s.verification_steps}"),
        _row("acceptance length, tokens/step", stats, lambda s: f"{s.mean_acceptance_length:.2f}"),
        _row("steps that took the whole block, %", stats, _whole_blocks),
        _row("passes per block", stats, lambda s: f"{s.mean_passes:.2f}" if any(s.passes) else "-"),
    ]
    for stage, label in (
        ("target", "target, ms/step"),
        ("drafter", "drafter, ms/step"),
        ("lm_head", "LM head of the draft, ms/step"),
        ("refiner", "refiner, ms/step"),
    ):
        rows.append(_row(label, stats, lambda s, stage=stage: _per_step(s, s.milliseconds[stage])))
    rows += [
        _row("whole step, ms", stats, lambda s: _per_step(s, s.decode_milliseconds)),
        _row("tokens/s", stats, lambda s: f"{s.tokens_per_second:.1f}"),
        _row("near-ties of the target", stats, lambda s: f"{len(s.near_ties)}"),
    ]
    return rows


def verdict(lanes: Sequence[Lane]) -> list[str]:
    """Whether the three texts are equal, and where a difference comes from."""
    plain, *drafted = [lane.output() for lane in lanes]
    lines = []
    for lane, output in zip(lanes[1:], drafted, strict=True):
        difference = first_difference(plain, output)
        if difference is None:
            continue
        where = f"{lane.title} differs from autoregressive decoding from token {difference.index}"
        if difference.near_tie:
            lines.append(
                f"{where} on: a near-tie (the target's two best logits lie within "
                f"{NEAR_TIE_GAP:g}), where a block's forward and a plain step may round apart."
            )
        else:
            lines.append(f"{where} on, with no near-tie to explain it: please report this.")
    return lines or ["All three texts are equal."]


def cost_note(stats: Sequence[DecodeStatistics]) -> str:
    """What the accepted tokens of a step must make up for on this machine."""
    plain, _, xpress = stats
    if not plain.verification_steps or not xpress.verification_steps:
        return "The texts ended with their first token: there is nothing to compare."
    plain_step = plain.decode_milliseconds / plain.verification_steps
    ratio = xpress.decode_milliseconds / xpress.verification_steps / plain_step
    accepted = xpress.mean_acceptance_length
    outcome = "faster" if accepted > ratio else "slower"
    return (
        f"A step of XPress costs {ratio:.2f} plain steps on this machine and yields "
        f"{accepted:.2f} tokens, so XPress is {outcome} than plain decoding here "
        f"({accepted / ratio:.2f} times its speed)."
    )


def pool(stats: Sequence[DecodeStatistics]) -> DecodeStatistics:
    """Statistics over several prompts; `near_ties` then only counts."""
    pooled = DecodeStatistics(stats[0].block_size)
    for one in stats:
        pooled.num_tokens += one.num_tokens
        pooled.prompt_milliseconds += one.prompt_milliseconds
        pooled.decode_milliseconds += one.decode_milliseconds
        for name in ("acceptance_lengths", "drafted", "passes", "full_readouts", "near_ties"):
            getattr(pooled, name).extend(getattr(one, name))
        for stage, milliseconds in one.milliseconds.items():
            pooled.milliseconds[stage] += milliseconds
    return pooled


def setting() -> str:
    """The machine and versions behind the figures."""
    from xpress_ext.targets import SMOLLM2_NAME

    return (
        f"{SMOLLM2_NAME}, greedy, fp32, K={NUM_PASSES}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}; "
        "figures leave out the prompt's forward."
    )


def read_prompts(options: DemoOptions) -> list[str]:
    """The prompts of the command line. Raises DemoError for an empty or unreadable source."""
    if options.prompt is not None and options.prompts is not None:
        raise DemoError("give --prompt or --prompts, not both")
    if options.prompt is not None:
        if not options.prompt.strip():
            raise DemoError("--prompt is empty: give it a text")
        return [_encodable(options.prompt, "--prompt")]
    if options.prompts is None:
        return list(DEFAULT_PROMPTS)
    try:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"--prompts {options.prompts} cannot be read as text: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DemoError(f"--prompts {options.prompts} is empty: one prompt a line, or JSON lines")
    if options.prompts.suffix == ".jsonl":
        return [_json_prompt(options.prompts, number, line) for number, line in numbered]
    return [line for _, line in numbered]


def _encodable(text: str, source: str) -> str:
    """`text`, read as UTF-8 where a C locale took its bytes apart. Raises DemoError."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        pass
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DemoError(
            f"{source} holds {text[error.start]!a} at character {error.start}, "
            "which is no text: expected UTF-8"
        ) from error
    return text


def find_checkpoint(given: Path | None) -> Path:
    """The checkpoint's folder: as given, else $XPRESS_CHECKPOINT, the repository's, the package's.

    Raises DemoError if there is none.
    """
    named = given or (Path(value) if (value := os.environ.get(CHECKPOINT_VARIABLE)) else None)
    if named is not None:
        if not (named / "config.json").is_file():
            source = "--checkpoint" if given else CHECKPOINT_VARIABLE
            raise DemoError(f"{source} {named} is no checkpoint: it has no config.json")
        return named
    package = Path(__file__).resolve().parent
    places = [base / "checkpoints" / CHECKPOINT_NAME for base in (package.parent, package)]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise DemoError(
        f"no checkpoint at {' or '.join(map(str, places))}: run in a clone of the repository, "
        f"or name its folder with --checkpoint or {CHECKPOINT_VARIABLE}"
    )


def load_models(checkpoint: Path) -> Models:
    """The target, and the drafter and refiner of `checkpoint`, in fp32.

    Raises DemoError if a package, the operators, the model or a part of the checkpoint is missing.
    """
    _require("transformers", "tokenizers", "gguf", "safetensors", "jinja2")
    try:
        load_library()
        build_info()  # refuses an XPRESS_CPU_ISA that is not to be had
    except (ImportError, ValueError) as error:
        raise DemoError(str(error)) from error
    from xpress_ext.targets import SMOLLM2_NAME, TargetNotAvailableError, load_smollm2

    drafter, refiner = _load_heads(checkpoint)
    print(f"Loading {SMOLLM2_NAME} and {checkpoint} ...", flush=True)
    try:
        target, tokenizer = load_smollm2(torch.float32)
    except TargetNotAvailableError as error:
        raise DemoError(str(error)) from error
    try:
        return Models(
            target,
            tokenizer,
            SpeculativeDecoder(target, drafter, d2t=refiner.d2t),
            SpeculativeDecoder(target, drafter, refiner.fold(), num_passes=NUM_PASSES),
        )
    except (ValueError, TypeError) as error:
        raise DemoError(f"checkpoint {checkpoint} does not fit the target: {error}") from error


def chat_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    """prompt -> ids [1, T] int64 of the model's chat template, up to the answer's start."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])


def _load_heads(checkpoint: Path) -> tuple[DFlashDrafter, XPressRefiner]:
    from xpress_ext.checkpoint import load_checkpoint
    from xpress_ext.refiner import XPressRefiner

    try:
        drafter, refiner = load_checkpoint(checkpoint, torch.float32)
    except Exception as error:  # a damaged file fails in as many ways as it has readers
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DemoError(f"checkpoint {checkpoint} cannot be loaded: {reason}") from error
    if not isinstance(refiner, XPressRefiner):
        raise DemoError(f"checkpoint {checkpoint} holds a drafter without a refiner")
    return drafter, refiner


def _view(options: DemoOptions) -> View:
    if options.plain or not sys.stdout.isatty():
        from xpress_ext.demo_terminal import PlainView

        return PlainView()
    _require("rich", advice="or use --plain")
    from xpress_ext.demo_terminal import PaneView

    return PaneView()


def _require(*packages: str, advice: str = "") -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        ending = f", {advice}" if advice else ""
        raise DemoError(f"{names} missing: run `pip install {' '.join(missing)}`{ending}")


def _lanes(models: Models, prompt: str, number: int, max_new_tokens: int) -> list[Lane]:
    try:
        return models.lanes(prompt, max_new_tokens)
    except ValueError as error:
        raise DemoError(f"prompt {number}: {error}") from error


def _json_prompt(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
        prompt = next(record[name] for name in PROMPT_FIELDS if name in record)
        prompt = prompt if isinstance(prompt, str) else prompt[0]
    except (ValueError, TypeError, KeyError, IndexError, StopIteration):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        names = ", ".join(PROMPT_FIELDS)
        raise DemoError(f"{path}:{number}: expected a JSON object with one of {names}")
    return _encodable(prompt, f"{path}:{number}")


def _check_page_path(page: Path | None) -> None:
    """Refuse a path that cannot be written before minutes of decoding, not after."""
    if page is None:
        return
    if page.is_dir():
        raise DemoError(f"--html {page} is a folder: name a file in it")
    if page.exists() and not page.is_file():
        raise DemoError(f"--html {page} is not a regular file: name one, or a new one")
    if not os.access(page.resolve().parent, os.W_OK):
        raise DemoError(f"--html {page}: the folder does not exist or cannot be written")


def _write_page(path: Path, races: list[Race], all_figures: list[Row], notes: list[str]) -> None:
    from xpress_ext.demo_page import write_page

    try:
        write_page(path, races, all_figures, notes)
    except OSError as error:
        raise DemoError(f"--html {path} cannot be written: {error}") from error
    print(f"The race is in {path}: open it in a browser.")


def _stats(lanes: Sequence[Lane]) -> list[DecodeStatistics]:
    return [lane.stats for lane in lanes]


def _row(label: str, stats: Sequence[DecodeStatistics], value: Any) -> Row:
    return label, [value(one) for one in stats]


def _per_step(stats: DecodeStatistics, milliseconds: float) -> str:
    if milliseconds == 0.0 or not stats.verification_steps:
        return "-"
    return f"{milliseconds / stats.verification_steps:.1f}"


def _whole_blocks(stats: DecodeStatistics) -> str:
    return "-" if stats.block_size == 1 else f"{100 * stats.whole_block_share:.0f}"
