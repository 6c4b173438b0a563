"""Calls whose work depends only on one tensor and a shape: what the shape determines is prepared once, and on GPUs the
calls of frequent shapes are CUDA graphs."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from triptych.layers.cuda_graphs import Record

log = logging.getLogger(__name__)

MAX_SHAPES = 32
"""Shapes that stay prepared."""
MAX_GRAPHS = 8
"""Of these, how many may be recorded. Each keeps memory for its input and outputs."""
MAX_ROWS = 4096
"""Rows of the largest input whose call is recorded: larger ones take longer to compute than to launch."""
USES_BEFORE_RECORDING = 2
"""A shape that never comes again isn't worth a recording, which takes as long as several calls."""

Shape = TypeVar("Shape", bound=Hashable)
Call = Callable[[Tensor], Sequence[Tensor]]


@dataclass
class _KnownShape:
    call: Call
    uses: int = 0
    recorded: "_Recorded | None" = None


class ShapedCalls(Generic[Shape]):
    """``prepare(shape)`` returns a function from an input [rows, values] to its outputs. All inputs of one shape have
    equal sizes and dtypes."""

    record: Record | None = None
    """Records calls as graphs, if set."""

    def __init__(self, prepare: Callable[[Shape], Call]) -> None:
        self._prepare = prepare
        self._shapes: OrderedDict[Shape, _KnownShape] = OrderedDict()  # the least recently used first

    @property
    def num_recorded(self) -> int:
        return sum(one.recorded is not None for one in self._shapes.values())

    def __call__(self, shape: Shape, rows: Tensor) -> list[Tensor]:
        """Return the outputs for ``rows``, as new tensors."""
        if shape not in self._shapes:
            if len(self._shapes) == MAX_SHAPES:
                self._shapes.popitem(last=False)
            self._shapes[shape] = _KnownShape(self._prepare(shape))
        self._shapes.move_to_end(shape)
        one = self._shapes[shape]
        one.uses += 1
        if one.recorded is None and self._is_worth_recording(one, rows):
            one.recorded = self._recorded(one.call, rows)
        return list(one.call(rows)) if one.recorded is None else one.recorded(rows)

    def _is_worth_recording(self, one: _KnownShape, rows: Tensor) -> bool:
        """Return whether ``one`` should be recorded, after making room for it."""
        if self.record is None or one.uses < USES_BEFORE_RECORDING or not 0 < len(rows) <= MAX_ROWS:
            return False
        recorded = [other for other in self._shapes.values() if other.recorded is not None]
        if len(recorded) < MAX_GRAPHS:
            return True
        least = min(recorded, key=lambda other: other.uses)
        if least.uses >= one.uses:
            return False
        least.recorded = None
        return True

    def _recorded(self, call: Call, rows: Tensor) -> "_Recorded | None":
        assert self.record is not None
        try:
            return _Recorded(call, rows, self.record)
        except RuntimeError as error:  # torch's: no memory is left, or some operation can't be recorded
            log.warning("a tower's CUDA graph can't be recorded, so none are any more: %s", error)
            self.record = None
            return None


class _Recorded:
    """A recorded call."""

    def __init__(self, call: Call, rows: Tensor, record: Record) -> None:
        """``rows`` is an input of its shape."""
        self._rows = rows.clone()
        self._outputs: Sequence[Tensor] = ()
        self._call = call  # its tensors are read by address

        def work() -> None:
            self._outputs = call(self._rows)

        self._replay = record(work)

    def __call__(self, rows: Tensor) -> list[Tensor]:
        self._rows.copy_(rows)
        self._replay()
        return [output.clone() for output in self._outputs]  # the next call writes to them
