"""The walk-throughs work as they are written."""

from pathlib import Path

import pytest

from tests.support.walkthroughs import APPEND, PAGES, copy_repository, follow, run_ruff, steps

EVERY_RUN = ("model-family",)
"""The pages that are followed in every run; the others are in the slow suite."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.stem in EVERY_RUN else pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_walk_through_works(page: Path, tmp_path: Path) -> None:
    copy_repository(tmp_path)
    for step in steps(page):
        follow(step, tmp_path)
    run_ruff(sorted({step.path for step in steps(page) if step.language == "python"}), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_walk_through_has_tests_and_runs_them(page: Path) -> None:
    found = list(steps(page))
    assert any(step.language == "sh" and "pytest" in step.text for step in found)
    assert any(step.title.startswith("tests/") for step in found)


def test_a_block_is_written_appended_or_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f'```python title="a/new.py"\nx = 1\n```\n\n```python title="{APPEND}a/new.py"\ny = 2\n```\n\n'
        "```text\nnothing\n```\n\n```sh\npython a/new.py && cat a/new.py > copy\n```\n"
    )
    for step in steps(page):
        follow(step, tmp_path)
    assert (tmp_path / "copy").read_text() == "x = 1\n\n\ny = 2\n"


def test_a_failing_command_fails_the_walk_through(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho wrong\nfalse\n```\n")
    with pytest.raises(AssertionError, match="wrong"):
        follow(next(iter(steps(page))), tmp_path)
