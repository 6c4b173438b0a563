"""``triptych bench split``: what it refuses, and a small run with a real service and real transfers."""

import json
from pathlib import Path

import pytest

from tests.support.exits import exit_code
from tests.support.tiny import make_tiny
from triptych.measure.transfer.measure import FABRICS


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return exit_code(["bench", "split", *arguments]), *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--tables", "images,speed"], "--tables speed is none of throughput, images, cache"),
        (["demo", "--topologies", "1E1X"], "topology '1E1X' is not a sequence"),
        (["demo", "--rounds", "0"], "--rounds 0 is too small: at least 1"),
        (["demo", "--seconds", "0.1"], "--seconds 0.1 is too small: at least 0.5"),
        (["demo", "--slo-ttft", "-1"], "--slo-ttft -1 is too small: at least 0"),
        (["demo", "--json", "/dev/null/split.json"], "/dev/null can't be written"),
        (["/no/such/model"], "/no/such/model: no such folder"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str) -> None:
    code, out, errors = said(capsys, *arguments, "--report", str(tmp_path / "split.md"))
    assert code == 78
    assert out == ""
    assert says in errors


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, errors = said(capsys, "demo", "--report", "/dev/null/split.md")
    assert (code, out) == (78, "")
    assert "/dev/null" in errors
    assert "can't be written: Not a directory" in errors


def test_tables_that_need_media_are_refused_for_a_text_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path / "text", "qwen3")
    code, _, errors = said(capsys, str(folder), "--tables", "cache", "--report", str(tmp_path / "split.md"))
    assert code == 78
    assert "--tables cache needs a model that takes media" in errors


# beside other tests, which keep both cores busy, processes that look for each other's rows can take minutes
@pytest.mark.parametrize("fabrics", [("shm",), pytest.param(FABRICS, marks=pytest.mark.slow)], ids=["shm", "all"])
def test_a_small_run_fills_its_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabrics: tuple[str, ...]
) -> None:
    for module in ("tables", "transfers"):
        monkeypatch.setattr(f"triptych.measure.split.{module}.FABRICS", fabrics)
    page, data = tmp_path / "split.md", tmp_path / "split.json"
    flags = ["--quick", "--rounds", "1", "--threads", "1", "--topologies", "1EPD", "--kv-cache-tokens", "4096"]
    chosen = ["--tables", "first-use,resumes", "--report", str(page), "--json", str(data)]
    code, out, _ = said(capsys, "demo", *flags, *chosen)
    assert "about 1 minutes" in out or "about 0 minutes" in out
    tables = {table["name"]: table["rows"] for table in json.loads(data.read_text())["tables"]}
    for row in tables["first-use"]:
        assert row["missing"] == ""
        assert all(len(values) == 1 and values[0] > 0 for values in row["values"].values())
    (shm,) = (row for row in tables["resumes"] if row["fabric"] == "shm")
    assert shm["values"]["resumes"][0] >= 1
    # other fabrics may be missing on this machine, which the exit code and the page say
    missing = any(row["missing"] for rows in tables.values() for row in rows)
    assert code == int(missing)
    assert ("## What is missing" in page.read_text()) == missing


def test_a_service_that_cannot_start_is_a_reason_in_its_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, data = tmp_path / "split.md", tmp_path / "split.json"
    flags = ["--quick", "--rounds", "1", "--topologies", "1EPD", "--start-timeout", "0.01"]
    code, _, _ = said(capsys, "demo", *flags, "--tables", "first-use", "--report", str(page), "--json", str(data))
    assert code == 1
    (table,) = json.loads(data.read_text())["tables"]
    assert [row["missing"] for row in table["rows"]] == ["round 1: the instances weren't ready within 0.01 s"] * 2
    assert "(picture · 1EPD; text · 1EPD)" in page.read_text()


@pytest.mark.slow
def test_a_quick_run_leaves_no_cell_empty(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, data = tmp_path / "split.md", tmp_path / "split.json"
    tables = ["--tables", "throughput,images,cache,first-use", "--topologies", "1EPD,1E1P1D"]
    code, _, _ = said(capsys, "demo", "--quick", "--seconds", "1", *tables, "--report", str(page), "--json", str(data))
    assert code == 0, page.read_text()
    for table in json.loads(data.read_text())["tables"]:
        for row in table["rows"]:
            assert all(len(values) == 2 for values in row["values"].values()), row
