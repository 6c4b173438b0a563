"""Workloads: described, made by a seed, written as a trace and read again."""

import random
from itertools import islice, pairwise
from pathlib import Path

import pytest

from triptych.errors import ConfigError
from triptych.observe.line_file import LineFile
from triptych.workload.mix import WORKLOADS, Amount, ArrivalPattern, RequestKind, RequestMix, read_workload
from triptych.workload.trace import BLOCK_TOKENS, head_line, read_trace, trace_line, write_trace


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_makes_requests_at_the_rate_asked_for(name: str) -> None:
    made = list(WORKLOADS[name].requests(20.0, 4000, seed=1))
    assert made == list(WORKLOADS[name].requests(20.0, 4000, seed=1))
    assert made != list(WORKLOADS[name].requests(20.0, 4000, seed=2))
    assert len(made) == 4000
    assert all(one.at <= other.at for one, other in pairwise(made))
    assert made[-1].at == pytest.approx(200.0, rel=0.15)
    assert all(len(one.blocks) == one.text // BLOCK_TOKENS and one.lead <= one.text for one in made)


def test_turns_have_what_came_before() -> None:
    talks = RequestMix(kinds=(RequestKind(text=100, answer=28, images=1, turns=3, pause=1.0),), clients=1)
    first, *rest = sorted(talks.requests(0.01, 30, seed=0), key=lambda one: one.at)[:3]
    assert [len(one.media) for one in (first, *rest)] == [1, 2, 3]
    assert [one.text for one in (first, *rest)] == [100, 228, 356]
    for one, other in pairwise((first, *rest)):
        assert other.blocks[: len(one.blocks)] == one.blocks
        assert other.media[: len(one.media)] == one.media


def test_bursts_and_days_keep_the_mean_rate() -> None:
    for kind in ("bursts", "diurnal"):
        pattern = ArrivalPattern(kind, period=10.0, peak=3.0)
        assert sum(pattern.factor(one / 1000) for one in range(10_000)) / 10_000 == pytest.approx(1.0, rel=0.01)
    workload = RequestMix(kinds=(RequestKind(),), arrivals=ArrivalPattern("bursts", period=10.0, share=0.2, peak=4.0))
    made = list(workload.requests(50.0, 5000, seed=0))
    in_bursts = sum(one.at % 10.0 < 2.0 for one in made)
    assert in_bursts / len(made) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(("rate", "share"), [(0.5, 0.1), (2.0, 0.02), (20.0, 0.5)])
def test_gaps_as_long_as_bursts_keep_the_mean_rate(rate: float, share: float) -> None:
    arrivals = ArrivalPattern("bursts", period=10.0, share=share, peak=100.0)
    made = list(RequestMix(kinds=(RequestKind(),), arrivals=arrivals).requests(rate, 2000, seed=0))
    assert 2000 / made[-1].at == pytest.approx(rate, rel=0.06)
    assert all(one.at % 10.0 <= 10.0 * share for one in made), "all come in bursts"


@pytest.mark.parametrize(("period", "share"), [(1e9, 0.01), (0.01, 0.01)])
def test_no_pattern_takes_long_to_draw(period: float, share: float) -> None:
    """Between bursts of a long period, nothing comes for years."""
    arrivals = ArrivalPattern("bursts", period=period, share=share, peak=100.0)
    times = [*islice(arrivals.times(1000.0, random.Random(0), 0.5 * period), 1000)]
    assert times == sorted(times)
    assert times[0] >= period
    assert all(at / period % 1.0 <= 1.001 * share for at in times)


def test_few_requests_of_conversations_come_at_the_rate_asked_for() -> None:
    made = list(WORKLOADS["chat"].requests(200.0, 200, seed=0))
    assert made[0].at >= 0.0
    assert 200 / made[-1].at == pytest.approx(200.0, rel=0.2)
    assert sum(one.text > 500 for one in made) > 60, "most are turns that follow others"


def test_an_amount_is_what_it_says() -> None:
    rng = random.Random(0)
    drawn = sorted(Amount(median=100, high=400, low=10).draw(rng) for _ in range(5000))
    assert drawn[2500] == pytest.approx(100, rel=0.1)
    assert drawn[4500] == pytest.approx(400, rel=0.1)
    assert min(drawn) >= 10


def test_a_description_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(
        'clients = 3\n[arrivals]\nkind = "bursts"\n[[kinds]]\nname = "photo"\nimages = {low = 1, high = 2}\n'
        "sizes = [[640, 480]]\ntext = 20\n"
    )
    workload = read_workload(path)
    assert workload.kinds[0].images == Amount(low=1, high=2)
    assert {(one.width, one.height) for r in workload.requests(1.0, 10, 0) for one in r.media} == {(640, 480)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kinds = []", "length >= 1"),
        ("[[kinds]]\nimage = 1", "unknown field `image`"),
        ("[[kinds]]\ntext = -1", "kinds"),
        ("[[kinds]]\nimages = 16777216", "images of 16777216 are over the limit"),
        ("[[kinds]]\nframes = {low = 1, high = 16777216}", "frames of 16777216 are over the limit"),
        ("[[kinds]]\nturns = {low = 1000000, high = 1}", "turns of 1000000 are over the limit"),
        ("[[kinds]]\nsizes = [[0, -5]]", "int` >= 1"),
        ("[[kinds", "Unclosed|Expected"),
        ("x = " + "[" * 100_000, "mix.toml"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_workload(path)


def test_a_trace_is_what_was_written(tmp_path: Path) -> None:
    path, made = tmp_path / "trace.jsonl", list(WORKLOADS["documents"].requests(5.0, 50, seed=3))
    write_trace(path, made)
    assert list(read_trace(path)) == made
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_trace(path)) == made[:-1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is no trace"),
        (b'{"kind": "other"}\n', "is no trace"),
        (head_line() + b"{}\n", "line 2.*missing"),
        (head_line() + b'{"at": -1, "text": 1, "answer": 1}\n', "line 2"),
        (head_line() + b"[" * 2**20, "longer"),
        (head_line() + b"[" * 100_000 + b"\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        list(read_trace(path))


def test_torn_lines_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, made = tmp_path / "trace.jsonl", list(WORKLOADS["documents"].requests(5.0, 9, seed=3))
    first, second, third = (b"".join(map(trace_line, made[place : place + 3])) for place in (0, 3, 6))
    path.write_bytes(head_line() + first + second[:-20] + third[:1] + b"\n" + b"[" * (2**20 + 7) + b"\n" + third)
    assert read_trace(path) == [*made[:5], *made[6:]]
    assert "2 lines are no requests" in caplog.text
    assert "line 7" in caplog.text


def test_a_later_service_begins_a_line_after_a_torn_one(tmp_path: Path) -> None:
    path, made = tmp_path / "trace.jsonl", list(WORKLOADS["chat"].requests(5.0, 3, seed=3))
    write_trace(path, made[:2])
    path.write_bytes(path.read_bytes()[:-5])
    file = LineFile(str(path), "--record")
    file.write(trace_line(made[2]))
    file.close()
    assert read_trace(path) == [made[0], made[2]]
