"""A client of ``/v1/encode``: gets the embeddings of media, and makes content parts of them for other engines.

::

    with EncodeClient("http://127.0.0.1:8000", key) as client:
        (item,) = client.encode(Path("cat.png"))
    part = vllm_part(item)  # for a vLLM that was started with --enable-mm-embeds

Needs httpx and numpy alone.
"""

import base64
import json
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from triptych.models.vllm_grids import image_part

Media = str | Path | dict[str, Any]
"""A URL (``https:``, ``data:``, ``file:``), a file of this machine, or a content part as in chats."""

_LENGTH_BYTES = 8
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class EncodeError(Exception):
    """The service has refused a request, or its answer is damaged.

    ``status`` is the HTTP status, ``code`` and ``param`` are the service's; all are empty for a damaged answer."""

    def __init__(self, message: str, status: int = 0, code: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class EncodedItem:
    """The embedding of one media item."""

    type: str
    """``image``, ``video`` or ``audio``."""
    key: str
    """Names the item's content, plan and model: items of equal keys have equal rows."""
    rows: NDArray[Any]
    """One row for each of the prompt's tokens, of float32 or float16; bfloat16 comes as float32. After the embedding's
    values a row has those of each deepstack level."""
    grid_thw: tuple[int, int, int]
    """Patches in time, rows and columns."""
    model_type: str
    """The model's, as in config.json."""
    info: dict[str, Any]
    """All that the service says of the item."""


class EncodeClient:
    """A connection to a service. A context manager."""

    def __init__(self, url: str, key: str = "", *, timeout: float | None = None, verify: Any = True) -> None:
        """``url`` is the service's, with or without ``/v1``. ``key`` needs the right ``encode``. ``timeout`` is in
        seconds; None leaves it to the service's deadlines. ``verify`` is httpx's."""
        self._http = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=10.0),
            verify=verify,
        )

    def encode(self, *media: Media, **fields: Any) -> list[EncodedItem]:
        """Return the embeddings of media, in their order. ``fields`` are further ones of the request, such as
        ``mm_processor_kwargs``. Some models' rows depend on the other media of a request: send those of a prompt
        together. Raises EncodeError, OSError for a file that can't be read, and httpx's errors."""
        return self.encode_messages([{"role": "user", "content": [content_part(one) for one in media]}], **fields)

    def encode_messages(self, messages: Sequence[dict[str, Any]], **fields: Any) -> list[EncodedItem]:
        """Return the embeddings of the media of a conversation as chats have it, as ``encode``."""
        body = {"messages": list(messages), "encoding_format": "safetensors", **fields}
        response = self._http.post("/v1/encode", json=body)
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return read_answer(response.content)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "EncodeClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def content_part(media: Media) -> dict[str, Any]:
    """Return a medium as a content part. The kind of a file or a URL follows from its name; it is an image if that says
    nothing else."""
    if isinstance(media, dict):
        return media
    name = str(media)
    mime = (
        name[len("data:") :].split(";", maxsplit=1)[0]
        if name.startswith("data:")
        else mimetypes.guess_type(name)[0] or ""
    )
    kind = next((one for one in ("video", "audio") if mime.startswith(one)), "image")
    if isinstance(media, Path):
        data = base64.b64encode(media.read_bytes()).decode()
        name = f"data:{mime or 'application/octet-stream'};base64,{data}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": name}}


def read_answer(data: bytes) -> list[EncodedItem]:
    """Return the items of a safetensors answer. Raises EncodeError for bytes that are none."""
    try:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        begin = _LENGTH_BYTES + length
        header = json.loads(data[_LENGTH_BYTES:begin])
        answer = json.loads(header["__metadata__"]["answer"])
        return [_item(answer, entry, header[str(number)], data, begin) for number, entry in enumerate(answer["data"])]
    except (KeyError, TypeError, ValueError) as error:
        raise EncodeError(f"the answer is damaged: {error!r}") from error


def _item(
    answer: dict[str, Any], entry: dict[str, Any], tensor: dict[str, Any], data: bytes, begin: int
) -> EncodedItem:
    first, end = tensor["data_offsets"]
    rows = np.frombuffer(data[begin + first : begin + end], dtype=_DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    if tensor["dtype"] == "BF16":
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    frames, height, width = entry["grid_thw"]
    return EncodedItem(entry["type"], entry["key"], rows, (frames, height, width), answer["model_type"], entry)


def vllm_part(item: EncodedItem) -> dict[str, Any]:
    """Return an item as a content part for a vLLM that serves the same model with ``--enable-mm-embeds``.

    Only images: vLLM's fields for videos differ between families. With ``--language-model-only`` vLLM drops the
    deepstack levels of Qwen3-VL, and answers wrongly or ends: keep its tower for that. Raises ValueError for others."""
    if item.type != "image":
        raise ValueError(f"no part for a {item.type}: only images can be given to vLLM")
    return image_part(base64.b64encode(npy(item.rows)).decode(), item.grid_thw, item.key, item.model_type)


def npy(rows: NDArray[Any]) -> bytes:
    """Return an array as a NumPy file."""
    file = BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(rows), allow_pickle=False)
    return file.getvalue()


def _refusal(response: httpx.Response) -> EncodeError:
    try:
        error = response.json()["error"]
        return EncodeError(error["message"], response.status_code, error["code"], error["param"])
    except (KeyError, TypeError, ValueError):
        return EncodeError(f"HTTP status {response.status_code}: {response.text[:200]}", response.status_code)
