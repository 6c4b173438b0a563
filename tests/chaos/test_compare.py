"""What the comparison of two runs finds, and how it is shown."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from triptych.config import ServeConfig
from triptych.measure.chaos import report
from triptych.measure.chaos.acts import NOTHING, signals
from triptych.measure.chaos.faults import FAULTS, Fault, Workload, may_lack_encoder
from triptych.measure.chaos.load import End, Outcome
from triptych.measure.chaos.measure import compare
from triptych.measure.chaos.questions import Kind, Question
from triptych.measure.chaos.target import Held, Mark
from triptych.measure.load.client import percentile
from triptych.measure.load.pictures import picture
from triptych.topology import Topology

FAULT = Fault("kill-e", "kill -9 of E", "1E1PD", NOTHING, {Kind.PICTURE: 3.0})


def outcome(number: int, seconds: float = 1.0, **fields: Any) -> Outcome:
    made = Outcome(Question(number, Kind.PICTURE), 0.0, End.WHOLE, seconds / 2, seconds, text=f"a {number}")
    return replace(made, **fields)


CALM = [outcome(number) for number in range(4)]


def test_a_run_like_the_one_without_the_fault_holds() -> None:
    result = compare(FAULT, CALM, [outcome(number, 3.9) for number in range(4)], [])
    assert result.failures == []
    assert result.added_p99(Kind.PICTURE) == pytest.approx(2.9)


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"end": End.ERROR, "error": "instance_lost"}, "1 lost: 1 × instance_lost"),
        ({"end": End.HUNG}, "1 lost: 1 × hung"),
        ({"end": End.BROKEN}, "1 lost: 1 × broken"),
        ({"text": "another"}, "1 wrong"),
        ({"ended": 4.5}, "p99 of pictures + 3.5 s exceeds 3 s"),
    ],
)
def test_what_does_not_hold_is_named(fields: dict[str, Any], failure: str) -> None:
    outcomes = [outcome(0, **fields), *(outcome(number) for number in range(1, 4))]
    assert compare(FAULT, CALM, outcomes, []).failures == [failure]


def test_only_what_a_fault_allows_may_fail() -> None:
    fault = replace(FAULT, may_fail=may_lack_encoder)
    text = replace(outcome(1), question=Question(1, Kind.TEXT))
    failed: dict[str, Any] = {"end": End.ERROR, "error": "unavailable"}
    result = compare(fault, CALM, [outcome(0, **failed), replace(text, **failed)], [])
    assert [one.question.number for one in result.lost] == [1]
    assert result.num_allowed == 1
    assert compare(fault, CALM, [outcome(0, text="no picture")], []).wrong, "an answer without the picture is wrong"


def test_each_time_that_a_question_is_asked_counts() -> None:
    result = compare(FAULT, CALM, [*CALM, *CALM, outcome(0, text="another")], [])
    assert (len(result.wrong), result.failures) == (1, ["1 wrong"])


def test_clients_that_leave_are_not_lost() -> None:
    left = replace(outcome(9, end=End.LEFT), question=Question(9, Kind.PICTURE, leaves_after=0.1))
    assert compare(FAULT, CALM, [*CALM, left], []).failures == []


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(range(1, 101), 0.99) == 99


def test_what_is_held_is_compared_by_name() -> None:
    before = Held({"sockets of e0": 5, "files of e0": 9}, {})
    assert Held({"sockets of e0": 4, "files of e0": 9}, {}).more_than(before) == []
    more = Held({"sockets of e0": 6, "files of e0": 9}, {"kv_cache_usage_perc of pd0": 0.5}).more_than(before)
    assert more == ["sockets of e0 6 instead of 5", "kv_cache_usage_perc of pd0 0.5"]


def test_faults_are_well_formed() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert signals(signal.SIGKILL, "e0") is not NOTHING
    for fault in FAULTS:
        assert Topology.parse(fault.topology)
        assert ServeConfig(model=Path("model")).having(fault.settings)
        assert [one.name for one in fault.repeated(1)] == [fault.name]
        assert len({one.at for one in fault.repeated(4)}) == 4


def test_a_load_asks_each_question_once() -> None:
    questions = Workload(pictures=3, texts=2, leaving=10).questions(2.0)
    assert sorted(one.number for one in questions) == list(range(15))
    leaving = [one.leaves_after for one in questions if one.leaves_after is not None]
    assert len(leaving) == 10
    assert 0 < min(leaving) < max(leaving) <= 2.0
    assert Workload(64, 0, 1000, 64).scaled(0.25) == Workload(16, 0, 250, 16)
    assert Workload(4, 1, 0, 4).scaled(0.1) == Workload(1, 1, 0, 1)


def test_pictures_are_unique_files() -> None:
    drawn = {picture(seed) for seed in range(50)}
    assert len(drawn) == 50
    assert all(one.startswith(b"\x89PNG") for one in drawn)
    assert picture(7) == picture(7)


def test_the_report_names_what_fails_and_draws_each_fault(tmp_path: Path) -> None:
    good = compare(FAULT, CALM, CALM, [Mark(0.3, "SIGKILL <e0>")])
    bad = compare(replace(FAULT, name="burst", limits={}), CALM, [outcome(0, end=End.HUNG, first_token=None)], [])
    page = tmp_path / "chaos.md"
    report.write([good, bad], page, "triptych chaos demo")
    text = page.read_text()
    assert "1 of 2 faults hold." in text
    assert "| **fails**: 1 lost: 1 × hung |" in text
    assert report.line(good) == "kill-e (1E1PD): added p99 0.0 s: holds"
    for name in ("kill-e", "burst"):
        root = ElementTree.parse(tmp_path / "chaos" / f"{name}.svg").getroot()
        assert root.tag.endswith("svg")
    assert "SIGKILL &lt;e0&gt;" in (tmp_path / "chaos" / "kill-e.svg").read_text()
