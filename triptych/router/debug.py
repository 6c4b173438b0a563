"""What the router shows of its state, for tests and debugging."""

from dataclasses import dataclass

from triptych.router.admission import AdmissionState
from triptych.router.dispatched_request import DispatchedRequest
from triptych.router.encode_dispatcher import EncodeDispatcherState
from triptych.router.forecast import Forecast
from triptych.types import RequestId


@dataclass(frozen=True)
class RouterState:
    """Snapshot of a ``Router``."""

    dispatched: dict[RequestId, DispatchedRequest]
    queued: frozenset[RequestId]
    """Requests whose streams wait to be dispatched."""
    admission: AdmissionState
    encode: EncodeDispatcherState
    serving: tuple[str, ...]
    """Names of the language instances that can take requests now."""
    handled: frozenset[type]
    """Types of messages that the router handles."""
    forecast: Forecast
    """The live object, not a copy."""
