"""``--encoder-quantization int8``: the demo model's answers, and that all instances of a service need the same."""

import asyncio
import io
from dataclasses import replace

import pytest
from PIL import Image

from demo.questions import EVALUATION_SEEDS, Example, make_example
from tests.support.harness import FLOAT32, Messages, make_instance, run_instance, running
from tests.support.prompt_parts import image_part, user
from triptych.config import EngineConfig, ServeConfig
from triptych.demo import MODEL_DIR
from triptych.errors import StartError
from triptych.topology import Role

INT8 = replace(FLOAT32, encoder_quantization="int8")
EXAMPLES = [make_example(seed) for seed in EVALUATION_SEEDS[:8]]


def as_png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def question(example: Example) -> Messages:
    parts = (
        {"type": "text", "text": part} if isinstance(part, str) else image_part(as_png(example.pictures[part]))
        for part in example.parts
    )
    return [user(*parts)]


async def answers(topology: str, engine: EngineConfig) -> list[str]:
    async with running(MODEL_DIR, topology, engine) as service:
        tokens = await service.answers([question(example) for example in EXAMPLES], ignore_eos=False)
        tokenizer = service.frontend.api.tokenizer
        return [tokenizer.decode(answer).strip() for answer in tokens]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The answers in float32."""
    found = asyncio.run(answers("1EPD", FLOAT32))
    assert len(set(found)) > 4
    return found


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD"])
def test_answers_are_those_of_float32(expected: list[str], topology: str) -> None:
    assert asyncio.run(answers(topology, INT8)) == expected


def test_beside_a_decoder_in_int8(expected: list[str]) -> None:
    assert asyncio.run(answers("1E1PD", replace(INT8, dtype="auto", quantization="int8"))) == expected


@pytest.mark.parametrize(("served", "joining", "role"), [(FLOAT32, INT8, Role.E), (INT8, FLOAT32, Role.PD)])
def test_an_instance_with_another_is_refused(served: EngineConfig, joining: EngineConfig, role: Role) -> None:
    async def run() -> None:
        async with running(MODEL_DIR, "1EPD", served) as service:
            config = ServeConfig(model=MODEL_DIR, engine=joining)
            other = make_instance(config, role, "other", service.frontend.control)
            asyncio.get_running_loop().call_later(30, other.stop)  # if it isn't refused
            with pytest.raises(
                StartError,
                match=r"the media rows of other don't fit those of epd0: weight_dtype .* \(--dtype, --encoder-quant",
            ):
                await asyncio.to_thread(run_instance, other)

    asyncio.run(run())
