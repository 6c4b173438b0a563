"""What a vLLM server says of its model before it gets requests."""

from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

T = TypeVar("T")


class Refused(Exception):
    """A server isn't one that this service can use; the message says why."""


@dataclass(frozen=True)
class Card:
    """What a server says of itself."""

    model: str = ""
    """The name of its model."""
    root: str = ""
    """The model's folder or name as the server was given it."""
    models: frozenset[str] = frozenset()
    """All names that it answers to, those of LoRAs included."""


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _TokenizedText(msgspec.Struct):
    tokens: list[int]


def read_card(response: httpx.Response) -> Card:
    """Return what ``/v1/models`` says. Raises Refused."""
    found = _read(response, _Models, "/v1/models").data
    base = next((one for one in found if not one.parent), None)
    if base is None:
        raise Refused("it names no model")
    return Card(base.id, base.root or "", frozenset(one.id for one in found))


def read_tokens(response: httpx.Response) -> list[int]:
    """Return what ``/tokenize`` says. Raises Refused."""
    return _read(response, _TokenizedText, "/tokenize").tokens


def _read(response: httpx.Response, kind: type[T], path: str) -> T:
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise Refused("it asks for another key: --engine-key-file names a file with it")
    if response.status_code != httpx.codes.OK:
        raise Refused(f"{path} answers {response.status_code}")
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError:
        raise Refused(f"{path} doesn't answer as vLLM does") from None
