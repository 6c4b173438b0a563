"""What a frontend does when file descriptors run out."""

import resource
import subprocess
import sys

from triptych.server.descriptors import raise_limit

NO_DESCRIPTORS = """if True:
    import asyncio, logging, resource, socket
    from triptych.server.descriptors import AcceptFailures

    async def attempts():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptFailures())
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        where = server.sockets[0].getsockname()
        clients = [socket.socket() for _ in range(5)]
        first_free = socket.socket()
        number = first_free.fileno()
        first_free.close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
        for client in clients:
            client.connect(where)
        await asyncio.sleep(0.2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loop.call_exception_handler({"message": "another failure"})

    logging.basicConfig(level=logging.WARNING)
    asyncio.run(attempts())
"""


def test_the_limit_is_raised_to_what_is_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_cannot_be_accepted_are_logged_once_in_a_while() -> None:
    """Descriptors run out for real, in a process of its own."""
    ended = subprocess.run([sys.executable, "-c", NO_DESCRIPTORS], capture_output=True, text=True, check=True)
    assert ended.stderr.count("accept") == ended.stderr.count("attempts to accept a connection failed") == 1
    assert "another failure" in ended.stderr
