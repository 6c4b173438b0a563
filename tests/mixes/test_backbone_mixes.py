"""Random mixes of what changes how a request is computed but not its answer: batches, chunks, preemption, prefixes that
are cached, partly evicted or cold, one instance or two, ranks, receive pools of one block, and instances that are lost.
On backbones whose layers keep different things.

``test_many_mixes`` runs nightly: ``scripts/test -m slow tests/mixes``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.backbones import BACKBONES
from tests.support.harness import FLOAT32, Running, running, together
from tests.support.reference import Reference
from tests.support.tiny import make_tiny
from triptych.config import RankSizes
from triptych.prompt.prompt import PlannedPrompt, PromptBuilder

MIXED = ["gemma4-e", "qwen3_5"]
"""Backbones, by their names in ``tests/support/backbones.py``."""
WITH_WINDOWS = ["gemma4-e"]
PAGE = FLOAT32.page_size
MOST_TOKENS = 24
STARTS = ("The quick brown fox ", "The quick brown fox jumps over the lazy dog. " * 2, "Pack my box with " * 5)
TEXTS = [start + end for start in STARTS for end in ("", "Why?", "How vexingly quick daft zebras jump! " * 2)]
"""Prompts of up to 10 windows, some of which begin like others."""


class Model:
    """A checkpoint and what transformers answers to ``TEXTS``."""

    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        self.builder = PromptBuilder(folder)
        self.answer = cache(self._answer)

    def prompt(self, index: int) -> PlannedPrompt:
        return self.builder.build(messages(index))

    def _answer(self, index: int) -> list[int]:
        return self.reference.generate(self.prompt(index), [], MOST_TOKENS)


@dataclass(frozen=True)
class Mix:
    """``rounds`` of requests, each the number of a text and of tokens to answer with; a round's are sent at once."""

    topology: str
    chunk: int
    batch: int
    spare_pages: int
    rounds: list[list[tuple[int, int]]]
    ranks: str = "1"
    receive_blocks: int = 1024
    snapshots: int = 4
    interval: int = 64
    lost_after: int = 0
    """Tokens that the first instance of a topology with two of its kind computes before it is lost; 0: it is not."""


def messages(index: int) -> list[dict[str, object]]:
    return [{"role": "user", "content": TEXTS[index]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    torch.set_num_threads(1)
    return cache(lambda name: Model(make_tiny(tmp_path_factory.mktemp("mix"), BACKBONES[name], seed=4)))


requests = st.tuples(st.integers(0, len(TEXTS) - 1), st.integers(1, MOST_TOKENS))
settings_of_any = {
    "chunk": st.sampled_from([1, 7, 16, 64, 500]),
    "batch": st.sampled_from([1, 2, 8]),
    "spare_pages": st.sampled_from([0, 1, 4, 200]),
    "rounds": st.lists(st.lists(requests, min_size=1, max_size=8), min_size=1, max_size=4),
    "receive_blocks": st.sampled_from([1, 3, 1024]),
    "snapshots": st.sampled_from([0, 1, 3, 16]),
    "interval": st.sampled_from([16, 64, 1024]),
}
mixes = st.builds(Mix, topology=st.sampled_from(["1PD", "1P1D"]), **settings_of_any)
ranked = st.builds(Mix, topology=st.just("1P1D"), ranks=st.sampled_from(["P=2,D=1", "P=1,D=2", "2"]), **settings_of_any)
losing = st.builds(
    Mix, topology=st.sampled_from(["2PD", "2P1D", "2D1P"]), lost_after=st.integers(1, 300), **settings_of_any
)


async def lose(service: Running, tokens: int) -> bool:
    """End the first instance once it has computed ``tokens`` tokens. Returns whether it was in the middle of work."""
    loop = service.engine_loops()[0]
    while loop.num_computed_tokens < tokens:
        await asyncio.sleep(0)
    busy = len(loop.scheduler) > 0
    await service.end(service.instances[0].name)
    return busy


def check(model: Model, mix: Mix) -> Counter[str]:
    """Return how often what a mix is about has happened."""
    asked = [request for each in mix.rounds for request in each]
    longest = max(len(model.prompt(index).tokens) for index, _ in asked) + MOST_TOKENS
    engine = replace(
        FLOAT32,
        max_num_batched_tokens=mix.chunk,
        max_num_seqs=mix.batch,
        kv_cache_tokens=(-(-longest // PAGE) + mix.spare_pages) * PAGE,
        tensor_parallel_size=RankSizes.parse(mix.ranks),
        kv_receive_blocks=mix.receive_blocks,
        receive_block_rows=8,
        state_snapshots=mix.snapshots,
        state_snapshot_interval=mix.interval,
    )
    happened: Counter[str] = Counter()

    async def run() -> None:
        # with two instances, and where more isn't dispatched, fewer requests come to one
        at_once = 1 if mix.lost_after else min(len(mix.rounds[0]), mix.batch)
        async with running(model.reference.folder, mix.topology, engine, prepare=together(at_once)) as service:
            losing = asyncio.create_task(lose(service, mix.lost_after)) if mix.lost_after else None
            for each in mix.rounds:
                answers = (service.answer(messages(index), max_tokens=tokens) for index, tokens in each)
                for (index, tokens), answer in zip(each, await asyncio.gather(*answers), strict=True):
                    assert answer == model.answer(index)[:tokens], (index, tokens)
            if losing is not None:
                happened["losses in the middle"] += losing.done() and losing.result()
                losing.cancel()
                await asyncio.gather(losing, return_exceptions=True)
            for loop in service.engine_loops():
                happened["preemptions"] += loop.scheduler.num_preemptions
                happened["hits"] += loop.scheduler.num_prefix_hits
                pages = [pool.num_pages for pool in loop.scheduler.cache.pools]
                happened["pages that windows spare"] += pages[0] - pages[-1]

    asyncio.run(run())
    return happened


@pytest.mark.parametrize("name", MIXED)
def test_a_few_mixes(model: Callable[[str], Model], name: str) -> None:
    """One that preempts and finds prefixes that are evicted in part, and one whose requests are longer than what layers
    with a window have room for."""
    happened: Counter[str] = Counter()
    rounds = [[(0, 24), (1, 24), (0, 20)], [(4, 3), (2, 5)], [(1, 2), (4, 2)]]
    for topology, chunk, batch in (("1P1D", 7, 8), ("1PD", 16, 1)):
        happened += check(model(name), Mix(topology, chunk, batch, 1, rounds))
    for _ in range(3):  # on a busy machine, requests that are asked together may run one after the other
        if not happened["preemptions"]:
            happened += check(model(name), Mix("1P1D", 7, 8, 1, rounds))
    assert happened["preemptions"], happened
    assert happened["hits"], happened
    assert happened["pages that windows spare"] or name not in WITH_WINDOWS, happened


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [
        (mixes, 60, ["preemptions", "hits"]),
        (ranked, 15, ["preemptions", "hits"]),
        (losing, 30, ["preemptions", "losses in the middle"]),
    ],
    ids=["one rank", "ranks", "losses"],
)
def test_many_mixes(
    model: Callable[[str], Model], name: str, kind: st.SearchStrategy[Mix], number: int, expected: list[str]
) -> None:
    happened: Counter[str] = Counter()

    @settings(max_examples=number)
    @given(mix=kind)
    def every(mix: Mix) -> None:
        happened.update(check(model(name), mix))

    every()
    assert all(happened[one] for one in expected), happened
