"""The page that replays a race: one HTML file that needs no network and no other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpress_ext.atomic import write_atomically

if TYPE_CHECKING:
    from xpress_ext.demo import Lane, Race, Row

TEMPLATE = Path(__file__).with_suffix(".html")
PLACEHOLDER = "/*RACES*/null"


def write_page(path: Path, races: list[Race], all_figures: list[Row], notes: list[str]) -> None:
    """Write the page to `path`: beside it first, then renamed, so that no half page is ever seen.

    Raises OSError if the folder cannot be written.
    """
    page = render_page(races, all_figures, notes)
    write_atomically(path.resolve(), lambda file: file.write_text(page, encoding="utf-8"))


def render_page(races: list[Race], all_figures: list[Row], notes: list[str]) -> str:
    """The page's text, with the races as JSON inside."""
    data = {
        "races": [_race(race) for race in races],
        "figures": all_figures,
        "notes": notes,
    }
    # No text of a model can end the script element or open a comment in it.
    encoded = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, encoded)


def _race(race: Race) -> dict[str, Any]:
    return {
        "prompt": race.prompt,
        "lanes": [_lane(lane) for lane in race.lanes],
        "figures": race.figures,
        "verdict": race.verdict,
    }


def _lane(lane: Lane) -> dict[str, Any]:
    steps = [
        {
            "pieces": pieces,
            "drafted": event.drafted,
            "passes": event.passes,
            "milliseconds": round(event.wall_milliseconds, 2),
        }
        for event, pieces in zip(lane.events, lane.pieces, strict=True)
    ]
    return {
        "key": lane.key,
        "title": lane.title,
        "steps": steps,
    }
