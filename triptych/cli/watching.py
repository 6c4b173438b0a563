"""Reads snapshots of a running service from its frontend over HTTP, as they come."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import httpx
import msgspec

from triptych.cli.text_table import cell
from triptych.errors import ConfigError, FrontendSilent
from triptych.observe.pipeline import Pipeline

EVENTS = "/ui/events"
MAX_EVENT = 2 * 2**20
"""Bytes of one event; a service of 64 instances and 200 requests in flight needs a tenth."""
CONNECT_SECONDS = 10.0
SILENT_SECONDS = 10.0
"""Seconds without a snapshot after which a connection counts as lost."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Source:
    """Where snapshots come from."""

    url: str
    """URL of the frontend, without ``/ui``."""
    rate: float = 2.0
    """Snapshots per second."""
    key: str = ""
    """API key; empty for none."""
    trust: ssl.SSLContext | bool = True
    """How a certificate is checked, as in httpx."""


@dataclass(frozen=True)
class Outage:
    """The connection was lost, and is tried again."""

    reason: str


async def follow(source: Source) -> AsyncGenerator[Pipeline | Outage, None]:
    """Yield snapshots for as long as the caller wants them. A connection that is lost is made again, for a frontend may
    restart; each failure until then yields an Outage. Raises what ``snapshots`` raises before the first snapshot, and
    ConfigError whenever the frontend refuses."""
    connected = False
    while True:
        try:
            async with aclosing(snapshots(source)) as stream:
                async for pipeline in stream:
                    connected = True
                    yield pipeline
        except FrontendSilent as error:
            if not connected:
                raise
            yield Outage(str(error))
        await asyncio.sleep(RETRY_SECONDS)


async def snapshots(source: Source) -> AsyncGenerator[Pipeline, None]:
    """Yield the snapshots of one connection. Raises ConfigError when the frontend refuses to show itself, or what
    answers isn't Triptych, and FrontendSilent when nothing answers or the connection ends."""
    headers = {"authorization": f"Bearer {source.key}"} if source.key else {}
    timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=timeout, headers=headers, verify=source.trust) as client,
            client.stream("GET", source.url + EVENTS, params={"rate": f"{source.rate:g}"}) as response,
        ):
            await _check(response, source)
            async for data in _events(response, source):
                yield _snapshot(data, source)
    except httpx.ReadTimeout:
        raise FrontendSilent(f"{source.url} has sent nothing for {SILENT_SECONDS:g} s") from None
    except httpx.HTTPError as error:
        raise FrontendSilent(f"no answer from {source.url}: {_reason(error)}") from None
    raise FrontendSilent(f"{source.url} ended the connection")


async def _check(response: httpx.Response, source: Source) -> None:
    """Raise an error unless the response is a stream of events."""
    status, url = response.status_code, source.url
    kind = response.headers.get("content-type", "").partition(";")[0].strip()
    if status == httpx.codes.OK and kind == "text/event-stream":
        return
    if status == httpx.codes.OK:
        raise ConfigError(f"{url} is no Triptych frontend: it sent {cell(kind or 'something').plain}")
    said = await _beginning(response)
    if status == httpx.codes.UNAUTHORIZED:
        given = "refuses the API key" if source.key else "asks for an API key"
        raise ConfigError(f"{url} {given}: give a file with one as --api-key-file, or TRIPTYCH_API_KEY")
    if status == httpx.codes.NOT_FOUND:
        raise ConfigError(f"{url} has no {EVENTS}: it runs with --no-ui, or is no Triptych frontend")
    if status >= httpx.codes.INTERNAL_SERVER_ERROR or status == httpx.codes.TOO_MANY_REQUESTS:
        raise FrontendSilent(f"{url} answers {status}: {said}")
    raise ConfigError(f"{url} answers {status}: {said}")


async def _beginning(response: httpx.Response) -> str:
    """Return what an error says, in one line: the message of an error of the API, or the beginning of a text."""
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > 2**16:
            break
    try:
        text = msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return cell(" ".join(text.split())).plain or "without a reason"


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


async def _events(response: httpx.Response, source: Source) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    pending = b""
    async for chunk in response.aiter_bytes():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:")
        if len(pending) > MAX_EVENT:
            raise ConfigError(f"{source.url} is no Triptych frontend: it sent more than {MAX_EVENT} bytes in one event")


def _snapshot(data: bytes, source: Source) -> Pipeline:
    try:
        return msgspec.json.decode(data, type=Pipeline)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{source.url} is no Triptych frontend of this version: it sent an event that is no snapshot ({error})"
        ) from None


def _reason(error: httpx.HTTPError) -> str:
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"{text}; --ca-file names certificates to trust"
    return text
