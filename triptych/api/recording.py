"""Records what is asked as a trace (``triptych/workload/trace.py``): when, how much and of whom, but no content.

Clients, files and texts have names and numbers by a key of this process, so that they can't be guessed.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from blake3 import blake3

from triptych.observe.line_file import LineFile
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.types import AudioHeader
from triptych.workload.trace import BLOCK_TOKENS, TraceMedia, TraceRequest, head_line, trace_line

MAX_BLOCKS = 2**17
"""Blocks of texts whose numbers are remembered, the latest used ones."""
NAME_BYTES = 8


class TraceRecorder:
    """Writes a line for each answer once its request has ended. An observer of requests."""

    def __init__(self, path: str) -> None:
        """Appends to the file. Raises StartError for one that can't be written."""
        self._file = LineFile(path, "--record")
        self._key = secrets.token_bytes(32)
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._num_blocks = secrets.randbits(48)  # other frontends and later processes have other numbers
        self._asked: dict[RequestRecord, list[tuple[PlannedPrompt, TraceRequest]]] = {}
        if self._file.is_empty:
            self._file.write(head_line())

    def asked(self, record: RequestRecord, prompt: PlannedPrompt) -> None:
        """Note the prompt of an answer that is about to be generated."""
        known = self._asked.setdefault(record, [])
        if known and known[-1][0] is prompt:  # another answer to it
            known.append(known[-1])
        else:
            known.append((prompt, self._request(record, prompt)))

    def __call__(self, record: RequestRecord) -> None:
        for (_, request), choice in zip(self._asked.pop(record, ()), record.generations, strict=False):
            if choice.num_tokens:
                self._file.write(trace_line(request, answer=choice.num_tokens))

    def close(self) -> None:
        self._file.close()

    def _request(self, record: RequestRecord, prompt: PlannedPrompt) -> TraceRequest:
        items = [item for item in prompt.items if not isinstance(item.plan.header, AudioHeader)]
        rows = {token for item in items for span in item.placement.spans for token in range(span.start, span.end)}
        text = [token for place, token in enumerate(prompt.tokens) if place not in rows] if rows else prompt.tokens
        lead = min((span.start for item in items for span in item.placement.spans), default=0)
        return TraceRequest(
            at=record.began,
            text=len(text),
            answer=1,
            media=tuple(map(self._media, items)),
            lead=lead,
            blocks=tuple(self._blocks(text)),
            client=self._name(record.client.encode()),
        )

    def _media(self, item: PlannedItem) -> TraceMedia:
        header, plan = item.plan.header, item.plan
        assert not isinstance(header, AudioHeader), "its rows count as text"
        return TraceMedia(
            name=self._name(item.key.encode()),
            width=header.width,
            height=header.height,
            frames=plan.num_parts if plan.modality == "video" else 1,
            bytes=len(item.data),
            format=header.format.lower()[:16],
        )

    def _blocks(self, text: list[int]) -> Iterator[int]:
        """Yield the numbers of a text's whole blocks. Each depends on all that comes before."""
        digest = b""
        for end in range(BLOCK_TOKENS, len(text) + 1, BLOCK_TOKENS):
            block = array("q", text[end - BLOCK_TOKENS : end]).tobytes()
            digest = blake3(digest + block, key=self._key).digest(16)
            number = self._numbers.pop(digest, None)
            if number is None:
                self._num_blocks += 1
                number = self._num_blocks
            self._numbers[digest] = number
            yield number
        while len(self._numbers) > MAX_BLOCKS:
            self._numbers.popitem(last=False)

    def _name(self, content: bytes) -> str:
        return blake3(content, key=self._key).hexdigest(NAME_BYTES)
