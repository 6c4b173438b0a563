"""From what is asked of a service, without its content, to a topology: recorded, read and planned with."""

import json
from pathlib import Path

import pytest

from tests.support.profiles import example_profile
from tests.support.serving import image, image_part, served, text_part, wait_for
from triptych.cli import main
from triptych.config import ObserveConfig
from triptych.costs import profile as profiles
from triptych.workload.trace import TraceRequest, read_trace

SECRET = "what only its author may read, " * 20


def recorded(path: Path, count: int) -> list[TraceRequest]:
    """The trace, once it has that many requests: lines are written when answers have ended."""
    wait_for(lambda: path.exists() and len(read_trace(path)) >= count)
    return read_trace(path)


def test_a_service_records_what_a_plan_needs_and_no_content(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "trace.jsonl", image(96, 64, seed=5)
    with served(folder, observe=ObserveConfig(record=str(path))) as service:
        service.text(SECRET)
        service.text(SECRET + "And what else?", n=2, temperature=1.0)
        service.text([text_part("Look: "), image_part(picture), text_part(SECRET)])
        service.text([image_part(picture), image_part(image(128, 96, seed=6))], max_tokens=3)
        assert service.post("x" * 10**6).status_code == 400
        trace = recorded(path, 5)
    first, again, other, shown, two = trace
    assert [one.answer for one in trace] == [8, 8, 8, 8, 3]
    assert (other.text, other.blocks) == (again.text, again.blocks)
    shared = len(first.blocks) - 1
    assert shared > 0
    assert again.blocks[:shared] == first.blocks[:shared]
    assert shown.blocks[0] != first.blocks[0]
    assert [(one.width, one.height, one.format) for one in two.media] == [(96, 64, "png"), (128, 96, "png")]
    assert two.media[0] == shown.media[0]
    assert two.media[0].bytes == len(picture)
    assert 0 < shown.lead < shown.text
    assert len({one.client for one in trace}) == 1
    content = path.read_text()
    assert not any(word in content for word in ("author", "127.0.0.1", "data:"))

    profile = tmp_path / "profile.json"
    profiles.write(example_profile(), profile)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("plan", "--profile", str(profile), "--workload", str(path), "--slo", "ttft=5s"),
                *("--attain", "0.5", "--topologies", "1E1PD,2EPD", "--model", "demo", "--json"),
            ]
        )
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"].startswith("triptych serve demo --topology ")


def test_a_file_that_exists_is_appended_to(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for count in (1, 2):
        with served(folder, "1EPD", observe=ObserveConfig(record=str(path))) as service:
            service.text("Hello")
            recorded(path, count)
