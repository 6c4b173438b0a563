"""How requests end that one instance prefills and another decodes, other than by being answered."""

import asyncio
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import Running, running
from triptych.clock import SystemClock
from triptych.engine.cache_rows import HostCacheRows
from triptych.engine.kv_sink import KVSink
from triptych.errors import InternalError, TransferError
from triptych.messages.work import Prefill, SamplingParams
from triptych.observe.requests import RequestRecord
from triptych.router.stream import TokenStream

MESSAGES = [{"role": "user", "content": "one two three " * 20}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("split") / "tiny")


def submit(service: Running, salt: str) -> TokenStream:
    inside = service.frontend.api
    prompt = inside.prompt_builder.build(MESSAGES)
    return inside.router.lifecycle.submit(
        RequestRecord("id", "POST", SystemClock()), prompt, SamplingParams(max_tokens=20, ignore_eos=True), [], salt
    )


def test_cancels_are_no_errors_wherever_they_find_a_request(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with running(folder, "1E1P1D") as service:
            for number in range(60):
                streams = [submit(service, f"{number}/{one}") for one in range(3)]
                await asyncio.sleep(0.001 * (number % 12))
                for stream in streams:
                    service.frontend.router.lifecycle.cancel(stream.request)
            assert len(await service.answer(MESSAGES)) == 32
            async with asyncio.timeout(10):
                while not all(host.idle for instance in service.instances for host in instance.loops):
                    await asyncio.sleep(0.01)
            assert all(lease.outstanding == 0 for lease in service.frontend.router.membership)

    asyncio.run(run())
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_prefill_that_cannot_be_offered_fails_its_request_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with running(folder, "1E1P1D") as service:
            expect = KVSink.expect

            def refuse_once(_: KVSink, prefill: Prefill, __: int) -> None:
                monkeypatch.setattr(KVSink, "expect", expect)
                raise TransferError(f"transfer {prefill.transfer} is under way already")

            monkeypatch.setattr(KVSink, "expect", refuse_once)
            async with asyncio.timeout(20):
                with pytest.raises(InternalError, match="under way already"):
                    await service.answer(MESSAGES)
            assert len(await service.answer(MESSAGES)) == 32

    asyncio.run(run())


def test_no_memory_to_copy_rows_is_not_the_requests_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with running(folder, "1E1P1D") as service:
            right = await service.answer(MESSAGES)
            copy = HostCacheRows.write

            def fail_once(*_: object) -> None:
                monkeypatch.setattr(HostCacheRows, "write", copy)
                raise MemoryError("no pinned memory")

            monkeypatch.setattr(HostCacheRows, "write", fail_once)
            async with asyncio.timeout(20):
                assert await service.answer(MESSAGES, cache_salt="another") == right
            assert HostCacheRows.write is copy, "it failed once"

    asyncio.run(run())
