"""The exceptions that Triptych raises on purpose, in one tree.

::

    TriptychError
    ├── RequestError
    │   ├── InvalidRequest
    │   │   └── MissingField, UnknownField, UnsupportedField, UnsupportedValue
    │   ├── GrammarTooCostly, PromptTooLong, NoTokenAllowed, UnknownModel, PayloadTooLarge, BodyTooSlow,
    │   │   UnsupportedEncoding, UnknownResponse
    │   └── MediaError
    │       ├── UnsupportedMedia, TruncatedMedia, MediaTooLarge, MediaMismatch, BadMediaSize, DecodeFailed
    │       └── MediaNotAllowed, MediaNotFetched, MediaNotServed, UnknownMedia
    ├── ServiceError
    │   ├── Overloaded
    │   │   └── RateLimited
    │   └── Unavailable, InstanceLost, DeadlineExceeded, PlanMismatch, NonFiniteLogits, InternalError
    ├── TransferError
    │   └── BlockError, RegionError
    ├── StartError
    │   ├── CheckpointError, TopologyError, ConfigError
    │   └── InstanceRefused, InstanceBroken, FrontendSilent, ChildFailed
    └── HelperFailed, BadAddress, BadMessage

Each docstring first describes what happened, then what the client or the operator can do. ``triptych/api/errors.py``
maps errors to HTTP statuses.
"""

import enum
import re
from typing import ClassVar, Self

from triptych import exit_codes


class TriptychError(Exception):
    """Base class of every error raised on purpose."""

    code: ClassVar[str] = "internal_error"
    """The error's code in answers: OpenAI's where it has one, otherwise the class's name in snake case."""

    def __init_subclass__(cls, code: str | None = None) -> None:
        cls.code = code or re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class RequestError(TriptychError):
    """The request can't be served as the client sent it.

    Change the request; sending it again unchanged fails again.
    """

    param: str | None
    """The field at fault, as a path of the OpenAI API (``messages[0].content[1].image_url.url``); None if there is no
    single one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError, code="invalid_value"):
    """A field has the wrong type, is out of range, or contradicts another.

    Correct the field that ``param`` names.
    """


class MissingField(InvalidRequest, code="missing_required_parameter"):
    """A field that the request needs is missing.

    Add the field that ``param`` names.
    """


class UnknownField(InvalidRequest, code="unknown_parameter"):
    """A field is unknown: it may be a demand, so it isn't ignored.

    Remove the field that ``param`` names, or correct its name.
    """


class UnsupportedField(InvalidRequest, code="unsupported_parameter"):
    """A field demands what this service doesn't do.

    Remove the field that ``param`` names; the message says what to use in its place.
    """


class UnsupportedValue(InvalidRequest, code="unsupported_value"):
    """A field has a value that is known, but that isn't supported.

    Use a value that the message lists, or remove the field that ``param`` names.
    """


class GrammarTooCostly(RequestError):
    """The grammar takes too much time or memory to compile or to match.

    Simplify the JSON schema, regular expression or grammar: fewer alternatives, fewer large repetition counts. The
    limits are fixed ([schemas and grammars](api-tools.md#schemas-and-grammars)).
    """


class PromptTooLong(RequestError, code="context_length_exceeded"):
    """The prompt, or the prompt and ``max_tokens``, exceed the context length.

    Shorten the prompt, lower ``max_tokens``, or send fewer or smaller media items. The operator can raise
    ``--max-model-len`` up to the model's own limit.
    """

    sizes: tuple[int, int, int] | None = None
    """Tokens of the context, the prompt and the answer, where they are known."""

    @classmethod
    def of(
        cls, context_length: int, num_prompt: int, num_new: int = 1, *, param: str | None, is_least: bool = False
    ) -> Self:
        """Return the error for a prompt and an answer of these numbers of tokens; ``is_least`` if the prompt has that
        number or more.

        Clients shorten a conversation, or turn to another model, when they find these words. LangChain looks for the
        code in the text of openai's exceptions, which is the message alone since openai 3."""
        reason = ""
        if num_prompt > context_length:
            reason = " and the input is longer than the model's context length"
        elif param in ("max_tokens", "max_completion_tokens"):
            reason = ", so max_tokens or max_completion_tokens is too large"
        made = cls(
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{'at least ' if is_least else ''}{num_prompt + num_new} tokens ({num_prompt} in the input, {num_new} in "
            f"the completion){reason}. Please reduce the length of the messages or completion ({cls.code}).",
            param,
        )
        made.sizes = (context_length, num_prompt, num_new)
        return made


class NoTokenAllowed(RequestError):
    """The request's grammar, ``logit_bias`` and ``min_tokens`` together exclude every token.

    Relax one of them.
    """


class UnknownModel(RequestError, code="model_not_found"):
    """The request names a model that this service doesn't serve.

    Use a name from ``GET /v1/models``. The operator can set it with ``--served-model-name``.
    """


class Forbidden(RequestError):
    """The client may not use this endpoint.

    Use an API key with the right that the message names. The operator gives it in ``--api-key-file``, after the key.
    """


class UnknownResponse(RequestError):
    """No response with this id is stored for the client's key.

    Only services with ``--response-store`` store responses, within bounds on their number, size and age.
    """


class PayloadTooLarge(RequestError):
    """The request body exceeds a limit on its size.

    Send less in one request. The operator can raise ``--max-body-mb``; the limits on text and on the number of values
    are fixed.
    """


class UnsupportedEncoding(RequestError):
    """The request body is compressed, which isn't supported.

    Send the body without a ``Content-Encoding``.
    """


class BodyTooSlow(RequestError):
    """The request body did not arrive in time.

    Send the request again over a faster connection, or send less in one request.
    """


class MediaError(RequestError):
    """A media item can't be used.

    ``param`` names the item, and the class names the fault.
    """


class UnsupportedMedia(MediaError):
    """The bytes aren't in a media format that Triptych reads, or the model doesn't take this kind of media.

    Convert the item to a supported format, such as PNG, JPEG, MP4, WebM, WAV or FLAC.
    """


class TruncatedMedia(MediaError):
    """The bytes end before the media item does.

    Check that the file was uploaded or downloaded completely, and send it again.
    """


class MediaTooLarge(MediaError):
    """The item exceeds a limit on bytes, pixels, duration or tokens.

    Send a smaller or shorter item. The operator can raise the limit: ``--max-file-mb``, ``--max-image-pixels``,
    ``--max-video-seconds``, ``--max-audio-seconds``, ``--max-item-tokens`` and similar flags.
    """


class MediaMismatch(MediaError):
    """The decoded item contradicts its header.

    The file is damaged or was written incorrectly: encode it again.
    """


class BadMediaSize(MediaError):
    """The item is empty, or the model doesn't support its shape.

    Send an item with at least one pixel or sample, of a less extreme aspect ratio.
    """


class MediaNotAllowed(MediaError):
    """The item's URL isn't one that this service may fetch.

    Send the item inline as a ``data:`` URL. The operator can allow hosts with ``--allowed-media-domains``, networks
    with ``--allowed-media-networks``, and a folder with ``--allowed-local-media-path``.
    """


class MediaNotFetched(MediaError):
    """The item's URL is allowed, but could not be fetched.

    Check the URL and the server behind it, or send the item inline. The operator can raise ``--media-fetch-timeout``.
    """


class DecodeFailed(MediaError):
    """The item's decoder crashed, or exceeded its time or memory limit.

    Encode the item again, or send a smaller one.
    """


class MediaNotServed(MediaError):
    """This service takes text only: its model or its topology has no encoder.

    Send text only. The operator can start a topology with an encode stage, such as ``1E1PD``.
    """


class UnknownMedia(MediaError):
    """The service no longer holds the item that a uuid stands for.

    Send the item itself again, with its uuid. The operator can raise ``--mm-uuid-cache-mb``.
    """


class ServiceError(TriptychError):
    """The service could not answer a valid request.

    Sending it again may succeed.
    """


class Overloaded(ServiceError):
    """The service is full, or the queue is too long for the request to meet its deadline.

    Send the request again after ``Retry-After`` seconds. The operator can add instances, or raise ``--max-queue`` and
    ``--request-timeout``.
    """

    retry_after: int
    """Seconds after which a retry may be admitted."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """The client is at its limit of requests in flight, of memory that they hold, or of viewers of the page.

    Wait for some of them to end, then send the request again. The operator can raise ``--max-queue-per-client`` and
    ``--max-inflight-mb``.
    """


class Unavailable(ServiceError):
    """No instance can do this work now.

    Send the request again later. The operator can see with ``triptych status`` which stage has no instance.
    """


class InstanceLost(ServiceError):
    """An instance was lost while it worked on the request, and no other took over.

    Send the request again. The operator finds the reason in the lost instance's log.
    """


class DeadlineExceeded(ServiceError):
    """The request was not answered before its deadline.

    Send the request again with fewer tokens or a longer timeout. The operator can add instances, or raise
    ``--request-timeout``.
    """


class PlanMismatch(ServiceError):
    """An encoded item differs from its plan.

    This is a bug, never the client's fault: report it with the media item and the model.
    """


class NonFiniteLogits(ServiceError):
    """The model's logits for the request aren't finite: its weights or activations overflow.

    The operator can start the service with a wider ``--dtype`` (bfloat16 or float32), or without ``--quantization``.
    """


class InternalError(ServiceError):
    """Something unexpected failed while the request was served.

    Send the request again. The operator finds the cause in the log, under the request's id.
    """


class TransferError(TriptychError):
    """A transfer between instances failed.

    Transfers are retried; the operator should look at the fabric and the network if this error repeats.
    """


class BlockError(TransferError):
    """A block pool was used incorrectly: a double free, a foreign free or a leak.

    This is a bug: report it with the log.
    """


class RegionError(TransferError):
    """A registered memory region can't be opened, or doesn't match its handle.

    Check that both instances use the same fabric, and that the machine allows shared or registered memory.
    """


class StartError(TriptychError):
    """The service can't start.

    The message, on the operator's terminal, names the flag, file or key to correct.
    """

    exit_code = exit_codes.FAILED
    """The exit code of a process that this error ends."""


class CheckpointError(StartError):
    """The checkpoint folder can't be served.

    The message names the file or the key. ``triptych doctor MODEL`` checks a folder without starting a service.
    """

    exit_code = exit_codes.CONFIG


class TopologyError(StartError):
    """The topology is invalid.

    Write counts and roles, such as ``1EPD``, ``1E1PD`` or ``1E1P1D``, with a role for each stage.
    """

    exit_code = exit_codes.CONFIG


class ConfigError(StartError):
    """A setting is invalid, or settings contradict each other.

    Correct the flag, environment variable or configuration key that the message names.
    """

    exit_code = exit_codes.CONFIG


class InstanceRefused(StartError):
    """The frontend refuses the instance: it serves another model, or its rows don't fit those of other instances.

    Start it with the model and the settings of the service.
    """

    exit_code = exit_codes.CONFIG


class InstanceBroken(StartError):
    """The instance can't do its work any more: its device doesn't answer, or one job after the other has failed.

    A supervisor starts it again. If that repeats, check the device, and the instance's log for what failed first.
    """

    exit_code = exit_codes.BROKEN

    def __init__(self, message: str, *, suspect: bool = True) -> None:
        """``suspect``: whether the work in flight may be the cause."""
        super().__init__(message)
        self.suspect = suspect


class FrontendSilent(StartError):
    """No frontend answers the instance or the operator.

    Check that the frontend runs, its address, its ``--cluster-secret-file`` and the network between them.
    """

    exit_code = exit_codes.NO_FRONTEND


class ChildFailed(StartError):
    """A process of the service ended, and the service can't go on without it.

    The message has the last line that the process wrote; correct what it names.
    """

    def __init__(self, message: str, exit_code: int = exit_codes.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class HelperFailed(TriptychError):
    """A process or thread that helps an instance, such as one that decodes media, can't do its work.

    The work is done elsewhere, or again. If it repeats, the instance's machine is most likely short of memory or
    processes.
    """


class BadAddress(TriptychError):
    """An address can't be listened on or connected to.

    Check ``--host``, the ports and ``--cluster-host``; another process may use the port.
    """


class BadMessage(TriptychError):
    """Bytes received on a process's socket aren't a message, or a message is too large to be sent.

    They are dropped. If it repeats, check that all processes run the same version, and that nothing else connects.
    """


class ErrorKind(enum.StrEnum):
    """An error that a request can end in, as messages between processes carry it: the name of its class."""

    INVALID_REQUEST = "InvalidRequest"
    MISSING_FIELD = "MissingField"
    UNKNOWN_FIELD = "UnknownField"
    UNSUPPORTED_FIELD = "UnsupportedField"
    UNSUPPORTED_VALUE = "UnsupportedValue"
    GRAMMAR_TOO_COSTLY = "GrammarTooCostly"
    PROMPT_TOO_LONG = "PromptTooLong"
    NO_TOKEN_ALLOWED = "NoTokenAllowed"
    UNKNOWN_MODEL = "UnknownModel"
    PAYLOAD_TOO_LARGE = "PayloadTooLarge"
    BODY_TOO_SLOW = "BodyTooSlow"
    MEDIA_ERROR = "MediaError"
    UNSUPPORTED_MEDIA = "UnsupportedMedia"
    TRUNCATED_MEDIA = "TruncatedMedia"
    MEDIA_TOO_LARGE = "MediaTooLarge"
    MEDIA_MISMATCH = "MediaMismatch"
    BAD_MEDIA_SIZE = "BadMediaSize"
    DECODE_FAILED = "DecodeFailed"
    MEDIA_NOT_ALLOWED = "MediaNotAllowed"
    MEDIA_NOT_FETCHED = "MediaNotFetched"
    MEDIA_NOT_SERVED = "MediaNotServed"
    UNKNOWN_MEDIA = "UnknownMedia"
    OVERLOADED = "Overloaded"
    RATE_LIMITED = "RateLimited"
    UNAVAILABLE = "Unavailable"
    INSTANCE_LOST = "InstanceLost"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    PLAN_MISMATCH = "PlanMismatch"
    NON_FINITE_LOGITS = "NonFiniteLogits"
    INTERNAL_ERROR = "InternalError"

    @classmethod
    def of(cls, error: BaseException) -> "ErrorKind":
        """Return the kind of an error; INTERNAL_ERROR if no request can end in it."""
        return next((kind for kind in cls if kind.value == type(error).__name__), cls.INTERNAL_ERROR)

    def error(self, message: str, param: str | None = None) -> TriptychError:
        """Return the error that another process reported."""
        kind = globals()[self.value]
        return kind(message, param) if issubclass(kind, RequestError) else kind(message)  # type: ignore[no-any-return]
