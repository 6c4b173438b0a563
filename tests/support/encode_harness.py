"""An encode loop with frontends and consumers at the test's hands. Its tower and its decoder are a few lines long."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tests.support.plans import plan_of
from triptych.clock import SystemClock
from triptych.compute_thread import ComputeThread
from triptych.encode.loop import EncodeLoop
from triptych.encode.preprocessing import PreprocessorPool
from triptych.encode.runner import EncoderRunner
from triptych.encode.store import EmbeddingStore, MemoryStore, row_name
from triptych.errors import DecodeFailed
from triptych.executor import started_executor
from triptych.layers.encoder import PreprocessedPart
from triptych.messages.codec import Message
from triptych.messages.rows import RowLayout
from triptych.messages.work import Encode, Encoded, FetchMedia, MediaBytes
from triptych.models.base import EncoderInput, Parts, chosen
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.sender import Sender
from triptych.types import Address, ItemPlan, TransferId

Kind = TypeVar("Kind")

HERE, A, B, CONSUMER = Address("here"), Address("a"), Address("b"), Address("consumer")
LAYOUT = RowLayout("model", "float32", 4, 16)
PLAN = plan_of()


class Preprocessors:
    """Parts that have the sum of the file and their number. Waits while ``opened`` isn't set; a file of zeros can't be
    decoded."""

    number = 1
    pids: list[int] = []  # noqa: RUF012 - it has no processes

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.seen: list[bytes] = []
        self.made: list[int] = []
        """Numbers of the parts."""

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        self.seen.append(data)
        assert self.opened.wait(20)
        if not any(data):
            raise DecodeFailed("all zeros")
        for number in chosen(plan, parts):
            self.made.append(number)
            rows = plan.rows_of(number)
            value = sum(data) + number
            yield EncoderInput(np.full((rows, 4), value, np.float32), (1, 1, rows), f"{rows} of {value}")

    def close(self) -> None:
        self.opened.set()


SPOILT = 1000.0
"""The encoder fails on a batch with an item of this sum or more."""


class Tower:
    """An encoder whose rows are its inputs' patches."""

    embedding_width = 4

    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        if any(part.patches.max() >= SPOILT for part in inputs):
            raise RuntimeError("it can't be encoded")
        return [torch.from_numpy(part.patches) for part in inputs]


class EncodeHarness:
    """The loop, and what it has sent."""

    def __init__(
        self,
        store: EmbeddingStore | None = None,
        *,
        address: Address = HERE,
        fabric: LocalFabric | None = None,
        preprocessors: PreprocessorPool | None = None,
    ) -> None:
        self.store = store or MemoryStore(2**20)
        self.sent: list[tuple[Address, Message]] = []
        self.fabric = fabric or LocalFabric()
        self.sender = Sender({self.fabric.name: self.fabric}, address, self._send, clock=SystemClock())
        self.preprocessors = Preprocessors()
        self.compute = ComputeThread(started_executor(1, "compute"), SystemClock(), lambda: None)
        self.loop = EncodeLoop(
            preprocessors=preprocessors or self.preprocessors,
            runner=EncoderRunner(Tower(), torch.float32, self.compute),
            max_patches=64,
            store=self.store,
            sender=self.sender,
            layout=LAYOUT,
            wake=lambda: None,
            address=address,
            send=self._send,
            clock=SystemClock(),
            start_executor=started_executor,
        )

    def close(self) -> None:
        self.loop.close()
        self.compute.close()

    def _send(self, to: Address, message: Message) -> None:
        self.sent.append((to, message))

    def handle(self, *messages: Message) -> None:
        for message in messages:
            self.loop.handlers[type(message)](message)
        self.loop.advance()

    def encode(
        self,
        transfer: str,
        reply_to: Address = A,
        *,
        size: int = 3,
        key: str = "key",
        plan: ItemPlan = PLAN,
        parts: Parts = None,
        **fields: Any,
    ) -> None:
        wanted = list(chosen(plan, parts))
        self.handle(Encode(TransferId(transfer), CONSUMER, reply_to, key, plan, size, wanted, **fields))

    def of(self, kind: type[Kind]) -> list[tuple[Address, Kind]]:
        """The messages of a type that were sent since the last call, with their receivers."""
        found: list[tuple[Address, Kind]] = [(to, message) for to, message in self.sent if isinstance(message, kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found

    def answer(self, data: bytes = b"png") -> list[tuple[Address, TransferId]]:
        """Answer what the loop asks for. Returns the frontends asked, and the transfers named."""
        asked = self.of(FetchMedia)
        for _, wanted in asked:
            piece = data[wanted.offset : wanted.offset + wanted.length]
            self.handle(MediaBytes(wanted.transfer, wanted.offset, piece))
        return [(to, wanted.transfer) for to, wanted in asked]

    def encoded(self) -> list[tuple[Address, TransferId, bool]]:
        """Advance until nothing is to be done. Returns the frontends, transfers and ``cached`` of what is encoded."""
        self.until(lambda: self.loop.idle)
        return [(to, message.transfer, message.cached) for to, message in self.of(Encoded)]

    def settle(self) -> None:
        """Advance until nothing is to be done, or a file is to be fetched."""
        self.until(lambda: self.loop.idle or len(self.loop.fetcher))

    def wait(self) -> None:
        """Wait until threads have done what they were given; the loop hasn't looked at it."""
        self.loop.preprocessing.wait()
        self.compute.submit(lambda: None).result()

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.sent
            self.loop.advance()
            time.sleep(0.0005)


def stored_name(text: str) -> str:
    """The name of rows whose content has that digest."""
    return row_name("layout", text, "")
