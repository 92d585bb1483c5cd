"""The demo in a terminal: three panes with rich, or plain lines where there is no terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from xpress_ext.demo import Lane, Race, Row

PLAIN_WIDTH = 88
BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"autoregressive": "white", "drafter": "yellow", "xpress": "green"}
PANE_OVERHEAD = 4  # two borders, the bars and the line above them


class PlainView:
    """Plain lines on standard output; needs nothing beyond the standard library."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._title_row: list[str] = []

    def start(self, heading: str, prompt: str, lanes: list[Lane]) -> None:
        """Name the prompt."""
        self._reported.clear()
        self._title_row = [lane.title for lane in lanes]
        print(f"{heading}:")
        print(textwrap.indent(prompt, "  "), flush=True)

    def update(self, lanes: list[Lane]) -> None:
        """One line for each lane that has just finished."""
        for lane in lanes:
            if lane.finished and lane.key not in self._reported:
                self._reported.add(lane.key)
                print(f"  {lane.title}: {progress(lane)}", flush=True)

    def finish(self, race: Race) -> None:
        """The texts (one if all are equal), the table and the verdict."""
        texts = {lane.text: lane.title for lane in reversed(race.lanes)}
        for text, title in reversed(texts.items()):
            print(f"\n{title if len(texts) > 1 else 'Answer'}:")
            print(textwrap.indent(text.strip(), "  "))
        self._table("", race.figures)
        print("\n".join(race.verdict), flush=True)

    def summary(self, title: str, figures: list[Row], notes: list[str]) -> None:
        """The table over all prompts, if there were several, and the notes."""
        if title:
            self._table(title, figures)
        for note in notes:
            print(textwrap.fill(note, PLAIN_WIDTH))

    def close(self) -> None:
        """Nothing is held."""

    def _table(self, title: str, figures: list[Row]) -> None:
        rows = [(title, self._title_row), *figures]
        label_width = max(len(label) for label, _ in rows)
        print()
        for label, values in rows:
            print(f"{label:<{label_width}}" + "".join(f"{value:>16}" for value in values))
        print()


class PaneView:
    """Three panes side by side that follow the race, then the table."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console as RichConsole

        self._console = console or RichConsole()
        self._live: Any = None
        self._lanes: list[Lane] = []

    def start(self, heading: str, prompt: str, lanes: list[Lane]) -> None:
        """Show the prompt and three empty panes."""
        from rich.live import Live
        from rich.panel import Panel
        from rich.text import Text

        self._lanes = lanes
        self._console.print(Panel(Text(prompt), title=heading, title_align="left", style="cyan"))
        self._live = Live(
            self._panes(lanes), console=self._console, auto_refresh=False, vertical_overflow="crop"
        )
        self._live.start()

    def update(self, lanes: list[Lane]) -> None:
        """Redraw the panes."""
        self._live.update(self._panes(lanes), refresh=True)

    def finish(self, race: Race) -> None:
        """Leave the panes as they are and print the table below them."""
        self.close()
        self._print_table("", race.figures)
        for line in race.verdict:
            self._console.print(line, style="bold", highlight=False)
        self._console.print()

    def summary(self, title: str, figures: list[Row], notes: list[str]) -> None:
        """The table over all prompts, if there were several, and the notes."""
        if title:
            self._print_table(title, figures)
        for note in notes:
            self._console.print(note, style="dim", highlight=False)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _panes(self, lanes: list[Lane]) -> RenderableType:
        from rich.table import Table

        width = self._console.width // len(lanes)
        # The prompt above stays in view on a terminal of the usual 24 lines.
        height = max(8, min(22, self._console.height - 6))
        grid = Table.grid(expand=True)
        for _ in lanes:
            grid.add_column(ratio=1)
        grid.add_row(*(self._pane(lane, width - 4, height) for lane in lanes))
        return grid

    def _pane(self, lane: Lane, width: int, height: int) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        colour = COLOURS[lane.key]
        lines = lane_text(lane, colour).wrap(self._console, width)[-(height - PANE_OVERHEAD) :]
        lines = [*lines, *[Text("")] * (height - PANE_OVERHEAD - len(lines))]
        state = "⏩ fast-forward" if lane.fast_forward else "✓ finished" if lane.finished else ""
        return Panel(
            Group(*lines, Text(""), Text(bars(lane, width), style=colour, no_wrap=True)),
            title=f"[bold]{lane.title}[/bold] {state}".rstrip(),
            subtitle=progress(lane),
            border_style=colour,
            height=height,
        )

    def _print_table(self, title: str, figures: list[Row]) -> None:
        from rich.table import Table

        table = Table(title=title or None, title_justify="left")
        table.add_column("")
        for lane in self._lanes:
            table.add_column(lane.title, justify="right", style=COLOURS[lane.key])
        for label, values in figures:
            table.add_row(label, *values)
        self._console.print(table)


def progress(lane: Lane) -> str:
    """Tokens and verification steps so far."""
    tokens, steps = lane.stats.num_tokens, lane.stats.verification_steps
    return f"{tokens} token{'s' * (tokens != 1)} in {steps} step{'s' * (steps != 1)}"


def bars(lane: Lane, width: int) -> str:
    """The last steps' acceptance lengths, one bar a step; the tallest stands for 8 and more."""
    lengths = lane.stats.acceptance_lengths[-width:] if width > 0 else []
    return "".join(BARS[min(length, len(BARS)) - 1] for length in lengths)


def lane_text(lane: Lane, colour: str) -> Text:
    """The text so far: drafted tokens in the lane's colour, the last step's on a background."""
    from rich.text import Text

    text = Text()
    for number, step in enumerate(lane.pieces, 1):
        latest = number == len(lane.pieces) and not lane.finished
        for piece, drafted in step:
            style = colour if drafted else "default"
            text.append(piece, f"{style} reverse" if latest else style)
    return text
