"""The OpenAPI document: request schemas from the pydantic models, response schemas from ``objects.py``.

Endpoints name their schemas, which are made with the document: FastAPI would make them for each endpoint at each start,
which takes most of a frontend's."""

from functools import cache
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from triptych.api import objects

Responses = dict[int | str, dict[str, Any]]

REF = "#/components/schemas/{model}"
_REQUESTS: list[type[BaseModel]] = []
_ANSWERS: list[Any] = []


def _content(kind: Any) -> dict[str, Any]:
    """Return the ``content`` of a response, whose schema goes into the document."""
    if kind not in _ANSWERS:
        _ANSWERS.append(kind)
    return {"application/json": {"schema": {"$ref": REF.format(model=kind.__name__)}}}


ERRORS: Responses = {
    status: {"description": description, "content": _content(objects.Error)}
    for status, description in {
        400: "The request is invalid; `param` names the field",
        403: "The client may not use this",
        404: "Unknown model",
        413: "The body, an image file or an image's dimensions exceed the limit",
        422: "Media could not be fetched, or the grammar is too costly",
        429: "Too many requests of this key",
        500: "A bug",
        503: "Full, shutting down, or an instance is missing; see Retry-After",
        504: "Not done in time",
    }.items()
}


def request_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return the ``openapi_extra`` of an endpoint whose body is one of these."""
    _REQUESTS.extend(kind for kind in kinds if kind not in _REQUESTS)
    refs = [{"$ref": REF.format(model=kind.__name__)} for kind in kinds]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def json_response(kind: Any) -> dict[str, Any]:
    """Return one of an endpoint's ``responses``, which is JSON."""
    return {"content": _content(kind)}


def json_responses(kind: Any) -> Responses:
    """Return the ``responses`` of an endpoint that answers with JSON."""
    return {200: json_response(kind), **ERRORS}


def stream_responses(kind: Any, chunk: Any) -> Responses:
    """Return the ``responses`` of an endpoint that may stream its answer.

    OpenAPI 3.1 can't describe events, so the schema of their data is given as an extension."""
    content = _content(kind) | {"text/event-stream": {"x-event-schema": _event_schema(chunk)}}
    return {200: {"content": content}, **ERRORS}


def file_responses(kind: Any, media_type: str) -> Responses:
    """Return the ``responses`` of an endpoint that answers with a file or with JSON, as the request says."""
    content = _content(kind) | {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"content": content}, **ERRORS}


@cache
def _event_schema(chunk: Any) -> dict[str, Any]:
    return TypeAdapter(chunk).json_schema()


def add_openapi(app: FastAPI) -> None:
    """Serve the document, which is built on the first request for it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema([(kind, "validation") for kind in _REQUESTS], ref_template=REF)
            mode: Literal["serialization"] = "serialization"
            answers = [(kind.__name__, mode, TypeAdapter(kind)) for kind in _ANSWERS]
            _, others = TypeAdapter.json_schemas(answers, ref_template=REF)
            schemas = definitions["$defs"] | others["$defs"]
            made["components"] = {"schemas": dict(sorted(schemas.items()))}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
