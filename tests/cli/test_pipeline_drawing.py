"""What ``triptych top`` draws of a snapshot, as text, on terminals of any size."""

import re

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.support.pipelines import BUSY, HOSTILE, hostile, large, nothing
from triptych.cli.pipeline_drawing import draw
from triptych.cli.text_table import cell
from triptych.cli.units import duration, share, size
from triptych.observe.pipeline import Pipeline, PoolView


def drawn(pipeline: Pipeline, width: int, height: int | None = None, notice: str = "") -> list[str]:
    """The lines of a drawing, without colours, on a terminal that is wide enough for whatever is drawn."""
    console = Console(width=1000, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(draw(pipeline, width, height, notice))
    return [line.rstrip() for line in capture.get().splitlines()]


def row(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(name))


def test_on_80_columns() -> None:
    lines = drawn(BUSY, 80)
    facts = r"demo  2E1PD  ready  23 in flight  frontend 55 % busy  up 3 h 12 min  \d\d:\d\d:\d\d"
    assert re.fullmatch(facts, lines[0])
    assert " ".join(lines[1:3]) == BUSY.verdict.sentence
    assert lines[3] == BUSY.verdict.advice
    assert row(lines, "encode").split() == ["encode", "█" * 19 + "░", "96", "%", "34", "2.1", "s", "1.30"]
    assert row(lines, "decode").split() == ["decode", "█" * 5 + "░" * 15, "23", "%", "0", "0.20"]
    assert row(lines, "e0").split() == [
        "e0",
        "E",
        "█" * 10,
        "97",
        "%",
        "4",
        "14",
        "45",
        "ms",
        "encode_cache",
        "80",
        "%",
        "0",
    ]
    assert row(lines, "e1").split()[-1] == "2"
    assert row(lines, "23 requests") == "23 requests in flight: 20 encoding, 3 decoding"
    assert row(lines, BUSY.requests[0].id).split()[1:] == ["encoding", "12.1", "s", "2", "0", "e0"]
    assert [line.split()[-2] for line in lines if line.startswith("chatcmpl-")][-4:] == ["0", "1,234", "1,234", "0"]
    events = [line.split(maxsplit=2) for line in lines[-3:]]
    assert [event[1] for event in events] == ["recovered", "lost", "joined"]
    assert events[1][2] == "e1 was lost; 3 items go to e0"


def test_on_60_columns_names_shares_and_queues_stay() -> None:
    lines = drawn(BUSY, 60)
    assert "2.1 s" in row(lines, "encode")
    assert row(lines, "pd0").split()[:4] == ["pd0", "PD", "█░░░", "23"]
    assert row(lines, "chatcmpl-").split()[1:] == ["encoding", "12.1", "s", "2", "0", "e0"]
    assert "decoding" in row(lines, "23 requests")


def test_on_160_columns_pools_and_traffic_have_their_sizes() -> None:
    lines = drawn(BUSY, 160)
    assert "kv 47 % of 4,096 pages, 7 % cached, media 3 % of 64 blocks" in row(lines, "pd0")
    assert "encode_cache of 512 MB, 80 % cached" in row(lines, "e0")
    assert "25.0 MB/s" in row(lines, "e0")
    assert "31 %" in row(lines, "e0")


@pytest.mark.parametrize("pipeline", [BUSY, large(), nothing(), hostile()], ids=["busy", "large", "nothing", "hostile"])
@pytest.mark.parametrize("width", [1, 7, 60, 80, 400])
@pytest.mark.parametrize("height", [3, 24, None])
def test_it_fits_any_terminal(pipeline: Pipeline, width: int, height: int | None) -> None:
    lines = drawn(pipeline, width, height, notice="no answer from http://127.0.0.1:8000; trying again")
    assert len(lines) <= (height or 10**6)
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)


def test_what_has_no_room_is_counted() -> None:
    lines = drawn(large(), 80, 24)
    assert len(lines) == 24
    assert row(lines, "encode")
    assert [line for line in lines if line.startswith("… and")] == ["… and 59 more", "… and 197 more"]
    assert row(lines, "e0")
    assert row(lines, "chatcmpl-")
    lines = drawn(large(), 80, 50)
    assert len(lines) == 50
    assert [line for line in lines if line.startswith("… and")] == ["… and 49 more", "… and 186 more"]
    assert lines[-1].split()[1] == "joined"


def test_room_that_is_left_shows_requests() -> None:
    heights = (24, 30, 40)
    drawings = [drawn(BUSY, 80, height) for height in heights]
    assert [sum(line.startswith("chatcmpl-") for line in lines) for lines in drawings] == [2, 7, 17]
    assert [len(lines) for lines in drawings] == [*heights]


def test_a_service_that_is_not_ready_says_why() -> None:
    lines = drawn(nothing(), 80)
    assert lines[0].split("  ")[:3] == ["demo", "no instances", "not ready"]
    assert lines[1] == "not ready: no instance of E has joined"
    assert lines[-1] == "0 requests in flight"


def test_one_of_several_frontends_is_named() -> None:
    service = msgspec.structs.replace(BUSY.service, num_frontends=2, frontend="frontend1")
    first = drawn(msgspec.structs.replace(BUSY, service=service), 80)[0]
    assert first.startswith("demo  2E1PD  ready  frontend1, one of 2  23 in flight")


def test_a_notice_comes_first() -> None:
    assert drawn(BUSY, 80, notice="trying again")[0] == "trying again"


def test_instances_that_do_not_serve_say_so() -> None:
    first, second, third = BUSY.instances
    replace = msgspec.structs.replace
    instances = [
        replace(first, state="restarting"),
        replace(second, state="starting", pending="no node has 2 GPUs"),
        replace(third, state="draining", next_role="D"),
    ]
    lines = drawn(replace(BUSY, instances=instances), 100)
    assert "restarting" in row(lines, "e0")
    assert "pending: no node has 2 GPUs" in row(lines, "e1")
    assert "PD → D" in row(lines, "pd0")
    assert "draining" in row(lines, "pd0")


def test_names_cannot_control_the_terminal() -> None:
    text = cell(HOSTILE)
    assert text.plain == r"\x1b[2J\x07[red]a\u202eb[/]\nc\x9b"
    assert text.spans == []
    assert len(cell("x" * 10**6)) == 200


def test_a_pool_without_size() -> None:
    instance = msgspec.structs.replace(BUSY.instances[2], pools=[PoolView("", 0, 0, 0)])
    assert drawn(msgspec.structs.replace(BUSY, instances=[instance]), 160)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(-1), "0 ms"),
        (duration(0.0449), "45 ms"),
        (duration(0.9996), "1.0 s"),
        (duration(59.94), "59.9 s"),
        (duration(59.96), "1 min 0 s"),
        (duration(3599.7), "1 h 0 min"),
        (duration(11_530), "3 h 12 min"),
        (duration(86400 * 5 + 7300), "5 d 2 h"),
        (duration(float("nan")), "0 ms"),
        (share(0.967), "97 %"),
        (share(float("inf")), "0 %"),
        (size(999), "999 B"),
        (size(1234), "1.2 kB"),
        (size(123_456_789), "123 MB"),
        (size(999_600_000), "1.0 GB"),
        (size(5e13), "50.0 TB"),
    ],
)
def test_quantities(text: str, expected: str) -> None:
    assert text == expected
