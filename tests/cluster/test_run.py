"""``triptych run``: a question about a picture on the terminal."""

from pathlib import Path

import pytest

from tests.support.commands import triptych
from tests.support.serving import image


def test_run_answers_and_shows_where_the_time_went(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(image())
    asked = ("run", folder, picture, "What is it?", "--max-tokens", "12", "--threads", "1")
    with triptych(*asked) as command:
        assert command.end(60) == 0, command.text
        answer = [line for line in command.lines if line not in command.errors]
        assert any(answer)
        shown = "\n".join(command.errors)
        for stage in ("preprocess", "encode", "prefill", "decode"):
            assert stage in shown


@pytest.mark.slow
def test_run_shows_the_services_error_as_it_is(folder: Path, tmp_path: Path) -> None:
    """The message's path looks like markup of the terminal library."""
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"no picture")
    with triptych("run", folder, picture, "What is it?", "--threads", "1") as command:
        assert command.end(60) == 1
        assert "not a JPEG, PNG, WebP, GIF, BMP or AVIF image" in command.text
        assert "Traceback" not in command.text
