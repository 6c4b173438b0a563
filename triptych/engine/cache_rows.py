"""A KV cache as rows of bytes, for transfers: in host memory, or on a GPU through host memory."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.engine.kv_rows import KVRun, TokenRows
from triptych.engine.page_tables import PageTables
from triptych.layers.attention.base import KVTensors
from triptych.layers.pinned import to_device
from triptych.transfer.memory import Bytes

STAGED_BYTES = 64 * 2**20
"""What is gathered on a GPU before it is copied, at most, unless one run is longer."""


class DeviceEvent(Protocol):
    """A point in what a device has been given to do."""

    def query(self) -> bool:
        """Return whether the device has done all that comes before."""


class CacheRows(Protocol):
    """The rows of a KV cache. What is read stays as it was only while its pages are retained."""

    of_token: TokenRows
    """The rows of a token in each layer."""

    @property
    def num_layers(self) -> int:
        """Number of layers that keep keys and values."""

    def event(self) -> DeviceEvent:
        """Return an event behind what the calling thread has launched: on the compute thread, that is steps."""

    def read(self, runs: Iterable[KVRun], tables: PageTables, after: DeviceEvent) -> Iterator[tuple[int, Bytes]]:
        """Yield the rows of runs of a request with these page tables: each piece's first row in the transfer, and
        uint8 of shape (n, row_bytes). They must be computed before ``after``; the arrays hold them behind
        ``read_event``. Raises MemoryError."""

    def read_state(self, slot: int, after: DeviceEvent) -> Bytes:
        """Return the rows of the state in a slot, as ``read`` yields rows."""

    def read_event(self) -> DeviceEvent:
        """Return an event behind all reads so far."""

    def write(self, run: KVRun, tables: PageTables, rows: Bytes) -> None:
        """Write the rows of a run. ``rows`` must not change before ``finish_writes``. Raises MemoryError."""

    def write_state(self, slot: int, first_row: int, rows: Bytes) -> None:
        """Write rows of the state in a slot, from ``first_row`` on, as ``write`` does."""

    def finish_writes(self) -> None:
        """Wait for all writes: steps that are launched later find them."""


def cache_rows(cache: KVTensors, of_token: TokenRows) -> CacheRows:
    """Return a cache's rows, wherever it is."""
    return HostCacheRows(cache, of_token) if cache.device.type == "cpu" else DeviceCacheRows(cache, of_token)


class _Done:
    """An event of work that is done."""

    def query(self) -> bool:
        return True


_DONE = _Done()


class HostCacheRows:
    """``CacheRows`` in host memory. What it reads are views: nothing is copied."""

    def __init__(self, cache: KVTensors, of_token: TokenRows) -> None:
        self.of_token = of_token
        self._places = CachePlaces(cache.page_size, of_token)
        self._parts = [[_rows(part, of_token.row_bytes).numpy() for part in parts] for parts in cache.layers]
        self._records = None if cache.states is None else cache.states.records.numpy()

    @property
    def num_layers(self) -> int:
        return len(self._parts)

    def event(self) -> DeviceEvent:
        return _DONE

    def read(self, runs: Iterable[KVRun], tables: PageTables, after: DeviceEvent) -> Iterator[tuple[int, Bytes]]:
        """Yield a view per run of consecutive pages."""
        for run in runs:
            part, row = self._parts[run.layer][run.part], run.first_row
            for place, count in self._places(run, tables):
                yield row, part[place : place + count]
                row += count

    def read_state(self, slot: int, after: DeviceEvent) -> Bytes:
        return self._state(slot)

    def read_event(self) -> DeviceEvent:
        return _DONE

    def write(self, run: KVRun, tables: PageTables, rows: Bytes) -> None:
        for row, target in self.read([run], tables, _DONE):
            first = row - run.first_row
            target[:] = rows[first : first + len(target)]

    def write_state(self, slot: int, first_row: int, rows: Bytes) -> None:
        self._state(slot)[first_row : first_row + len(rows)] = rows

    def finish_writes(self) -> None:
        """Do nothing: ``write`` has written."""

    def _state(self, slot: int) -> Bytes:
        assert self._records is not None, "the model has no state"
        size = self.of_token.of_state, self.of_token.row_bytes
        return self._records[slot, : size[0] * size[1]].reshape(size)


class DeviceCacheRows:
    """``CacheRows`` on a GPU, through pinned memory, on a stream of their own: steps run meanwhile."""

    def __init__(self, cache: KVTensors, of_token: TokenRows) -> None:
        self.of_token = of_token
        self._places = CachePlaces(cache.page_size, of_token)
        self._parts = [[_wide(_rows(part, of_token.row_bytes)) for part in parts] for parts in cache.layers]
        self._records = None if cache.states is None else cache.states.records
        self._device = cache.device
        self._stream: Any = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        self._last_index: tuple[NDArray[np.int64], Tensor] | None = None

    @property
    def num_layers(self) -> int:
        return len(self._parts)

    def event(self) -> DeviceEvent:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def read(self, runs: Iterable[KVRun], tables: PageTables, after: DeviceEvent) -> Iterator[tuple[int, Bytes]]:
        """Yield an array per run. Rows are gathered on the GPU, and copied together."""
        with self._on_stream():
            self._after(after)
        for together in _divided(runs, STAGED_BYTES // self.of_token.row_bytes):
            with self._on_stream():
                rows = self._to_host(self._gathered(together, tables))
            first = 0
            for run in together:
                yield run.first_row, rows[first : first + run.num_rows]
                first += run.num_rows

    def read_state(self, slot: int, after: DeviceEvent) -> Bytes:
        with self._on_stream():
            self._after(after)
            return self._to_host(self._state(slot))

    def read_event(self) -> DeviceEvent:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def write(self, run: KVRun, tables: PageTables, rows: Bytes) -> None:
        part, places = self._parts[run.layer][run.part], self._places.whole(run, tables)
        source = torch.from_numpy(rows).view(part.dtype)
        with self._on_stream():
            if isinstance(places, slice):
                part[places].copy_(source, non_blocking=True)
            else:
                part[self._index(places)] = source.to(self._device, non_blocking=True)

    def write_state(self, slot: int, first_row: int, rows: Bytes) -> None:
        with self._on_stream():
            target = self._state(slot)[first_row : first_row + len(rows)]
            target.copy_(torch.from_numpy(rows), non_blocking=True)

    def finish_writes(self) -> None:
        self._stream.synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Launch on the stream. Raises MemoryError if the GPU has none left, or the host none that can be pinned."""
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                yield
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if "out of memory" not in str(error):
                raise
            raise MemoryError(f"no memory to copy KV: {str(error).splitlines()[0]}") from error

    def _after(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def _gathered(self, runs: Sequence[KVRun], tables: PageTables) -> Tensor:
        """Return the rows of runs, one after the other, on the GPU."""
        like = self._parts[0][0]
        rows = like.new_empty(sum(run.num_rows for run in runs), like.shape[1])
        first = 0
        for run in runs:
            part, places = self._parts[run.layer][run.part], self._places.whole(run, tables)
            target = rows[first : first + run.num_rows]
            if isinstance(places, slice):
                target.copy_(part[places])
            else:
                torch.index_select(part, 0, self._index(places), out=target)
            first += run.num_rows
        return rows

    def _index(self, places: NDArray[np.int64]) -> Tensor:
        """Return the places on the GPU. Those of a step's layers are the same, so the last ones are kept."""
        if self._last_index is None or not np.array_equal(self._last_index[0], places):
            [index] = to_device([torch.from_numpy(places)], self._device)
            self._last_index = places, index
        return self._last_index[1]

    def _to_host(self, rows: Tensor) -> Bytes:
        """Launch a copy, and return the array that will hold it. PyTorch reuses its memory when nothing holds it."""
        copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        array: Bytes = copy.copy_(rows, non_blocking=True).view(torch.uint8).numpy()
        return array

    def _state(self, slot: int) -> Tensor:
        assert self._records is not None, "the model has no state"
        size = self.of_token.of_state, self.of_token.row_bytes
        return self._records[slot, : size[0] * size[1]].view(size)


class CachePlaces:
    """Where rows are in a part of the cache."""

    def __init__(self, page_size: int, of_token: TokenRows) -> None:
        self._page_size = page_size
        self._of_token = of_token

    def __call__(self, run: KVRun, tables: PageTables) -> Iterator[tuple[int, int]]:
        """Yield the first row, and the number of rows, in each run of consecutive pages."""
        pages, page_rows, start = self._pages(run, tables)
        end = start + run.num_rows
        while start < end:
            index, offset = divmod(start, page_rows)
            until = index + 1
            while until * page_rows < end and pages[until] == pages[until - 1] + 1:
                until += 1
            count = min(end, until * page_rows) - start
            yield pages[index] * page_rows + offset, count
            start += count

    def whole(self, run: KVRun, tables: PageTables) -> slice | NDArray[np.int64]:
        """Return all of them: a slice if they are consecutive."""
        pages, page_rows, start = self._pages(run, tables)
        first, offset = divmod(start, page_rows)
        own = np.array(pages[first : -(-(start + run.num_rows) // page_rows)], dtype=np.int64)
        if (np.diff(own) == 1).all():
            place = int(own[0]) * page_rows + offset
            return slice(place, place + run.num_rows)
        rows = own[:, None] * page_rows + np.arange(page_rows)
        return rows.reshape(-1)[offset : offset + run.num_rows]

    def _pages(self, run: KVRun, tables: PageTables) -> tuple[Sequence[int], int, int]:
        """Return the pages of a run's layer, how many rows each has, and where the run starts among them."""
        table = tables[self._of_token.layer_groups.of_layer[run.layer]]
        page_rows = self._page_size * self._of_token.parts[run.layer][run.part]
        start = run.start - table.first * page_rows
        assert start >= 0, "the table has no pages for these rows"
        return table.pages, page_rows, start


def _divided(runs: Iterable[KVRun], most: int) -> Iterator[list[KVRun]]:
    """Divide runs into lists of at most ``most`` rows, or of one run."""
    together: list[KVRun] = []
    num_rows = 0
    for run in runs:
        if together and num_rows + run.num_rows > most:
            yield together
            together, num_rows = [], 0
        together.append(run)
        num_rows += run.num_rows
    if together:
        yield together


def _rows(cache: Tensor, row_bytes: int) -> Tensor:
    """[pages, page_size, kv_heads, stored_dim] of any dtype → uint8 [rows, row_bytes]."""
    return cache.view(-1).view(torch.uint8).view(-1, row_bytes)


def _wide(rows: Tensor) -> Tensor:
    """View rows of bytes as rows of words, of which a GPU moves one at a time."""
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows
