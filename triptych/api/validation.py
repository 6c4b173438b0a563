"""Parsing and validation of request bodies; errors name the first invalid field."""

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from triptych.api.field_rules import CONFLICT, UNKNOWN, UNSUPPORTED
from triptych.api.fields import ARRAY, UNION_MEMBERS, StrictModel
from triptych.errors import InvalidRequest, MissingField, UnknownField, UnsupportedField, UnsupportedValue

_TYPED = (("content", ARRAY), ("output", ARRAY), ("input", ARRAY))
"""Lists of objects that have types, such as content parts. Pydantic adds the type to the paths of its errors."""
_TAGGED = ("response_format", "format")
MAX_NAMED = 8
"""Fields that one message names."""
KEY = "[key]"
"""What pydantic appends to the keys of objects in the paths of its errors."""

S = TypeVar("S", bound=StrictModel)


def parse_request(kind: type[S], body: bytes) -> S:
    """Return the body as a validated request of that type. Raises InvalidRequest."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)) from None
    request.check()
    return request


def _invalid(details: Sequence[Any]) -> InvalidRequest:
    """The first error. Its message names also the other fields with the same error."""
    detail = details[0]
    param = _field(detail)
    same = [_field(one) for one in details if (one["type"], one["msg"]) == (detail["type"], detail["msg"])]
    named = ", ".join(dict.fromkeys(field for field in same[:MAX_NAMED] if field))
    kind = _KINDS.get(detail["type"], InvalidRequest)
    if detail["type"].startswith("union_tag_"):
        param = f"{param}.type"
    match detail["type"]:
        case "json_invalid":
            # without the place, which media that were taken out move
            message = f"the body is not valid JSON: {detail['ctx']['error'].partition(' at line ')[0]}"
        case "extra_forbidden":
            message = f"{named}: unknown or unsupported field"
        case "union_tag_invalid":
            tag, known = detail["ctx"]["tag"], detail["ctx"]["expected_tags"]
            message = f"{param}: {tag!r} is not supported; use one of {known}"
        case "union_tag_not_found":
            message = f"{param}: Field required"
        case _:
            message = f"{named}: {detail['msg']}" if named else detail["msg"]
    return kind(message, param)


_KINDS: dict[str, type[InvalidRequest]] = {
    "extra_forbidden": UnknownField,
    UNKNOWN: UnknownField,
    UNSUPPORTED: UnsupportedField,
    "missing": MissingField,
    "union_tag_not_found": MissingField,
    "union_tag_invalid": UnsupportedValue,
    "literal_error": UnsupportedValue,
}
"""By pydantic's type of error."""


def _field(detail: Any) -> str | None:
    ruled = detail["type"] in (UNKNOWN, UNSUPPORTED, CONFLICT)
    return _path((*detail["loc"], detail["ctx"]["field"]) if ruled else detail["loc"]) or None


def _path(location: tuple[int | str, ...]) -> str:
    """Return the field's path, such as ``messages[0].content[1].text``.

    Drops what pydantic adds to it: UNION_MEMBERS, KEY and, after the index of an object in _TYPED or the name of
    one in _TAGGED, its type."""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in (*UNION_MEMBERS, KEY) or (index and location[index - 1] in _TAGGED):
            continue
        elif location[max(0, index - 3) : max(0, index - 1)] not in _TYPED:
            path += f".{step}" if path else step
    return path
