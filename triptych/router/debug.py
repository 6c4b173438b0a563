"""What the router shows of its state, for tests and debugging."""

from dataclasses import dataclass

from triptych.router.admission import AdmissionState
from triptych.router.encode_dispatcher import EncodeDispatcherState
from triptych.router.forecast import Forecast
from triptych.router.request_state import COMPUTING, RequestPhase, RequestState
from triptych.types import RequestId


@dataclass(frozen=True)
class RouterState:
    """Snapshot of a ``Router``."""

    requests: dict[RequestId, RequestState]
    """All requests in flight."""
    admission: AdmissionState
    encode: EncodeDispatcherState
    serving: tuple[str, ...]
    """Names of the language instances that can take requests now."""
    handled: frozenset[type]
    """Types of messages that the router handles."""
    forecast: Forecast
    """The live object, not a copy."""

    @property
    def computing(self) -> frozenset[RequestId]:
        """The requests that language instances can compute now."""
        return frozenset(name for name, state in self.requests.items() if state.phase in COMPUTING)

    @property
    def dispatched(self) -> dict[RequestId, RequestState]:
        """The requests that an instance has."""
        return {name: state for name, state in self.requests.items() if state.phase is not RequestPhase.QUEUED}

    @property
    def queued(self) -> frozenset[RequestId]:
        """The requests that no instance has."""
        return frozenset(self.requests.keys() - self.dispatched.keys())
