"""Draws the pictures of README.md and docs/ as SVG files in docs/figures.

    python benchmarks/draw_figures.py

``block.svg`` shows one pass of the refiner over a block. ``jacobi.svg`` shows the tokens after each
pass on a small random head, computed by ``xpress_ext.reference``. Both are the same on every run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from xpress_ext import reference
from xpress_ext.config import XPressConfig
from xpress_ext.refiner import FoldedRefiner, XPressRefiner

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, FAINT, LINE = "#1f2430", "#69707d", "#9aa3b2"
BLUE, YELLOW, GREEN, GREY = "#dbe7ff", "#ffedc2", "#d4f0dc", "#f1f3f6"
RED, DEEP_RED = "#ffe0da", "#ffb3a3"


# ------------------------------------------------------------------------------------ SVG pieces


@dataclass
class Drawing:
    """An SVG file in the making; coordinates in pixels, y downwards."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, text: str, fill: str) -> None:
        """A rounded box with centred text."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" '
            f'stroke="{LINE}"/>'
        )
        self.text(x + w / 2, y + h / 2 + 5, text)

    def text(
        self, x: float, y: float, text: str, size: int = 14, anchor: str = "middle", ink: str = INK
    ) -> None:
        """One line of text on its baseline."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{ink}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], ink: str = FAINT, width: float = 1.4) -> None:
        """A line through the points with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="{width:g}" '
            f'marker-end="url(#head)"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, ink: str = LINE) -> None:
        """A thin line."""
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}"/>')

    def svg(self) -> str:
        """The file's text. It has a white ground of its own, so that it reads on a dark page."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{FAINT}"/></marker>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<defs>{head}</defs>",
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------- one pass, as boxes

SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
COLUMN, FIRST, BOX = 114, 194, 92  # pitch of the slots, left edge of slot 0, width of a box


def block_figure(num_slots: int = 5) -> str:
    """One block of `num_slots` slots through the refiner."""
    rows = {"h": 58, "x": 132, "prev": 232, "c": 312, "z": 386, "s": 460, "token": 534}
    drawing = Drawing(838, 596, "One pass of the refiner over a block")
    _slot_headings(drawing, num_slots)
    _frames(drawing, rows, num_slots)
    _boxes(drawing, rows, num_slots)
    _arrows(drawing, rows, num_slots)
    _row_names(drawing, rows)
    return drawing.svg()


def _left(slot: int) -> float:
    return FIRST + slot * COLUMN


def _middle(slot: int) -> float:
    return _left(slot) + BOX / 2


def _slot_headings(drawing: Drawing, num_slots: int) -> None:
    for k in range(num_slots):
        drawing.text(_middle(k), 38, "slot 0" if k == 0 else f"slot {k}", 13, ink=FAINT)


def _frames(drawing: Drawing, rows: dict[str, int], num_slots: int) -> None:
    right = _left(num_slots - 1) + BOX + 74
    for top, bottom, name in (
        (rows["h"] - 12, rows["x"] + 60, "once per block"),
        (rows["prev"] - 12, rows["token"] + 46, "every pass"),
    ):
        drawing.parts.append(
            f'<rect x="14" y="{top}" width="{right - 14:g}" height="{bottom - top}" rx="10" '
            f'fill="none" stroke="{LINE}" stroke-dasharray="4 4"/>'
        )
        drawing.text(right - 8, bottom - 8, name, 13, "end", FAINT)


def _boxes(drawing: Drawing, rows: dict[str, int], num_slots: int) -> None:
    previous = ["predecessor", "anchor", *(f"token{SUBSCRIPTS[k]}" for k in range(1, num_slots))]
    for k in range(num_slots):
        x, index = _left(k), SUBSCRIPTS[k]
        drawing.box(x, rows["h"], BOX, 34, f"h{index}", BLUE)
        drawing.box(x, rows["x"], BOX, 34, f"x{index}", BLUE)
        drawing.box(x, rows["prev"], BOX, 34, previous[k], YELLOW)
        drawing.box(x, rows["c"], BOX, 34, f"c{index}", GREY)
        if k > 0:
            drawing.box(x, rows["z"], BOX, 34, f"z{index}", GREY)
            drawing.box(x, rows["s"], BOX, 34, f"s{index} + Wᵣz{index}", BLUE)
            drawing.box(x, rows["token"], BOX, 34, f"token{index}", GREEN)


def _arrows(drawing: Drawing, rows: dict[str, int], num_slots: int) -> None:
    for k in range(num_slots):
        for j in range(k + 1):
            drawing.arrow((_middle(j), rows["h"] + 34), (_middle(k), rows["x"]), ink=LINE, width=1)
            drawing.arrow((_middle(j), rows["prev"] + 34), (_middle(k), rows["c"]), width=1.2)
        for upper, lower in (("c", "z"), ("z", "s"), ("s", "token")):
            if k > 0:
                drawing.arrow((_middle(k), rows[upper] + 34), (_middle(k), rows[lower]))
    right = _left(num_slots - 1) + BOX
    y = rows["token"] + 17
    drawing.arrow(
        (right, y), (right + 34, y), (right + 34, rows["prev"] + 17), (right + 2, rows["prev"] + 17)
    )
    drawing.text(right + 40, 400, "next", 12, "start", FAINT)
    drawing.text(right + 40, 415, "pass", 12, "start", FAINT)


def _row_names(drawing: Drawing, rows: dict[str, int]) -> None:
    for row, lines in {
        "h": ("drafter's", "hidden states"),
        "x": ("project_hidden (with", "their mean), causal_mix"),
        "prev": ("tokens as", "they stand"),
        "c": ("fuse_mix,", "on top of x"),
        "z": ("refiner_mlp",),
        "s": ("readout: base", "logits + bias"),
        "token": ("argmax",),
    }.items():
        for i, line in enumerate(lines):
            y = rows[row] + 22 + 16 * i - 8 * (len(lines) - 1)
            drawing.text(28, y, line, 13, "start")


# ------------------------------------------------------------------- passes on a small real head


@dataclass(frozen=True)
class Ripple:
    """Tokens of one block after each pass.

    states [passes + 1][D]: the seed, then the tokens after pass 1, 2, ...; the last repeats the one
    before it, which ends the iteration. answer [D]: the sequential greedy decode.
    """

    anchor: int
    states: list[list[int]]
    answer: list[int]


def small_head(seed: int, block_size: int = 13, vocabulary: int = 100) -> FoldedRefiner:
    """A random head whose corrections are strong enough to overrule the base logits."""
    torch.manual_seed(seed)
    config = XPressConfig(vocabulary, hidden_size=32, rank=32, block_size=block_size)
    refiner = XPressRefiner(config)
    for parameter in refiner.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    torch.nn.init.normal_(refiner.mix.L, std=0.12)
    torch.nn.init.normal_(refiner.w1.weight, std=1.3)
    torch.nn.init.normal_(refiner.w2.weight, std=0.2)
    return refiner.fold(torch.float32)


def small_ripple(seed: int = 1) -> Ripple:
    """One block on a small head, pass after pass, and the answer that it must arrive at."""
    head = small_head(seed)
    config = head.config
    base_logits = 1.6 * torch.randn(1, config.num_drafted, config.vocab_size)
    hidden = torch.randn(1, config.block_size, config.hidden_size)
    anchor, predecessor = torch.tensor([42]), torch.tensor([7])
    inputs = (base_logits, hidden, anchor, predecessor, *head.weights())
    states = [base_logits[0].argmax(-1).tolist()]
    while len(states) < 2 or states[-1] != states[-2]:
        seeds = torch.tensor([states[-1]])
        tokens, _, _ = reference.jacobi_refine(*inputs, 1, 0, False, seeds)
        states.append(tokens[0].tolist())
    answer = reference.sequential_decode(*inputs)[0].tolist()
    assert states[-1] == answer, "the fixed point is the sequential decode"
    return Ripple(int(anchor), states, answer)


def jacobi_figure(ripple: Ripple) -> str:
    """A row of tokens for each pass; what a pass changed, and what is settled after it."""
    num_drafted, rows = len(ripple.answer), len(ripple.states)
    cell, pitch, left, top = 48, 42, 120, 46
    width = left + (num_drafted + 1) * cell + 24
    drawing = Drawing(width, top + (rows + 1) * pitch + 58, "Jacobi passes over one block")
    for k in range(num_drafted + 1):
        heading = "anchor" if k == 0 else f"slot {k}"
        drawing.text(left + (k + 0.5) * cell, top - 12, heading, 12, ink=FAINT)
    settled = 0
    for t, state in enumerate(ripple.states):
        y = top + t * pitch
        changed = [t > 0 and state[k] != ripple.states[t - 1][k] for k in range(num_drafted)]
        if t > 0:
            settled = changed.index(True) + 1 if any(changed) else num_drafted
        drawing.text(24, y + 22, "seed" if t == 0 else f"pass {t}", 14, "start")
        fills = [_cell_fill(changed[k], k < settled) for k in range(num_drafted)]
        _token_row(drawing, left, y, cell, ripple.anchor, state, fills)
    y = top + rows * pitch + 8
    drawing.line(24, y - 7, width - 24, y - 7)
    drawing.text(24, y + 22, "one by one", 14, "start")
    _token_row(drawing, left, y, cell, ripple.anchor, ripple.answer, [GREEN] * num_drafted)
    _legend(drawing, y + 54)
    return drawing.svg()


def _cell_fill(changed: bool, settled: bool) -> str:
    if changed:
        return DEEP_RED if settled else RED
    return GREEN if settled else GREY


def _token_row(
    drawing: Drawing,
    left: float,
    y: float,
    cell: float,
    anchor: int,
    tokens: Sequence[int],
    fills: Sequence[str],
) -> None:
    for k, (token, fill) in enumerate(zip([anchor, *tokens], [YELLOW, *fills], strict=True)):
        drawing.box(left + k * cell + 3, y, cell - 6, 32, str(token), fill)


def _legend(drawing: Drawing, y: float) -> None:
    x = 24.0
    for fill, text in (
        (DEEP_RED, "lowest slot that this pass changed"),
        (RED, "changed too"),
        (GREEN, "settled: never computed again"),
        (GREY, "not settled, unchanged"),
    ):
        drawing.box(x, y, 16, 16, "", fill)
        drawing.text(x + 24, y + 13, text, 12, "start", FAINT)
        x += 44 + 6 * len(text)


FIGURES: dict[str, Callable[[], str]] = {
    "block.svg": block_figure,
    "jacobi.svg": lambda: jacobi_figure(small_ripple()),
}


def main() -> None:
    """Writes every picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
