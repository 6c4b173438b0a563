"""Running instances change their role: the same weights, the same prefixes known, the same answers; nothing is lost."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32, Messages, Running, running
from tests.support.image_cases import CASES
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig, FrontendConfig, RankSizes
from triptych.engine.loop import EngineLoop
from triptych.errors import StartError
from triptych.messages.operations import InstanceStatus
from triptych.messages.stats import PoolUsage
from triptych.server.components import Components
from triptych.server.instance import InstanceProcess
from triptych.topology import Role
from triptych.transfer.memory import SharedMemory

REQUESTS = [case.messages for case in CASES if case.name != "large image"]
TEXT: Messages = [{"role": "user", "content": "word " * 30}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("roles") / "tiny")


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(folder, "1EPD") as service:
            return await service.answers(REQUESTS, max_tokens=12)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other work, an answer may come late."""
    monkeypatch.setattr("triptych.cluster.control_client.ANSWER_TIMEOUT", 30.0)


async def set_role(service: Running, name: str, role: Role, *, timeout: float = 20.0, force: bool = False) -> None:
    def change() -> None:
        with ControlClient(service.frontend.control, ClusterConfig()) as operator:
            operator.set_role(name, role, timeout, force=force)

    await asyncio.to_thread(change)


async def status(service: Running) -> dict[str, InstanceStatus]:
    def ask() -> list[InstanceStatus]:
        with ControlClient(service.frontend.control, ClusterConfig()) as operator:
            return operator.status().instances

    return {one.name: one for one in await asyncio.to_thread(ask)}


def instance(service: Running, name: str) -> InstanceProcess:
    return next(one for one in service.instances if one.name == name)


def host(service: Running, name: str) -> EngineLoop:
    return next(one for one in instance(service, name).loops if isinstance(one, EngineLoop))


def what_is_loaded(service: Running, name: str) -> list[object]:
    components = instance(service, name).loop_builder
    assert isinstance(components, Components)
    assert components.engine is not None
    parts = components.engine
    return [parts, parts.kv_rows, parts.engine.runner, parts.engine.scheduler, host(service, name).runner]


@pytest.mark.parametrize(
    ("topology", "changes"),
    [
        ("2PD", ["pd0=P", "pd1=D", "pd0=PD", "pd1=PD"]),
        ("1P1D", ["p0=D", "d1=P", "p0=PD", "d1=PD", "d1=D", "p0=P"]),
        ("1E2P1D", ["p1=D", "p2=PD", "d3=P"]),
        ("1E1P2D", ["d2=PD", "d3=P", "p1=D"]),
        ("1EP1D", ["d1=PD", "ep0=EPD", "d1=D", "ep0=EP"]),
    ],
)
def test_every_change_leaves_the_answers_as_they_were(
    folder: Path, answers: list[list[int]], topology: str, changes: list[str]
) -> None:
    """Each of P, D and PD becomes each other. Requests are sent whenever an instance can serve them."""
    asked = [n for n, case in enumerate(REQUESTS) if topology[1] == "E" or isinstance(case[0]["content"], str)]
    requests = [REQUESTS[n] for n in asked] or [TEXT]

    async def run() -> None:
        async with running(folder, topology) as service:
            expected = [answers[n] for n in asked] or await service.answers(requests, max_tokens=12)
            for change in changes:
                name, role = change.split("=")[0], Role(change.split("=")[1])
                loaded = what_is_loaded(service, name)
                await set_role(service, name, role, force=True)
                assert all(a is b for a, b in zip(loaded, what_is_loaded(service, name), strict=True)), "all stays"
                loop = host(service, name)
                assert (loop.prefills, loop.decodes) == (role.prefills, role.decodes)
                assert (await status(service))[name].role is role
                if service.frontend.router.debug_state().serving:
                    assert await service.answers(requests, max_tokens=12) == expected, change

    asyncio.run(run())


def test_the_prefix_cache_survives_a_role_change(folder: Path) -> None:
    async def run() -> None:
        async with running(folder, "1P1D") as service:
            first = await service.answer(TEXT, max_tokens=4)
            tokens = len(service.frontend.api.prompt_builder.build(TEXT).tokens)
            for name in ("p0", "d1"):
                other = {"p0": "d1", "d1": "p0"}[name]
                await set_role(service, name, Role.PD, force=True)
                known = host(service, name).scheduler.cache.num_cached
                assert known >= (tokens - 1) // FLOAT32.page_size
                await set_role(service, other, Role.P, force=True)  # so that the other one answers
                before = host(service, name).num_computed_tokens
                assert await service.answer(TEXT, max_tokens=4) == first
                left = tokens - (tokens - 1) // FLOAT32.page_size * FLOAT32.page_size
                assert host(service, name).num_computed_tokens - before == left + 3

    asyncio.run(run())


def test_an_instance_can_drop_and_regain_its_encode_stage(folder: Path, answers: list[list[int]]) -> None:
    async def run() -> None:
        async with running(folder, "1E1EPD") as service:
            for role in (Role.PD, Role.E, Role.EPD):
                await set_role(service, "epd1", role, force=True)
                if role.decodes:
                    assert await service.answers(REQUESTS, max_tokens=12) == answers

    asyncio.run(run())


@asynccontextmanager
async def under_load(service: Running) -> AsyncIterator[list[list[int]]]:
    """Two clients that ask for one answer after the other; the answers, when it is over."""
    got: list[list[int]] = []
    over = asyncio.Event()

    async def client(number: int) -> None:
        while not over.is_set():
            got.append(await service.answer(REQUESTS[number % len(REQUESTS)], max_tokens=12))
            number += 2

    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(client(number))
        try:
            yield got
        finally:
            over.set()


def test_changes_under_load_lose_no_request(folder: Path, answers: list[list[int]]) -> None:
    async def run() -> list[list[int]]:
        async with running(folder, "1E2P2D") as service:
            async with under_load(service) as got:
                for change in ("p1=D", "d3=PD", "p1=P", "d3=D", "d4=P", "d4=D"):
                    name, role = change.split("=")
                    before = len(got)
                    await set_role(service, name, Role(role))
                    async with asyncio.timeout(20):
                        while len(got) < before + 2:
                            await asyncio.sleep(0.01)
            return got

    got = asyncio.run(run())
    assert len(got) >= 12
    assert all(answer in answers for answer in got)


@pytest.mark.parametrize(
    ("topology", "change", "force", "reason"),
    [
        ("1E1PD", "pd1=EPD", True, "it has not loaded the encoder, so it can't encode"),
        ("1E1PD", "e0=PD", True, "it has not loaded the decoder"),
        ("1E1PD", "x=PD", True, "no instance of that name"),
        ("1P1D", "p0=PD", False, "no other instance prefills"),
    ],
)
def test_refusals_leave_all_as_it_was(folder: Path, topology: str, change: str, force: bool, reason: str) -> None:
    async def run() -> None:
        async with running(folder, topology) as service:
            before = await service.answer(TEXT, max_tokens=4)
            name, role = change.split("=")
            with pytest.raises(StartError, match=reason):
                await set_role(service, name, Role(role), force=force)
            assert not any(one.next_role for one in (await status(service)).values())
            assert await service.answer(TEXT, max_tokens=4) == before

    asyncio.run(run())


def test_an_instance_keeps_its_role_when_it_cannot_drain_in_time(folder: Path) -> None:
    """And what it works on ends as it should."""
    opened = threading.Event()

    def slow(instance: InstanceProcess) -> None:
        one = next(host for host in instance.loops if isinstance(host, EngineLoop))
        run = one.runner.run
        one.runner.run = lambda *arguments: (opened.wait(60), run(*arguments))[1]  # type: ignore[method-assign]

    async def run() -> None:
        in_turns = FrontendConfig.of(port=0, placement="round-robin")
        async with running(folder, "2PD", frontend=in_turns, prepare=slow) as service:
            opened.set()
            expected = await service.answer(TEXT, max_tokens=4)
            opened.clear()
            asked = [asyncio.create_task(service.answer(TEXT, max_tokens=4)) for _ in range(2)]
            await asyncio.sleep(0.05)
            with pytest.raises(StartError, match=r"not done with its work within 0\.2 s"):
                await set_role(service, "pd0", Role.P, timeout=0.2, force=True)
            assert not any(one.done() for one in asked), "it didn't wait for the step that hangs"
            opened.set()
            assert await asyncio.gather(*asked) == [expected, expected]
            assert (await status(service))["pd0"].role is Role.PD
            assert await service.answers([TEXT] * 4, max_tokens=4) == [expected] * 4

    asyncio.run(run())


def test_an_instance_keeps_its_role_without_memory_for_the_new_buffer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with running(folder, "2PD") as service:
            expected = await service.answer(TEXT, max_tokens=4)

            def no_memory(_: SharedMemory, num_bytes: int) -> None:
                raise OSError(f"no room for {num_bytes} bytes")

            monkeypatch.setattr(SharedMemory, "__init__", no_memory)
            with pytest.raises(StartError, match="no room for"):
                await set_role(service, "pd0", Role.D, force=True)
            assert await service.answers([TEXT] * 4, max_tokens=4) == [expected] * 4
            monkeypatch.undo()
            await set_role(service, "pd0", Role.D, force=True)

    asyncio.run(run())


def test_status_shows_pools_and_what_is_under_way(folder: Path) -> None:
    def seen(one: InstanceStatus) -> list[PoolUsage]:
        """The pools that keep what requests have left there."""
        return [pool for pool in one.load.pools if pool.name in {"encode_cache_bytes", "kv_pages"}]

    async def run() -> None:
        async with running(folder, "1E1P1D", replace(FLOAT32, kv_receive_blocks=7)) as service:
            await service.answers(REQUESTS, max_tokens=4)
            async with asyncio.timeout(30):
                while not all(pool.cached for one in (await status(service)).values() for pool in seen(one)):
                    await asyncio.sleep(0.1)  # until the next heartbeats
            found = await status(service)
            pools = {name: {pool.name: pool for pool in one.load.pools} for name, one in found.items()}
            assert {name: sorted(kinds) for name, kinds in pools.items()} == {
                "e0": ["encode_cache_bytes"],
                "p1": ["kv_pages", "media_blocks"],
                "d2": ["kv_blocks", "kv_pages"],
            }
            assert pools["d2"]["kv_blocks"].size == 7
            for name in ("p1", "d2"):
                assert pools[name]["kv_pages"].used == 0
            assert {one.load.running + one.load.waiting for one in found.values()} == {0}
            assert [one.outstanding for one in found.values()] == pytest.approx([0.0] * 3, abs=1e-6)

    asyncio.run(run())


def test_set_role_fails_without_a_frontend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.cluster.control_client.ANSWER_TIMEOUT", 0.2)
    with (
        ControlClient("127.0.0.1:9", ClusterConfig()) as operator,
        pytest.raises(StartError, match=r"no answer from the frontend at 127\.0\.0\.1:9: no process listens there"),
    ):
        operator.status()


@pytest.mark.parametrize("sizes", ["2", pytest.param("P=2", marks=pytest.mark.slow)])
def test_ranks_that_share_a_decoder_go_along(folder: Path, answers: list[list[int]], sizes: str) -> None:
    """An instance keeps as many of them as it was started with."""

    async def run() -> None:
        engine = replace(FLOAT32, tensor_parallel_size=RankSizes.parse(sizes))
        async with running(folder, "1E1P1D", engine) as service:
            for change in ("p1=PD", "d2=P", "p1=D", "d2=PD"):
                name, role = change.split("=")
                await set_role(service, name, Role(role), force=True)
                assert await service.answers(REQUESTS, max_tokens=12) == answers, change

    asyncio.run(run())
