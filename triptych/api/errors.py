"""HTTP status, body and headers of each exception. Bodies have OpenAI's format."""

from http import HTTPStatus
from typing import Any

from triptych.errors import (
    BodyTooSlow,
    DeadlineExceeded,
    Forbidden,
    GrammarTooCostly,
    InstanceLost,
    MediaNotAllowed,
    MediaNotFetched,
    MediaTooLarge,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    RequestError,
    ServiceError,
    TriptychError,
    Unavailable,
    UnknownModel,
    UnknownResponse,
    UnsupportedEncoding,
)

STATUSES: list[tuple[type[TriptychError], HTTPStatus]] = [
    (Forbidden, HTTPStatus.FORBIDDEN),
    (UnknownModel, HTTPStatus.NOT_FOUND),
    (UnknownResponse, HTTPStatus.NOT_FOUND),
    (PayloadTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (UnsupportedEncoding, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    (BodyTooSlow, HTTPStatus.REQUEST_TIMEOUT),
    (MediaTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (MediaNotAllowed, HTTPStatus.BAD_REQUEST),
    (MediaNotFetched, HTTPStatus.UNPROCESSABLE_ENTITY),
    (GrammarTooCostly, HTTPStatus.UNPROCESSABLE_ENTITY),
    (RequestError, HTTPStatus.BAD_REQUEST),
    (RateLimited, HTTPStatus.TOO_MANY_REQUESTS),
    (Overloaded, HTTPStatus.SERVICE_UNAVAILABLE),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (InstanceLost, HTTPStatus.SERVICE_UNAVAILABLE),
    (DeadlineExceeded, HTTPStatus.GATEWAY_TIMEOUT),
    (TriptychError, HTTPStatus.INTERNAL_SERVER_ERROR),
]
"""The first entry whose class matches gives the status."""
MAX_MESSAGE = 2000
MAX_PARAM = 200


def status_of(error: TriptychError) -> HTTPStatus:
    return next(status for kind, status in STATUSES if isinstance(error, kind))


def body_of(error: TriptychError) -> dict[str, Any]:
    """Return ``{"error": {message, type, param, code}}``.

    Internal errors may name addresses and files, so clients only see "internal error"."""
    if not isinstance(error, RequestError | ServiceError):
        return error_body("internal error", "server_error", "internal_error")
    return error_body(
        message=str(error),
        kind="invalid_request_error" if isinstance(error, RequestError) else "server_error",
        code=error.code,
        param=error.param if isinstance(error, RequestError) else None,
    )


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """Return an error body. Long messages and paths, which may quote the request, are truncated."""
    param = param and param[:MAX_PARAM]
    return {"error": {"message": message[:MAX_MESSAGE], "type": kind, "param": param, "code": code}}


def headers_of(error: TriptychError) -> dict[str, str]:
    """Return ``Retry-After`` (seconds) for errors after which a retry makes sense, and ``Accept-Encoding`` for a body
    in an encoding that isn't accepted."""
    if isinstance(error, UnsupportedEncoding):
        return {"Accept-Encoding": "identity"}
    if isinstance(error, Overloaded):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, Unavailable | InstanceLost):
        return {"Retry-After": "1"}
    return {}
