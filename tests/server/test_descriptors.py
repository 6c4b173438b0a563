"""What a frontend does when file descriptors run out."""

import asyncio
import logging
import resource
import socket

import pytest

from triptych.server.descriptors import AcceptFailures, raise_limit


def test_the_limit_is_raised_to_what_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_cannot_be_accepted_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """Descriptors run out for real: the limit is what is open now, and one more."""

    async def attempts() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptFailures())
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        where = server.sockets[0].getsockname()
        clients = [socket.socket() for _ in range(5)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        first_free = socket.socket()
        number = first_free.fileno()
        first_free.close()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
            for client in clients:
                client.connect(where)
            await asyncio.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for client in clients:
                client.close()
            server.close()
        loop.call_exception_handler({"message": "another failure"})

    with caplog.at_level(logging.WARNING):
        asyncio.run(attempts())
    assert [line for line in caplog.messages if "accept" in line] == [
        line for line in caplog.messages if "attempts to accept a connection failed" in line
    ]
    assert len([line for line in caplog.messages if "accept" in line]) == 1
    assert "another failure" in caplog.text
