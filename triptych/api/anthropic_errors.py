"""Errors in the form of Anthropic's API, for ``/v1/messages``."""

from http import HTTPStatus
from typing import Any

from triptych.api import errors
from triptych.errors import Overloaded, PromptTooLong, RateLimited, TriptychError

PATH = "/v1/messages"
OVERLOADED = 529
"""Anthropic's status for a service that has too much to do; clients try again."""
KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Types of errors by status; others are ``invalid_request_error`` below 500, and ``api_error`` from there on."""


def is_for(path: str) -> bool:
    """Return whether errors of an endpoint have this form."""
    return path == PATH or path.startswith(f"{PATH}/")


def status_of(error: TriptychError) -> int:
    if isinstance(error, Overloaded) and not isinstance(error, RateLimited):
        return OVERLOADED
    return errors.status_of(error)


def body_of(error: TriptychError) -> dict[str, Any]:
    """Return ``{"type": "error", "error": {type, message}}``. Clients recognise the words at the context's end."""
    details = errors.body_of(error)["error"]
    message, param = details["message"], details["param"]
    if param and param not in message:
        message = f"{param}: {message}"
    if isinstance(error, PromptTooLong) and error.sizes is not None:
        longest, prompt, new = error.sizes
        if prompt >= longest:
            message = f"prompt is too long: {prompt} tokens > {longest} maximum"
        else:
            message = (
                f"input length and `max_tokens` exceed context limit: {prompt} + {new} > {longest}, "
                "decrease input length or `max_tokens` and try again"
            )
    return error_body(message, status_of(error))


def error_body(message: str, status: int) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
