"""The OpenAPI document: request schemas from the pydantic models, response schemas from ``objects.py``."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from triptych.api import objects

Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    status: {"model": objects.Error, "description": description}
    for status, description in {
        400: "The request is invalid; `param` names the field",
        404: "Unknown model",
        413: "The body, an image file or an image's dimensions exceed the limit",
        422: "Media could not be fetched, or the grammar is too costly",
        429: "Too many requests of this key",
        500: "A bug",
        503: "Full, shutting down, or an instance is missing; see Retry-After",
        504: "Not done in time",
    }.items()
}
REF = "#/components/schemas/{model}"
_REQUESTS: list[type[BaseModel]] = []


def request_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return the ``openapi_extra`` of an endpoint whose body is one of these."""
    _REQUESTS.extend(kind for kind in kinds if kind not in _REQUESTS)
    refs = [{"$ref": REF.format(model=kind.__name__)} for kind in kinds]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def json_responses(kind: Any) -> Responses:
    """Return the ``responses`` of an endpoint that answers with JSON."""
    return {200: {"model": kind}, **ERRORS}


def stream_responses(kind: Any, chunk: Any) -> Responses:
    """Return the ``responses`` of an endpoint that may stream its answer.

    OpenAPI 3.1 can't describe events, so the schema of their data is given as an extension."""
    content = {"text/event-stream": {"x-event-schema": TypeAdapter(chunk).json_schema()}}
    return {200: {"model": kind, "content": content}, **ERRORS}


def add_openapi(app: FastAPI) -> None:
    """Serve the document, which is built on the first request for it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema([(kind, "validation") for kind in _REQUESTS], ref_template=REF)
            made["components"]["schemas"] |= definitions["$defs"]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
