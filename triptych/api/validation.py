"""Parsing and validation of request bodies; errors name the first invalid field."""

from typing import Any, TypeVar

from pydantic import ValidationError

from triptych.api.fields import ARRAY, UNION_MEMBERS, StrictModel
from triptych.errors import InvalidRequest, MissingField, UnknownField, UnsupportedValue

_TYPED = (("content", ARRAY), ("output", ARRAY), ("input", ARRAY))
"""Lists of objects that have types, such as content parts. Pydantic adds the type to the paths of its errors."""
KEY = "[key]"
"""What pydantic appends to the keys of objects in the paths of its errors."""

S = TypeVar("S", bound=StrictModel)


def parse_request(kind: type[S], body: bytes) -> S:
    """Return the body as a validated request of that type. Raises InvalidRequest."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)[0]) from None
    request.check()
    return request


def _invalid(detail: Any) -> InvalidRequest:
    param = _path(detail["loc"]) or None
    match detail["type"]:
        case "json_invalid":
            return InvalidRequest("the body is not valid JSON")
        case "extra_forbidden":
            return UnknownField(f"unknown or unsupported field: {param or repr('')}", param)
        case "union_tag_invalid":
            tag, known = detail["ctx"]["tag"], detail["ctx"]["expected_tags"]
            return UnsupportedValue(f"{param}.type: {tag!r} is not supported; use one of {known}", f"{param}.type")
        case "union_tag_not_found":
            return MissingField(f"{param}.type: Field required", f"{param}.type")
        case "missing":
            return MissingField(f"{param}: Field required", param)
        case "literal_error":
            return UnsupportedValue(f"{param}: {detail['msg']}", param)
    return InvalidRequest(f"{param}: {detail['msg']}" if param else detail["msg"], param)


def _path(location: tuple[int | str, ...]) -> str:
    """Return the field's path, such as ``messages[0].content[1].text``.

    Drops what pydantic adds to it: UNION_MEMBERS, KEY and, after the index of an object in _TYPED, its type."""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in (*UNION_MEMBERS, KEY) and location[max(0, index - 3) : max(0, index - 1)] not in _TYPED:
            path += f".{step}" if path else step
    return path
