"""A text-only model: no encoder, media are refused, text parts are joined."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chat import the_error
from tests.support.exits import exit_code
from tests.support.harness import FLOAT32
from tests.support.serving import Served, image, image_part, served, text_part
from tests.support.tiny import make_tiny
from triptych.checkpoint.reader import Checkpoint
from triptych.cli import main
from triptych.clock import SystemClock
from triptych.config import InstanceSpec
from triptych.errors import InvalidRequest, MediaNotServed, StartError
from triptych.messages.channel import Channel
from triptych.prompt.prompt import PromptBuilder
from triptych.server.build import build_instance
from triptych.server.model_bundle import ModelBundle
from triptych.topology import Role


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("text") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Served]:
    with served(folder, "1PD") as made:
        yield made


def test_readiness_and_input_modalities(service: Served) -> None:
    with service.client() as client:
        assert client.get("/ready").json() == {"ready": True}
        (model,) = client.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text"]
    assert model["max_model_len"] == 4096


def test_pictures_are_refused(service: Served) -> None:
    before = service.text()
    the_error(service.post([text_part("What is it?"), image_part()]), 400, None, "media_not_served")
    assert service.text() == before


def test_parts_are_shown_as_the_template_shows_them(service: Served) -> None:
    assert service.text([text_part("First."), text_part("Then.")]) == service.text("First.Then.")
    assert service.text([text_part("First.")]) == service.text("First.")


def test_placeholders_of_media_are_plain_text(service: Served) -> None:
    assert service.text("a token called <|image_pad|>")


def test_prompts_without_a_service(folder: Path) -> None:
    builder = PromptBuilder(folder)
    prompt = builder.build([{"role": "user", "content": "x" * 10}])
    assert prompt.items == ()
    assert prompt.positions.prompt.tolist() == [list(range(len(prompt.tokens)))] * 3
    assert prompt.positions.next_position == len(prompt.tokens)
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        builder.build([{"role": "user", "content": "\ud800"}])
    picture = [{"type": "image", "data": image()}]
    with pytest.raises(MediaNotServed, match="text alone"):
        builder.build([{"role": "user", "content": picture}])


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD", "1EP1D"])
def test_topologies_that_encode_are_refused_at_start(
    folder: Path, topology: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["serve", str(folder), "--topology", topology, "--port", "0"]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(
        rf"triptych: topology {topology} has instances that encode .* text-only model: try 1PD or 1P1D", line
    )


def test_an_instance_that_encodes_is_refused_at_start(folder: Path) -> None:
    """An instance that joins a frontend by itself."""

    channel = Channel(SystemClock())
    try:
        with pytest.raises(StartError, match=r"E instances encode, and .* is a text-only model"):
            build_instance(
                InstanceSpec(model=str(folder), role=Role.E, name="e0", join="127.0.0.1:1", engine=FLOAT32),
                model=ModelBundle(Checkpoint(folder), FLOAT32),
                channel=channel,
                clock=SystemClock(),
            )
    finally:
        channel.close()


def test_doctor_shows_the_roles_of_a_text_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", str(folder)])
    roles = [
        match[1] for line in capsys.readouterr().out.splitlines() if (match := re.match(r"│ (\w+) +│ +[\d,]+ ", line))
    ]
    assert roles == ["P", "D", "PD"]
