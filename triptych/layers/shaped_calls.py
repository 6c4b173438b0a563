"""Calls whose work depends only on one tensor and a shape: what the shape determines is prepared once, and on GPUs the
calls of frequent shapes are CUDA graphs."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from triptych.layers.cuda_graphs import Record

log = logging.getLogger(__name__)

MAX_SHAPES = 32
"""Shapes that stay prepared."""
MAX_GRAPHS = 8
"""Prepared shapes that may be recorded. Each keeps memory for its input and outputs."""
MAX_ROWS = 4096
"""Rows of the largest input whose shape stays prepared and whose call may be recorded: larger ones take longer to
compute than to launch, and keep more memory."""
USES_BEFORE_RECORDING = 2
"""A shape that never comes again isn't worth a recording, which makes the call several times."""
AGE = 256
"""Calls after which all numbers of uses are halved, so that those of another time count for little."""
MORE_OFTEN = 2
"""How much more often a shape must have been used than one whose graph it takes."""

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
        self._calls = 0

    @property
    def num_recorded(self) -> int:
        return sum(one.recorded is not None for one in self._shapes.values())

    def __call__(self, shape: Shape, rows: Tensor) -> list[Tensor]:
        """Return the outputs for ``rows``, as new tensors."""
        if not 0 < len(rows) <= MAX_ROWS:
            return list(self._prepare(shape)(rows))
        if shape not in self._shapes:
            if len(self._shapes) == MAX_SHAPES:  # those with a graph stay until another takes it
                del self._shapes[next(name for name, one in self._shapes.items() if one.recorded is None)]
            self._shapes[shape] = _KnownShape(self._prepare(shape))
        self._shapes.move_to_end(shape)
        one = self._shapes[shape]
        self._count(one)
        if one.recorded is None and self.record is not None and one.uses >= USES_BEFORE_RECORDING:
            self._record(one, rows, self.record)
        return list(one.call(rows)) if one.recorded is None else one.recorded(rows)

    def _count(self, one: _KnownShape) -> None:
        one.uses += 1
        self._calls += 1
        if self._calls % AGE == 0:
            for other in self._shapes.values():
                other.uses //= 2

    def _record(self, one: _KnownShape, rows: Tensor, record: Record) -> None:
        """Record the calls of a shape if there is room, or a graph of a shape that is used less often."""
        recorded = [other for other in self._shapes.values() if other.recorded is not None]
        if len(recorded) == MAX_GRAPHS:
            least = min(recorded, key=lambda other: other.uses)
            if one.uses < MORE_OFTEN * least.uses:
                return
            least.recorded = None
        try:
            one.recorded = _Recorded(one.call, rows, record)
        except RuntimeError as error:  # torch's: no memory is left, or some operation can't be recorded
            log.warning("a tower's CUDA graph can't be recorded, so no more are: %s", error)
            self.record = None


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
