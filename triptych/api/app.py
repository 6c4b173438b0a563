"""The HTTP endpoints. Thin: parse, call, answer; every error goes through one table."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from triptych import __version__
from triptych.api import chat
from triptych.api.errors import body_of, error_body, headers_of, status_of
from triptych.api.observed import Observed
from triptych.api.readiness import Readiness
from triptych.api.schemas import parse_chat_request
from triptych.api.service import Service
from triptych.api.sse import EventStream, disconnected
from triptych.errors import PayloadTooLarge, TriptychError
from triptych.observe.requests import CURRENT

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMELINE_HEADER = "x-triptych-timeline"
"""A request with this header set to ``true`` is told where its time went: ``timeline`` in the (last) answer."""
CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Triptych", version=__version__)
    app.state.service = service
    app.add_middleware(Observed, observers=(service.router.metrics.answered, *service.observers))
    started = int(time.time())
    readiness = Readiness(service.router, service.prompt_builder, sorted(service.tokenizer.eos_token_ids))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        parsed = parse_chat_request(await _body(request, service.front_door.max_body_mb * 2**20))
        completion = await _until_disconnect(request, chat.prepare(service, parsed))
        timeline = request.headers.get(TIMELINE_HEADER, "").lower() == "true"
        if not parsed.stream:
            return JSONResponse(await _until_disconnect(request, chat.whole(completion, timeline)))
        include_usage = parsed.stream_options is not None and parsed.stream_options.include_usage
        events = chat.chunks(completion, include_usage, timeline)
        return EventStream(_resumed(await _until_disconnect(request, _first(events)), events))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "triptych",
            "max_model_len": service.context_length,
            "input_modalities": ["text", "image"] if service.router.takes_media else ["text"],
        }
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process lives: nothing about the instances."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """A token came out of all stages within the last seconds, and new requests are admitted."""
        reason = await readiness.reason_against()
        return JSONResponse({"ready": False, "reason": reason}, 503) if reason else JSONResponse({"ready": True})

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus: of the front door, and of all instances."""
        return Response(generate_latest(service.router.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(TriptychError, _on_error)
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=CLIENT_CLOSED_REQUEST))
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _body(request: Request, max_bytes: int) -> bytes:
    """The request's body. Raises PayloadTooLarge as soon as it is known to exceed the limit."""
    too_large = PayloadTooLarge(f"the body exceeds {max_bytes} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. When the client goes away first, the work is cancelled and ClientDisconnect raised."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _resumed(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for chunk in events:
            yield chunk
    finally:
        await events.aclose()


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError)
    if (record := CURRENT.get()) is not None:
        record.error = type(error).__name__
    if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
    return JSONResponse(body_of(error), status_of(error), headers_of(error))


async def _on_http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the same shape as everything else."""
    assert isinstance(error, HTTPException)
    body = error_body(error.detail, "invalid_request_error", "not_found" if error.status_code == 404 else "bad_request")
    return JSONResponse(body, error.status_code, error.headers)


async def _on_bug(_: Request, error: Exception) -> Response:
    """What nobody expected: the log gets the details, the client doesn't."""
    log.error("unexpected error", exc_info=error)
    return JSONResponse(error_body("internal error", "server_error", "internal_error"), 500)
