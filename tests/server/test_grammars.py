"""Answers with grammars in whole services: the same tokens however late masks arrive, and no delay for others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32, Running, running
from tests.support.image_cases import CASES
from triptych.engine import sampling_batch
from triptych.engine.grammar.matching import Matching
from triptych.engine.grammar.service import GrammarService
from triptych.errors import GrammarTooCostly, InvalidRequest

TOPOLOGIES = ["1EPD", "1E1P1D", *(pytest.param(one, marks=pytest.mark.slow) for one in ("1E1PD", "1E1P2D"))]
WORDS = "start: /([a-z]{1,8} )*/"
NUMBERS = "start: /[0-9 ]*/"
SLOW = f'start: {"x " * 10} "b"\nx: {"y " * 10}\ny: {"z " * 10}\nz: "a" z | ""'
"""Each "a" takes longer to match than the one before."""
REQUESTS: list[dict[str, Any]] = [
    {"grammar": WORDS, "temperature": 1.0, "seed": 1},
    {"grammar": WORDS, "temperature": 1.0, "seed": 2, "top_k": 20, "logprobs": 2, "prompt_logprobs": 1},
    {"grammar": NUMBERS, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "presence_penalty": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("grammars") / "tiny", tied=False)


@asynccontextmanager
async def served(folder: Path, topology: str) -> AsyncIterator[Running]:
    async with asyncio.timeout(120), running(folder, topology) as service:
        yield service


async def answers(service: Running) -> list[list[int]]:
    asked = [service.answer(CASES[number].messages, **one) for number, one in enumerate(REQUESTS)]
    return list(await asyncio.gather(*asked))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with served(folder, "1EPD") as service:
            return await answers(service)

    found = asyncio.run(run())
    assert min(len(answer) for answer in found) > 8
    assert len({tuple(answer) for answer in found}) == len(found)
    return found


def masks_never_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token waits for its mask."""
    monkeypatch.setattr(Matching, "mask_expected_soon", property(lambda _: False))


def late_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is computed twice, since its mask isn't there the first time."""
    mask, asked = Matching.mask, set[tuple[int, int]]()

    def late(self: Matching, seconds: float = 0.0) -> bytes | None:
        place = id(self), self.num_tokens
        if place in asked:
            return mask(self, 10)
        asked.add(place)
        return None

    monkeypatch.setattr(Matching, "mask", late)


def without_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for no mask that is late."""
    monkeypatch.setattr(sampling_batch, "MASK_TIMEOUT", 0.0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("timing", [masks_never_expected, late_once, without_timeout, lambda _: None])
def test_tokens_are_the_same_whenever_masks_come(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    expected: list[list[int]],
    topology: str,
    timing: Callable[[pytest.MonkeyPatch], None],
) -> None:
    timing(monkeypatch)

    async def run() -> None:
        async with served(folder, topology) as service:
            assert await answers(service) == expected

    asyncio.run(run())


@pytest.mark.parametrize("topology", ["1E1PD", "1E1P1D"])
def test_a_costly_answer_fails_by_name(folder: Path, expected: list[list[int]], topology: str) -> None:
    [letter] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a", add_special_tokens=False).ids
    slow: dict[str, Any] = {"grammar": SLOW, "logit_bias": {letter: 100.0}, "max_tokens": 1500}

    async def run() -> None:
        async with served(folder, topology) as service:
            culprits = [service.answer(CASES[n].messages, seed=n, **slow) for n in range(2)]
            ended = asyncio.gather(*culprits, return_exceptions=True)
            assert await answers(service) == expected
            assert [type(end) for end in await ended] == [GrammarTooCostly] * 2
            assert await answers(service) == expected

    asyncio.run(run())


@pytest.mark.parametrize("topology", ["1E1PD", "1E1P1D"])
def test_an_invalid_grammar_is_rejected(folder: Path, topology: str) -> None:
    """While others compute."""

    async def run() -> None:
        async with served(folder, topology) as service:
            others = asyncio.create_task(answers(service))
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="unclosed group"):
                    await service.answer(CASES[0].messages, grammar="start: /(/")
            await others

    asyncio.run(run())


@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
def test_requests_whose_grammar_is_not_compiled_occupy_no_slots(
    folder: Path, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    """However many they are: here more than an instance's slots. None is ever compiled."""
    monkeypatch.setattr(GrammarService, "_advance", lambda *_: False)
    monkeypatch.setattr(Matching, "is_behind", False)

    async def run() -> list[int]:
        engine = replace(FLOAT32, max_num_seqs=2)
        async with asyncio.timeout(60), running(folder, topology, engine) as service:
            waiting = [asyncio.create_task(answers(service)) for _ in range(4)]
            await asyncio.sleep(0.2)
            answer = await service.answer(CASES[0].messages, max_tokens=4)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for entry in list(service.frontend.router.debug_state().dispatched):
                service.frontend.router.lifecycle.cancel(entry)
            return answer

    assert len(asyncio.run(run())) == 4
