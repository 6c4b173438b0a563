"""The page, its drawings and its sentences, from figures that are made up."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from triptych.measure.load.drawings import MISSING
from triptych.measure.split import report
from triptych.measure.split.figures import Results, Spread
from triptych.measure.split.findings import changed, findings
from triptych.measure.split.plan import QUICK
from triptych.measure.split.tables import EMBEDDINGS, KV, tables_of
from triptych.measure.split.transfers import RowsPerToken, TransferSizes

SIZES = TransferSizes({KV: RowsPerToken(10, 192), EMBEDDINGS: RowsPerToken(1, 2304)}, 64)
MACHINE = {"cores": 2, "processor": "P", "memory_gib": 1.0, "kernel": "6", "python": "3"}
ABOUT = report.About("triptych bench split demo", "demo", MACHINE)
PLAN = replace(QUICK, rates=(0.6, 1.0))


@pytest.fixture
def results() -> Results:
    """Two rounds of every figure; 1E1PD has twice the others'."""
    found = Results(tables_of(PLAN, {"1EPD": "2"}, SIZES))
    for table in found.tables:
        for row in table.rows:
            factor = 2.0 if "1E1PD" in row else 1.0
            for value in (10.0 * factor, 11.0 * factor):
                found.add(table.name, row, **{column.name: value for column in table.columns})
    return found


def written(results: Results, folder: Path) -> str:
    report.write(results, PLAN, ABOUT, folder / "split.md", folder / "split.json")
    return (folder / "split.md").read_text()


def test_no_cell_is_empty(results: Results, tmp_path: Path) -> None:
    page = written(results, tmp_path)
    lines = [line for line in page.splitlines() if line.startswith("|")]
    rows = sum(len(table.rows) for table in results.tables)
    assert len(lines) == rows + 2 * len(results.tables)
    assert all(cell.strip() for line in lines for cell in line.strip("|").split("|"))
    assert "What is missing" not in page
    assert page.count("10.5 (10.0–11.0)") > rows
    tables = json.loads((tmp_path / "split.json").read_text())["tables"]
    assert all(len(values) == 2 for table in tables for row in table["rows"] for values in row["values"].values())


def test_drawings_are_whole_and_linked(results: Results, tmp_path: Path) -> None:
    page = written(results, tmp_path)
    drawings = sorted(path.name for path in (tmp_path / "split").iterdir())
    assert drawings == [
        "goodput-picture.svg", "goodput-text.svg", "images-224x224.svg", "images-448x448.svg",
        "transfers-KV.svg", "transfers-embeddings.svg",
    ]  # fmt: skip
    for name in drawings:
        assert f"](split/{name})" in page
        assert ElementTree.parse(tmp_path / "split" / name).getroot().tag.endswith("svg")


def test_a_report_is_whole_without_matplotlib(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "can_draw", lambda: False)
    page = written(results, tmp_path)
    assert MISSING in page
    assert ".svg" not in page
    assert not (tmp_path / "split").exists()


def test_what_failed_is_named_and_the_rest_is_written(tmp_path: Path) -> None:
    results = Results(tables_of(PLAN, {}, SIZES))
    results.fail("round 1: instance d0 was killed | by SIGKILL", "closed", [("text", "1E1P1D")])
    results.add("closed", ("text", "1EPD"), requests=4.0)
    results.interrupted = True
    page = written(results, tmp_path)
    assert "The run was interrupted" in page
    assert "| text | 1E1P1D | round 1: instance d0 was killed / by SIGKILL | – |" in page
    assert "| text | 1EPD | 4 | – |" in page
    assert "- Closed loop, 8 at a time: round 1: instance d0 was killed / by SIGKILL (text · 1E1P1D)" in page
    assert "- First use: interrupted before it was measured (picture · 1EPD; " in page
    assert list(findings(results, PLAN)) == []


def test_sentences_say_only_what_figures_show(results: Results) -> None:
    said = list(findings(results, PLAN))
    (line,) = (one for one in said if one.startswith("picture requests, `1E1PD` beside `1EPD`: "))
    gained, cost = line.split("; ")
    assert gained.endswith(
        ": gained: output tokens/s in the closed loop × 2.00, goodput at rate 0.6 × 2.00, goodput at rate 1 × 2.00"
    )
    assert cost.startswith(
        "cost: time to first token in the closed loop (p50) × 2.00, time per token in the closed loop"
    )
    assert cost.count("× 2.00") == 5
    assert any(
        line.startswith("text requests, `2EPD` beside `1EPD`: no difference beyond the spread: ") for line in said
    )
    assert ("pictures of 448 × 448, 4 in a request, `1E1PD` beside `1EPD`: cost: time to first token × 2.00.") in said
    assert "Memory of all processes (PSS): `1EPD` 32 MiB, `1E1PD` 84 MiB, `1E1P1D` 52 MiB, `2EPD` 42 MiB." in said
    assert "8,192 tokens of KV travel in: shm 10.5 ms, nixl 10.5 ms, mooncake 10.5 ms." in said


def test_one_round_compares_nothing(results: Results) -> None:
    first, *others = findings(results, replace(PLAN, rounds=1))
    assert first == "One round shows no spread, so topologies aren't compared."
    assert not any("beside" in line for line in others)


def test_gains_and_costs_are_beyond_the_spread() -> None:
    low, high, wide = Spread.of([1.0, 1.2]), Spread.of([2.0, 2.2]), Spread.of([1.1, 9.0])
    assert changed({"a": (low, high, True), "b": (low, high, False)}) == "gained: a × 1.91; cost: b × 1.91"
    assert changed({"a": (high, low, True), "b": (high, low, False)}) == "gained: b × 0.52; cost: a × 0.52"
    assert changed({"a": (low, wide, True)}) == "no difference beyond the spread: a"
