"""The page about planning: its commands have these flags, and its example is a workload."""

import re
import shlex
from pathlib import Path

import pytest

from triptych.cli import make_parser
from triptych.workload.mix import WORKLOADS, read_workload

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
COMMANDS = re.findall(r"^triptych .*$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_is_understood(line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    make_parser([name]).parse_args([name, *words])
    assert len(COMMANDS) == 4


def test_the_example_of_the_page_is_a_workload(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "mix.toml"
    path.write_text(example)
    made = list(read_workload(path).requests(5.0, 50, seed=0))
    assert {len(one.media) for one in made} >= {1, 2}
    assert all(f"`{name}`" in PAGE for name in WORKLOADS)


def test_the_flags_of_the_page_are_those_of_the_command() -> None:
    flags = set(re.findall(r"`(--[a-z]+)", PAGE.partition("## 3. Plan")[2]))
    known = make_parser(["plan"]).parse_args(["plan", "--profile", "p", "--workload", "w", "--slo", "ttft=1s"])
    assert flags
    assert all(hasattr(known, flag.removeprefix("--")) for flag in flags)
