"""Instances that are forked from a process that has imported what they need."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from tests.support.commands import FAST, picture_answer, triptych
from tests.support.serving import wait_for
from triptych import exit_codes
from triptych.cluster.child import Child, ChildSpec
from triptych.cluster.forks import InstanceForkServer
from triptych.cluster.launcher import LocalLauncher
from triptych.topology import Role

Start = Callable[..., Awaitable[Child]]


def spec(written: bytes = b"no settings", *modules: str) -> ChildSpec:
    """An instance that fails at once, unless it gets its settings."""
    return ChildSpec("e0", Role.E, "", lambda _: written, {"OMP_NUM_THREADS": "1"}, modules=modules or ("json",))


def run(test: Callable[[LocalLauncher, Start, list[str]], Awaitable[None]]) -> None:
    async def run() -> None:
        launcher, lines = LocalLauncher(), list[str]()

        async def start(of: ChildSpec | None = None) -> Child:
            child = await launcher.start(of or spec(), 1, lines.append)
            assert isinstance(child, Child)
            return child

        try:
            await test(launcher, start, lines)
        finally:
            launcher.close()

    before = os.listdir("/proc/self/fd")
    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert not [one for one in psutil.Process().children() if "triptych.server.fork_server" in one.cmdline()]


def server_of(launcher: LocalLauncher) -> psutil.Process:
    [server] = [one for one in psutil.Process().children() if "triptych.server.fork_server" in one.cmdline()]
    return server


def test_output_and_exit_code_are_those_of_the_process() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        first, second = await start(), await start(spec(b"none either", "a_module_that_does_not_exist", "json"))
        for child in (first, second):
            ended = await child.wait()
            assert ended.code == exit_codes.CONFIG
            assert "can't be read" in child.last_line
            assert child.pid != os.getpid()
        assert first.pid != second.pid
        assert [line[:4] for line in lines] == ["[e0]"] * 2
        assert not server_of(launcher).children()

    run(test)


def test_a_signal_before_the_process_exists_ends_it() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        child = await start()
        child.send(signal.SIGTERM)
        assert child.pid == 0
        assert (await child.wait()).code == -signal.SIGTERM
        after = await start()
        assert (await after.wait()).code == exit_codes.CONFIG
        assert not server_of(launcher).children()

    run(test)


def test_the_next_process_gets_a_new_server_after_the_end_of_one() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        await (await start()).wait()
        first = server_of(launcher)
        first.suspend()
        lost = await start()
        first.kill()
        assert (await lost.wait()).code == exit_codes.FAILED
        assert "has ended" in lost.last_line
        assert (await (await start()).wait()).code == exit_codes.CONFIG
        assert server_of(launcher).pid != first.pid

    run(test)


def test_new_code_gets_a_new_server() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        await (await start()).wait()
        first = server_of(launcher)
        launcher.renew()
        await (await start()).wait()
        assert server_of(launcher).pid != first.pid

    run(test)


def test_a_long_message_is_an_error_of_the_start() -> None:
    async def test(launcher: LocalLauncher, start: Start, lines: list[str]) -> None:
        read, write = os.pipe()
        server = InstanceForkServer(spec().environment)
        with pytest.raises(OSError, match="too long"):
            server.fork("e" * 2**20, (), read, write)
        server.close()
        os.close(read)
        os.close(write)

    run(test)


@pytest.mark.slow
def test_instances_end_with_the_server_and_come_back(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--topology", "1E1PD") as command:
        url = command.wait_until_ready()
        [server] = [one for one in command.descendants if "triptych.server.fork_server" in one.cmdline()]
        instances = server.children()
        assert len(instances) == 2
        server.kill()
        wait_for(lambda: not any(one.is_running() for one in instances))
        wait_for(lambda: command.text.count("has this instance: ready") == 4, 60)
        assert picture_answer(url, "tiny")
