"""Connections that end soon: no request that a client has sent on one is lost."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from triptych.api.http import BoundedHttp

IDLE = 0.3
CLOSE = (b"connection", b"close")


class Connection:
    """A client's connection to an app whose answers to ``/slow`` begin, or go on, only when it is told."""

    def __init__(self) -> None:
        self.may_begin, self.may_end = asyncio.Event(), asyncio.Event()
        self.state = ServerState()
        config = uvicorn.Config(
            self.app, interface="asgi3", http=BoundedHttp, ws="none", lifespan="off", log_config=None
        )
        config.load()
        self.protocol = BoundedHttp(config, self.state, {}, asyncio.get_running_loop())

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        waits = scope["path"] == "/slow"
        if waits:
            await self.may_begin.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if waits:
            await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"b"})

    async def run(self, test: "Test") -> None:
        server = await asyncio.get_running_loop().create_server(lambda: self.protocol, "127.0.0.1", 0)
        self.reader, self.writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            async with asyncio.timeout(20):
                await test(self)
        finally:
            self.writer.close()
            await self.writer.wait_closed()
            server.close()
            await asyncio.sleep(0)  # the server's end of the connection closes

    def ask(self, path: str) -> None:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    async def answer(self) -> bytes:
        """The head of a whole answer."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert await self.reader.readexactly(2) == b"ab"
        return head

    def end_soon(self) -> None:
        self.state.default_headers = [CLOSE]
        self.protocol.end_soon(IDLE)

    async def has_ended(self) -> bool:
        return await self.reader.read() == b""


Test = Callable[[Connection], Coroutine[None, None, None]]


def connected(test: Test) -> None:
    async def run() -> None:
        await Connection().run(test)

    asyncio.run(run())


def test_a_response_that_has_not_begun_says_that_it_is_the_last() -> None:
    async def run(connection: Connection) -> None:
        connection.ask("/slow")
        while connection.protocol.cycle is None:
            await asyncio.sleep(0.01)
        connection.end_soon()
        connection.may_end.set()
        connection.may_begin.set()
        assert b"connection: close" in await connection.answer()
        assert await connection.has_ended()

    connected(run)


def test_after_one_that_has_begun_another_request_is_answered() -> None:
    async def run(connection: Connection) -> None:
        connection.may_begin.set()
        connection.ask("/slow")
        head = await connection.reader.readuntil(b"\r\n\r\n")
        connection.end_soon()
        await asyncio.sleep(2 * IDLE)
        connection.may_end.set()
        assert await connection.reader.readexactly(2) == b"ab"
        assert b"connection: close" not in head
        connection.ask("/now")
        assert b"connection: close" in await connection.answer()
        assert await connection.has_ended()

    connected(run)


@pytest.mark.parametrize("asked_before", [False, True])
def test_an_idle_one_ends_after_a_while_in_which_a_request_is_answered(asked_before: bool) -> None:
    async def run(connection: Connection) -> None:
        if asked_before:
            connection.ask("/now")
            await connection.answer()
        connection.end_soon()
        connection.ask("/now")
        assert b"connection: close" in await connection.answer()
        assert await connection.has_ended()

    connected(run)


@pytest.mark.parametrize("asked_before", [False, True])
def test_an_idle_one_ends_by_itself(asked_before: bool) -> None:
    async def run(connection: Connection) -> None:
        if asked_before:
            connection.ask("/now")
            await connection.answer()
        connection.end_soon()
        assert await connection.has_ended()

    connected(run)


@pytest.mark.parametrize("beginning", [b"", b"GET /now HT"])
def test_a_request_that_a_new_one_has_yet_to_send_is_answered(beginning: bytes) -> None:
    async def run(connection: Connection) -> None:
        connection.writer.write(beginning)
        await asyncio.sleep(0.1)
        connection.end_soon()
        await asyncio.sleep(2 * IDLE)
        connection.writer.write(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n".removeprefix(beginning))
        assert b"connection: close" in await connection.answer()
        assert await connection.has_ended()

    connected(run)


def test_the_rest_of_a_head_has_the_time_of_heads() -> None:
    async def run(connection: Connection) -> None:
        connection.ask("/now")
        await connection.answer()
        connection.writer.write(b"GET /now HT")
        await asyncio.sleep(0.1)
        connection.end_soon()
        await asyncio.sleep(2 * IDLE)
        connection.writer.write(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"connection: close" in await connection.answer()
        assert await connection.has_ended()

    connected(run)
