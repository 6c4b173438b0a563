"""``/v1/encode``: the embeddings of a conversation's media, as the model's decoder takes them."""

import base64
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from triptych.api.context import ApiContext
from triptych.api.conversation import plan_conversation
from triptych.api.fields import MAX_PRIORITY, MAX_TIMEOUT, Name
from triptych.api.generation import RequestContext, check_model
from triptych.api.media_parts import media_parts
from triptych.api.plan import media_item
from triptych.api.schemas import ConversationFields, ImageRowsPart
from triptych.errors import InvalidRequest
from triptych.messages.rows import RowLayout
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.request_state import RowAnswer
from triptych.transfer.memory import Bytes

Format = Literal["safetensors", "npy"]
MEDIA_TYPES: dict[Format, str] = {"safetensors": "application/octet-stream", "npy": "application/json"}
PIECE_BYTES = 2**19
"""Bytes of rows that are sent at a time. More would hold the event loop."""
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Safetensors' names of the dtypes of rows."""
_ALIGNMENT = 8
"""What the header's length in a safetensors file is a multiple of, so that tensors are aligned."""


class MediaFields(ConversationFields):
    """A conversation, of which only the media are used."""

    cache_salt: Name | None = None
    """Requests only share cached embeddings with requests of the same salt."""
    priority: int | None = Field(None, ge=0, le=MAX_PRIORITY)
    """Lower values are scheduled first."""
    timeout: float | None = Field(None, gt=0.0, le=MAX_TIMEOUT)
    """Deadline in seconds from the request's arrival. The service's own limit still applies."""


class EncodeRequest(MediaFields):
    """The body of ``POST /v1/encode``."""

    encoding_format: Format = "safetensors"
    """``safetensors``: one file, whose tensors are named by the items' numbers, and whose metadata have the answer's
    other fields as JSON under ``answer``. ``npy``: JSON, each item with its rows as a NumPy file in base64; bfloat16,
    which NumPy lacks, becomes float32."""


@dataclass(frozen=True)
class EncodedMedia:
    """The items of a request, and their rows."""

    head: dict[str, Any]
    """The answer's fields beside its items."""
    items: list[tuple[PlannedItem, Bytes]]
    """In the request's order, each with its rows, uint8 of shape (rows, row_bytes)."""
    layout: RowLayout


async def encode(api: ApiContext, request: MediaFields, context: RequestContext) -> EncodedMedia:
    """Have the media of a request encoded. Cancels that if it is cancelled. Raises RequestError and ServiceError."""
    check_model(api, request.model)
    if not (parts := media_parts(request.messages)):
        raise InvalidRequest("the messages have no media to encode", "messages")
    if any(isinstance(part, ImageRowsPart) for part in parts.values()):
        raise InvalidRequest("the messages have embeddings already", "messages")
    context = context.with_timeout(request.timeout)
    priority = request.priority or 0
    with api.lifecycle.preparing(
        context.record, has_media=True, priority=priority, timeout=context.remaining, generates=False
    ):
        prompt, _ = await plan_conversation(api, request, context)
    return await collect_rows(api, prompt, context, cache_salt=request.cache_salt or "", priority=priority)


async def collect_rows(
    api: ApiContext, prompt: PlannedPrompt, context: RequestContext, *, cache_salt: str, priority: int
) -> EncodedMedia:
    """Have a prompt's items encoded, whose rows then belong to the request. Cancels that if it is cancelled. Raises
    RequestError and ServiceError."""
    layout = api.lifecycle.row_layout()
    context.hold(sum(item.plan.rows for item in prompt.items) * layout.row_bytes)
    stream, answer = api.lifecycle.collect(
        context.record, prompt, layout, cache_salt, timeout=context.remaining, priority=priority
    )
    try:
        async for _ in stream:
            pass
    finally:
        api.lifecycle.cancel(stream.request)
    return EncodedMedia(_head(api, layout), _in_order(prompt.items, answer), layout)


def _in_order(items: tuple[PlannedItem, ...], answer: RowAnswer) -> list[tuple[PlannedItem, Bytes]]:
    placed = [(item, answer.rows[index]) for index, item in enumerate(items)]
    return sorted(placed, key=lambda one: one[0].number)


def _head(api: ApiContext, layout: RowLayout) -> dict[str, Any]:
    return {
        "object": "list",
        "model": api.model_name,
        "model_type": api.prompt_builder.model_type,
        "dtype": layout.dtype,
        "width": layout.width,
        "weight_dtype": layout.weight_dtype,
        "layout": layout.digest,
    }


async def body(encoded: EncodedMedia, encoding_format: Format) -> AsyncGenerator[bytes, None]:
    """Yield the answer's body in pieces, so that no second copy of the rows is made."""
    for piece in _safetensors(encoded) if encoding_format == "safetensors" else _json(encoded):
        yield piece


def _safetensors(encoded: EncodedMedia) -> Iterator[bytes]:
    """Yield a safetensors file (``checkpoint/safetensors_header.py`` has the format)."""
    layout, entries = encoded.layout, _entries(encoded)
    answer = json.dumps(encoded.head | {"data": entries}, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {"answer": answer}}
    begin = 0
    for number, (_, rows) in enumerate(encoded.items):
        offsets = [begin, begin + rows.nbytes]
        header[str(number)] = {
            "dtype": _STORED[layout.dtype],
            "shape": entries[number]["shape"],
            "data_offsets": offsets,
        }
        begin = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for _, rows in encoded.items:
        for piece in _pieces(rows):
            yield piece.tobytes()


def _json(encoded: EncodedMedia) -> Iterator[bytes]:
    """Yield a JSON object (``objects.EmbeddingList``)."""
    yield msgspec.json.encode(encoded.head)[:-1] + b',"data":['
    for number, (entry, (_, rows)) in enumerate(zip(_entries(encoded), encoded.items, strict=True)):
        yield (b"," if number else b"") + msgspec.json.encode(entry)[:-1] + b',"rows":"'
        yield from npy_text(rows, encoded.layout)
        yield b'"}'
    yield b"]}"


def _entries(encoded: EncodedMedia) -> list[dict[str, Any]]:
    width = encoded.layout.width
    return [media_item("embedding", item) | {"shape": [item.plan.rows, width]} for item, _ in encoded.items]


def npy_text(rows: Bytes, layout: RowLayout) -> Iterator[bytes]:
    """Yield a NumPy file of rows in base64, in pieces."""
    yield from _base64(_npy(rows, layout))


def file_text(data: bytes) -> Iterator[bytes]:
    """Yield a file as a ``data:`` URL, in pieces."""
    yield b"data:application/octet-stream;base64,"
    yield from _base64(data[first : first + PIECE_BYTES] for first in range(0, len(data), PIECE_BYTES))


def _npy(rows: Bytes, layout: RowLayout) -> Iterator[bytes]:
    """Yield a NumPy file of rows."""
    dtype = np.dtype("<f2" if layout.dtype == "float16" else "<f4")
    shape = (len(rows), layout.width)
    head = BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    yield head.getvalue()
    for piece in _pieces(rows):
        yield (widened(piece.view(np.uint16)) if layout.dtype == "bfloat16" else piece).tobytes()


def widened(values: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bfloat16 values, given as their bits, as float32: exactly, since that has eight more bits of each."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def _pieces(rows: Bytes) -> Iterator[Bytes]:
    """Yield whole rows, about ``PIECE_BYTES`` at a time."""
    step = max(1, PIECE_BYTES // rows.shape[1])
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _base64(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the base64 text of the pieces' concatenation."""
    rest = b""
    for piece in pieces:
        joined = rest + piece
        whole = len(joined) - len(joined) % 3
        yield base64.b64encode(joined[:whole])
        rest = joined[whole:]
    yield base64.b64encode(rest)
