"""A web server of pictures, some of which can't be had."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

from triptych.measure.load.pictures import picture

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def media_server() -> AsyncIterator[str]:
    """Serve ``/picture/NUMBER``, and below the other names of ``questions.BREAKS`` what can't be used. Yields the URL,
    without a slash at the end."""
    server = await asyncio.start_server(_serve, HOST, 0)
    async with server:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        head = await reader.readuntil(b"\r\n\r\n")
        name, _, number = head.split()[1].decode().strip("/").partition("/")
        if name == "reset":
            _reset(writer)
        else:
            writer.write(_answer(name, number))
            await writer.drain()
    writer.close()


def _answer(name: str, number: str) -> bytes:
    if name == "picture" and number.isdecimal():
        return _response("200 OK", picture(int(number)))
    return {
        "short": _response("200 OK", b"\x89PNG")[:-2],
        "text": _response("200 OK", b"no picture"),
        "empty": _response("200 OK", b""),
        "loop": _response("302 Found", b"", "Location: /loop\r\n"),
    }.get(name) or _response("404 Not Found", b"")


def _response(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n".encode() + body


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
