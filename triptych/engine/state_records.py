"""The records of states in a cache's slots, on the compute thread: their positions, and copies from and to
snapshots. Which slots and snapshots requests have, ``state_slots`` decides."""

from triptych.errors import InternalError
from triptych.layers.state_tensors import StateBatch, StateTensors

LOST = -1
"""Position of a state that a failed step may have changed."""


class StateRecords:
    """The records in slots, with their positions: the number of tokens that each includes. Slots that no step uses may
    receive one while a step runs."""

    def __init__(self, tensors: StateTensors, num_slots: int) -> None:
        """``num_slots``: those of requests, without snapshots."""
        self._tensors = tensors
        self._num_slots = num_slots
        self._positions = [LOST] * num_slots

    def received(self, slot: int, position: int) -> None:
        """Record that a state has been copied to the slot."""
        self._positions[slot] = position

    def snapshot(self, number: int) -> int:
        """Return the place of a snapshot among the records."""
        return self._num_slots + number

    def begin(self, step: StateBatch) -> None:
        """Load the snapshots that requests begin with. Raises InternalError if a state doesn't belong to the keys and
        values before the step."""
        for snapshot, slot, position in step.loads:
            self._tensors.copy(self.snapshot(snapshot), slot)
            self._positions[slot] = position
        for slot, start in zip(step.delta.slots, step.starts, strict=True):
            if start and self._positions[slot] != start:
                raise InternalError(f"slot {slot} has the state after {self._positions[slot]} tokens, not {start}")
        for slot in step.delta.slots:
            self._positions[slot] = LOST

    def end(self, step: StateBatch) -> None:
        """Record the positions after a step, and take its snapshots."""
        for slot, start, length in zip(step.delta.slots, step.starts, step.delta.query_lens, strict=True):
            self._positions[slot] = start + length
        for snapshot, slot in step.saves:
            self._tensors.copy(slot, self.snapshot(snapshot))
