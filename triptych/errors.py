"""Every error that Triptych raises on purpose, in one tree.

::

    TriptychError
    ├── RequestError                a client's fault; carries the field at fault
    │   ├── InvalidRequest          wrong type, unknown field, value out of range
    │   ├── GrammarTooCostly        compiling it, or matching the answer, takes more than it may
    │   ├── PromptTooLong           more tokens than the model's context holds
    │   ├── NoTokenAllowed          grammar, logit_bias and min_tokens together rule every token out
    │   ├── UnknownModel
    │   ├── PayloadTooLarge
    │   ├── BodyTooSlow             a request body that doesn't come
    │   └── MediaError              an item that can't be used
    │       ├── UnsupportedMedia    not an image or a video of a known format
    │       ├── TruncatedMedia      the bytes end before the header or the pixels do
    │       ├── MediaTooLarge       refused at planning, before any pixel is decoded
    │       ├── MediaMismatch       not what its header says
    │       ├── BadMediaSize        zero sides, or a shape the model can't take
    │       ├── MediaNotAllowed     a URL whose host isn't allowed
    │       ├── MediaNotFetched     a URL that may be fetched, but couldn't be
    │       ├── DecodeFailed        its decoder crashed, or needed more than it may
    │       ├── MediaNotServed      the topology has no encoder
    │       └── UnknownMedia        a uuid that nothing is remembered by
    ├── ServiceError                our side's fault or state
    │   ├── Overloaded              the queue is full, or too long for the deadline; carries retry_after
    │   │   └── RateLimited         one client's share of it is full
    │   ├── Unavailable             no instance can do this (now, or in this topology)
    │   ├── InstanceLost            the instance that held the request is gone
    │   ├── DeadlineExceeded
    │   ├── PlanMismatch            a result that differs from its plan: a bug, caught
    │   ├── NonFiniteLogits         the model's logits for one request aren't finite numbers
    │   └── InternalError           anything else that went wrong while serving one request
    ├── TransferError
    │   ├── BlockError              double free, foreign free or leak in a block pool
    │   └── RegionError             a region that can't be opened or is too small
    └── StartError                  the service can't start; shown to the operator
        ├── CheckpointError         a checkpoint folder that can't be served; names file or key
        ├── TopologyError
        └── ConfigError

What HTTP status each becomes is said once, in ``triptych/api/errors.py``.
"""


class TriptychError(Exception):
    """Base of every error raised on purpose."""


class RequestError(TriptychError):
    """The client sent something that can't be served.

    ``param`` names the field at fault, in the path notation of the OpenAI API
    (``messages[0].content[1].image_url.url``), or is None when no single field is.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is unknown, has the wrong type, or a value out of range."""


class GrammarTooCostly(RequestError):
    """The grammar that the answer must keep to takes more time or memory than it may, to compile or to match."""


class PromptTooLong(RequestError):
    """The prompt, or prompt and requested output, exceed the context length."""


class NoTokenAllowed(RequestError):
    """What the request asks for rules every token out: its grammar, ``logit_bias`` and ``min_tokens`` together."""


class UnknownModel(RequestError):
    """The request names a model that isn't served here."""


class PayloadTooLarge(RequestError):
    """The request body exceeds the limit."""


class BodyTooSlow(RequestError):
    """The request body doesn't come."""


class MediaError(RequestError):
    """A media item can't be used."""


class UnsupportedMedia(MediaError):
    """The bytes aren't of a media format that Triptych reads."""


class TruncatedMedia(MediaError):
    """The bytes end too early."""


class MediaTooLarge(MediaError):
    """The item exceeds a limit on pixels, bytes or tokens."""


class MediaMismatch(MediaError):
    """What was decoded isn't what the item's header says."""


class BadMediaSize(MediaError):
    """The item's sides are zero, or a shape the model can't take."""


class MediaNotAllowed(MediaError):
    """The item's URL isn't one that this server may fetch."""


class MediaNotFetched(MediaError):
    """The item's URL may be fetched, but couldn't be, now."""


class DecodeFailed(MediaError):
    """The item's decoder crashed, or needed more time or memory than it may."""


class MediaNotServed(MediaError):
    """This service was started without an encode instance: it answers text alone."""


class UnknownMedia(MediaError):
    """Nothing is remembered by the uuid that stands for the item; the client can send the item again."""


class ServiceError(TriptychError):
    """The service couldn't answer a valid request."""


class Overloaded(ServiceError):
    """The queue is full, or too long for the request to be answered in time. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    """This client has as many requests waiting or running as it may, or they hold as much memory as they may."""


class Unavailable(ServiceError):
    """No instance can do this now, or in this topology."""


class InstanceLost(ServiceError):
    """The instance that held the request is gone."""


class DeadlineExceeded(ServiceError):
    """The request's time ran out."""


class PlanMismatch(ServiceError):
    """A result differs from its plan. Always a bug, never the client's fault."""


class NonFiniteLogits(ServiceError):
    """The model's logits for this request aren't finite: its weights or activations overflow."""


class InternalError(ServiceError):
    """Something went wrong while serving one request."""


class TransferError(TriptychError):
    """A transfer between instances went wrong."""


class BlockError(TransferError):
    """Double free, foreign free or leak in a block pool."""


class RegionError(TransferError):
    """A region can't be opened, or isn't what its handle says."""


class StartError(TriptychError):
    """The service can't start. The message is for the operator's terminal."""


class CheckpointError(StartError):
    """A checkpoint folder can't be served. Names the file or the key."""


class TopologyError(StartError):
    """A topology that makes no sense."""


class ConfigError(StartError):
    """Settings that don't fit together."""


def from_wire(name: str, message: str, param: str | None = None) -> TriptychError:
    """The error that another process reported by class name; an InternalError for a name that isn't in the tree or
    isn't one a request may end in."""
    kind = globals().get(name)
    if not isinstance(kind, type) or not issubclass(kind, RequestError | ServiceError):
        return InternalError(message)
    return kind(message, param) if issubclass(kind, RequestError) else kind(message)
