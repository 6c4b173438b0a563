"""The walk-throughs work as they are written."""

from pathlib import Path

import pytest

from tests.support.walkthroughs import APPEND, PAGES, copy_repository, follow, steps


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_walk_through_works(page: Path, tmp_path: Path) -> None:
    copy_repository(tmp_path)
    for step in steps(page):
        follow(step, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_walk_through_ends_with_tests_and_checks_that_pass(page: Path) -> None:
    found = list(steps(page))
    assert "pytest" in found[-1].text
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
        follow(*steps(page), tmp_path)
