"""A request that can't be computed fails alone, with a typed error, in every topology."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32, Running, running
from tests.support.image_cases import CASES
from triptych.config import EngineConfig
from triptych.engine.loop import EngineLoop
from triptych.engine.runner import StepOutput
from triptych.engine.sampler import SampledToken
from triptych.errors import InternalError, NonFiniteLogits, NoTokenAllowed, TriptychError
from triptych.server.instance import InstanceProcess

TOPOLOGIES = ["1EPD", "1E1P1D", *(pytest.param(one, marks=pytest.mark.slow) for one in ("1E1PD", "1E1P2D"))]
CULPRIT = 666
"""The seed of the request that makes a step fail."""
BYSTANDERS = [case.messages for case in CASES[:4]]


def text(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rows") / "tiny", tied=False)


async def with_bystanders(
    service: Running, *culprits: dict[str, Any]
) -> tuple[list[list[int]], list[BaseException | list[int]]]:
    """What the bystanders were answered, who draw at random, and how requests with these settings ended beside them."""
    others = [
        asyncio.create_task(service.answer(messages, seed=number, temperature=0.8, max_tokens=64))
        for number, messages in enumerate(BYSTANDERS)
    ]
    queries = [asyncio.create_task(service.answer(**{"messages": text("Well?")} | one)) for one in culprits]
    ends = await asyncio.wait_for(asyncio.gather(*queries, return_exceptions=True), 30)
    for end in ends:
        assert isinstance(end, TriptychError | list), repr(end)
    return list(await asyncio.wait_for(asyncio.gather(*others), 30)), ends


def served(
    folder: Path,
    topology: str,
    *culprits: dict[str, Any],
    engine: EngineConfig = FLOAT32,
    prepare: Callable[[InstanceProcess], None] = lambda _: None,
) -> tuple[list[list[int]], list[BaseException | list[int]]]:
    """As ``with_bystanders``, by a service that answers one more request afterwards."""

    async def run() -> tuple[list[list[int]], list[BaseException | list[int]]]:
        async with running(folder, topology, engine, prepare=prepare) as service:
            ended = await with_bystanders(service, *culprits)
            assert len(await service.answer(text("And now?"), max_tokens=4)) == 4
            return ended

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What the bystanders are answered where nothing goes wrong."""
    answers, _ = served(folder, "1EPD")
    assert len({tuple(answer) for answer in answers}) == len(answers)
    return answers


# ── logits that aren't numbers ───────────────────────────────────────────────────────────────────────────────


def spoil(folder: Path, token: int, value: float) -> Path:
    """Gives a checkpoint's token an embedding that whatever is made of it overflows."""
    [shard] = folder.glob("*.safetensors")
    weights = load_file(shard)
    [name] = [name for name in weights if name.endswith("embed_tokens.weight")]
    weights[name][token] = value
    save_file(weights, shard, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def letter(folder: Path, expected: list[list[int]]) -> tuple[str, int]:
    """One that the bystanders neither read nor say, and its token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    said = {token for answer in expected for token in answer}
    tokens = {letter: tokenizer.encode(letter).ids[0] for letter in "ZXQJK#@$%"}
    return next((letter, token) for letter, token in tokens.items() if token not in said)


@pytest.fixture(scope="module", params=[torch.inf, torch.nan])
def overflowing(
    request: pytest.FixtureRequest, letter: tuple[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint that can't take the letter."""
    return spoil(make_checkpoint(tmp_path_factory.mktemp("bad") / "tiny", tied=False), letter[1], request.param)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_prompt_whose_logits_overflow(
    overflowing: Path, letter: tuple[str, int], expected: list[list[int]], topology: str
) -> None:
    bad = {"messages": text(f"a{letter[0]}b"), "max_tokens": 4}
    variants: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"logit_bias": {3: 100.0}, "repetition_penalty": 2.0},
    ]
    answers, ends = served(overflowing, topology, *(bad | one for one in variants))
    assert [type(end) for end in ends] == [NonFiniteLogits] * len(variants)
    assert answers == expected


@pytest.mark.parametrize("settings", [{"dtype": "auto"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}])
def test_other_formats_overflow(overflowing: Path, letter: tuple[str, int], settings: dict[str, Any]) -> None:
    async def run() -> list[Any]:
        async with running(overflowing, "1EPD", replace(FLOAT32, **settings)) as service:
            queries = [service.answer(text(words), max_tokens=4) for words in ("and", f"a{letter[0]}b")]
            return await asyncio.wait_for(asyncio.gather(*queries, return_exceptions=True), 30)

    good, bad = asyncio.run(run())
    assert len(good) == 4
    assert isinstance(bad, NonFiniteLogits)


# ── nothing left to draw ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_request_that_rules_every_token_out(folder: Path, expected: list[list[int]], topology: str) -> None:
    """At its first token or later."""
    empty = r"start: /[^\s\S]/"
    short = 'start: "ab"'
    dead_ends: list[dict[str, Any]] = [
        {"grammar": empty},
        {"grammar": empty, "temperature": 1.0, "logprobs": 2},
        {"grammar": short, "min_tokens": 5, "max_tokens": 9},
        {"grammar": short, "min_tokens": 5, "max_tokens": 9, "temperature": 1.0, "top_p": 0.9},
    ]
    answers, ends = served(folder, topology, *dead_ends)
    assert [type(end) for end in ends] == [NoTokenAllowed] * len(dead_ends)
    assert answers == expected


def test_min_tokens_hold_against_a_grammar_that_may_end(folder: Path) -> None:
    grammar = "start: /[a-z]{1,40}/"
    _, [answer] = served(folder, "1EPD", {"grammar": grammar, "min_tokens": 12, "max_tokens": 30})
    assert isinstance(answer, list)
    assert len(answer) >= 12


# ── steps that raise ─────────────────────────────────────────────────────────────────────────────────────────


def trip_over(seeds: set[int]) -> Callable[[InstanceProcess], None]:
    """For ``running``: a step raises after it was computed, as long as one of its tokens is sampled by such a seed."""

    def prepare(instance: InstanceProcess) -> None:
        for host in instance.loops:
            if isinstance(host, EngineLoop):
                host.runner.run = tripping(host.runner.run)  # type: ignore[method-assign]

    def tripping(run: Callable[..., StepOutput]) -> Callable[..., StepOutput]:
        def tripped(batch: Any, sampling_inputs: Any, *others: Any) -> StepOutput:
            output = run(batch, sampling_inputs, *others)
            if seeds & {draw.sampling.seed for draw in sampling_inputs}:
                raise RuntimeError("secret of /the/server")
            return output

        return tripped

    return prepare


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("chunk", [7, 4096])
def test_a_step_that_raises_is_split(folder: Path, expected: list[list[int]], topology: str, chunk: int) -> None:
    """Beside culprits with pictures and without, who are found however they are batched."""
    engine = replace(FLOAT32, max_num_batched_tokens=chunk)
    culprits = [{"messages": BYSTANDERS[number], "seed": CULPRIT + number} for number in range(2)]
    prepare = trip_over({CULPRIT, CULPRIT + 1})
    answers, ends = served(folder, topology, *culprits, engine=engine, prepare=prepare)
    assert [type(end) for end in ends] == [InternalError] * 2
    assert all("secret" not in str(end) for end in ends)
    assert answers == expected


def test_an_instance_whose_steps_all_raise_costs_no_request(folder: Path) -> None:
    """Its device answers. It looks idle, because it fails fast, and gets little more work all the same."""

    def prepare(instance: InstanceProcess) -> None:
        if instance.name == "epd0":
            trip_over(set(range(len(BYSTANDERS))))(instance)

    async def run() -> list[Any]:
        async with running(folder, "2EPD", prepare=prepare) as service:
            queries = [service.answer(messages, seed=number) for number, messages in enumerate(BYSTANDERS)]
            return await asyncio.wait_for(asyncio.gather(*queries, return_exceptions=True), 30)

    async def undisturbed() -> list[Any]:
        async with running(folder, "1EPD") as service:
            return [await service.answer(messages, seed=number) for number, messages in enumerate(BYSTANDERS)]

    assert asyncio.run(run()) == asyncio.run(undisturbed())


def test_a_token_that_is_not_in_the_vocabulary_fails_its_request_at_once(folder: Path) -> None:
    """However a prefill instance comes to say so."""

    def prepare(instance: InstanceProcess) -> None:
        for host in instance.loops:
            if isinstance(host, EngineLoop) and not host.decodes:
                run = host.runner.run

                def wrong(*args: Any, run: Callable[..., StepOutput] = run) -> StepOutput:
                    output = run(*args)
                    return replace(
                        output,
                        sampled=[replace(one, token=10**6) for one in output.sampled if isinstance(one, SampledToken)],
                    )

                host.runner.run = wrong  # type: ignore[method-assign, assignment]

    async def ask() -> BaseException | list[int]:
        async with running(folder, "1E1P1D", prepare=prepare) as service:
            [end] = await asyncio.wait_for(asyncio.gather(service.answer(text("Well?")), return_exceptions=True), 10)
            return end

    end = asyncio.run(ask())
    assert isinstance(end, InternalError)
    assert "1000000" in str(end)


def test_a_model_that_overflows_for_every_request(tmp_path: Path) -> None:
    """Each request fails by name."""
    folder = spoil(make_checkpoint(tmp_path / "tiny", tied=True), 7, torch.inf)

    async def run() -> list[Any]:
        async with running(folder, "1EPD") as service:
            queries = [service.answer(text("x" * n), temperature=float(n % 2)) for n in range(1, 5)]
            return await asyncio.wait_for(asyncio.gather(*queries, return_exceptions=True), 30)

    assert {type(end) for end in asyncio.run(run())} == {NonFiniteLogits}
