"""Requests that a language server of another project answers: media are planned and encoded here, and everything else
is passed on as it came."""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from pydantic_core import from_json

from triptych.api.completion_schemas import CompletionRequest
from triptych.api.context import ApiContext
from triptych.api.encode import MediaFields, collect_rows, file_text, npy_text
from triptych.api.fields import MAX_CHOICES, MAX_NAME, MAX_PRIORITY
from triptych.api.generation import NO_MODEL, RequestContext, check_model
from triptych.api.media_parts import (
    MODALITIES,
    MediaSettings,
    PartIndex,
    RequestPart,
    check_parts,
    fetch_all,
    media_parts,
)
from triptych.api.schemas import MAX_MESSAGES, MAX_PARTS, ChatCompletionRequest, ConversationFields, ImageRowsPart
from triptych.api.validation import parse_request
from triptych.errors import InstanceLost, InvalidRequest, TriptychError, UnsupportedField, UnsupportedValue
from triptych.gateway.answers import ServerAnswer
from triptych.gateway.relay import AnswerPart, Call, Prepared, Relay
from triptych.gateway.servers import Needs
from triptych.messages.tickets import PARAMETER
from triptych.models.shared.patch_planner import PatchPlanner
from triptych.models.vllm_grids import GRID_FAMILIES, file_part, grid_part, image_part, refusal
from triptych.observe.requests import ChoiceRecord
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedItem, PlannedPrompt, media_param
from triptych.router.row_consumers import name_of
from triptych.router.stream import TokenStream

T = TypeVar("T")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT_PARTS = frozenset({"text", "refusal", "thinking", "input_text", "output_text"})
"""Types of parts that are passed on."""
MEDIA_PARTS = frozenset({"image_url", "video_url", "video", "audio_url", "input_audio"})
"""Types of parts that are encoded here, as far as servers take their embeddings."""
GATEWAY_ONLY = ("ec_transfer_params", "kv_transfer_params", "prompt_embeds", "chat_template", "media_io_kwargs")
"""Fields by which a client could name transfers, or bring what is checked here past the check."""
CHOICES = ("n", "best_of")
"""Fields with a number of answers to each prompt."""
CHARACTERS_PER_TOKEN, DEFAULT_TOKENS = 4, 256
"""For an estimate of a request's cost."""


@dataclass
class Forwarded:
    """A request that is passed on."""

    api: ApiContext
    context: RequestContext
    fields: dict[str, Any]
    """The body's. Media parts are those that the server gets, with names in place of rows."""
    text_length: int
    """Characters of the body, about."""
    path: str = CHAT
    num_prompts: int = 1
    form: type[ServerAnswer] = ServerAnswer
    """What is read of the answer."""
    pieces: Mapping[str, Callable[[], Iterator[bytes]]] = field(default_factory=dict)
    """By name: what takes its place, in pieces, so that no copy of rows is made."""
    num_rows: int = 0
    prompt: PlannedPrompt | None = None
    """The media whose rows a connector asks for; None if the body has them."""

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def cache_salt(self) -> str:
        return self.fields.get("cache_salt") or ""

    @property
    def priority(self) -> int:
        """Lower goes first; 0 for one that isn't a number. Clients can't go before others, here as in other chats."""
        priority = self.fields.get("priority")
        return min(max(priority, 0), MAX_PRIORITY) if isinstance(priority, int) else 0

    @contextmanager
    def prepared(self, model: str) -> Iterator[Prepared]:
        """Prepare the body for a server that calls the model ``model``. Inside, its connector may ask for rows."""
        self.api.router.consumers.rouse()
        if self.prompt is None:
            yield Prepared(self._body(model))
            return
        lifecycle, consumers = self.api.lifecycle, self.api.router.consumers
        timeout = self.context.remaining
        stream, state = lifecycle.lend(
            self.context.record, self.prompt, consumers, self.cache_salt, timeout=timeout, priority=self.priority
        )
        failed = asyncio.ensure_future(_ended(stream))
        try:
            ticket = {"ec_transfer_params": {PARAMETER: consumers.ticket(state)}}
            with lifecycle.admission.tabled(self.context.record.client):
                yield Prepared(self._body(model, ticket), failed)
        finally:
            failed.cancel()
            failed.add_done_callback(lambda one: one.cancelled() or one.exception())  # it may not have been looked at
            lifecycle.cancel(stream.request)

    def _body(self, model: str, more: Mapping[str, Any] = MappingProxyType({})) -> Iterator[bytes]:
        text = msgspec.json.encode(self.fields | {"model": self.needs.model or model, **more})
        if not self.pieces:
            yield text
            return
        for number, piece in enumerate(re.split("|".join(self.pieces).join("()").encode(), text)):
            if number % 2:
                yield from self.pieces[piece.decode()]()
            else:
                yield piece

    @property
    def needs(self) -> Needs:
        named: str = self.fields.get("model") or ""
        own = named in (*NO_MODEL, self.api.model_name)
        return Needs(connector=self.prompt is not None, model="" if own else named)

    @property
    def most_choices(self) -> tuple[int, str]:
        """Answers that it asks for to each prompt, and the field that says so."""
        return max(((self.fields.get(name) or 1, name) for name in CHOICES), key=itemgetter(0))

    @property
    def num_choices(self) -> int:
        """Answers that it asks for."""
        return self.num_prompts * self.most_choices[0]

    @property
    def model(self) -> str:
        """The name of the model that answers, as clients know it."""
        return self.needs.model or self.api.model_name

    @property
    def cost(self) -> float:
        """About its tokens, those of the prompt for each choice, as in other chats. A client may send any number of
        tokens: the server judges it, and here it counts within limits."""
        most = self.fields.get("max_completion_tokens") or self.fields.get("max_tokens")
        if not isinstance(most, int | float):
            most = DEFAULT_TOKENS
        generated = min(max(most, 0), self.api.context_length)
        prompts = self.text_length / CHARACTERS_PER_TOKEN + self.num_rows
        return self.num_choices * (prompts / self.num_prompts + generated)


def _parse(text: bytes) -> dict[str, Any]:
    """Return the fields of a body. Raises InvalidRequest for one that can't be passed on, whatever the server."""
    try:
        fields = from_json(text, allow_inf_nan=False)
    except ValueError:
        raise InvalidRequest("the body is not valid JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body is not a JSON object")
    extra = fields.get("vllm_xargs")
    for name in GATEWAY_ONLY:
        if fields.get(name) is not None:
            raise UnsupportedField(f"{name}: not taken from clients", name)
        if isinstance(extra, dict) and name in extra:
            raise UnsupportedField(f"vllm_xargs.{name}: not taken from clients", f"vllm_xargs.{name}")
    if not isinstance(fields.get("model", None), str | None):
        raise InvalidRequest("model: Input should be a valid string", "model")
    if not isinstance(fields.get("stream", None), bool | None):
        raise InvalidRequest("stream: Input should be a valid boolean", "stream")
    for name in CHOICES:
        number = fields.get(name)
        if number is not None and not (type(number) is int and 1 <= number <= MAX_CHOICES):
            raise InvalidRequest(f"{name}: Input should be an integer from 1 to {MAX_CHOICES}", name)
    salt = fields.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_NAME):
        raise InvalidRequest(f"cache_salt: Input should be a string of 1 to {MAX_NAME} characters", "cache_salt")
    return fields


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages: Input should be an array of 1 to {MAX_MESSAGES} messages", "messages")
    for number, message in enumerate(messages):
        _check_message(message, f"messages[{number}]")


def _check_message(message: Any, path: str) -> None:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{path}: Input should be an object", path)
    content = message.get("content")
    if not isinstance(content, str | list | None) or (isinstance(content, list) and len(content) > MAX_PARTS):
        raise InvalidRequest(
            f"{path}.content: Input should be a string or an array of up to {MAX_PARTS} content parts",
            f"{path}.content",
        )
    for number, part in enumerate(content if isinstance(content, list) else ()):
        where = f"{path}.content[{number}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidRequest(f"{where}.type: Field required", f"{where}.type")
        if part["type"] not in TEXT_PARTS | MEDIA_PARTS:
            known = ", ".join(sorted(TEXT_PARTS | MEDIA_PARTS))
            raise UnsupportedValue(f"{where}.type: {part['type'][:40]!r} is not one of {known}", f"{where}.type")
        if part["type"] in TEXT_PARTS and "uuid" in part:
            raise UnsupportedField(f"{where}.uuid: only media have one", f"{where}.uuid")


async def prepare(api: ApiContext, text: bytes, context: RequestContext) -> Forwarded:
    """Check a chat, and have its media encoded. Raises RequestError and ServiceError."""
    fields = _parse(text)
    _check_messages(fields.get("messages"))
    return await prepare_fields(api, Forwarded(api, context, fields, len(text)), _media_alone(fields))


async def prepare_completion(api: ApiContext, text: bytes, context: RequestContext) -> Forwarded:
    """Check a request for a completion, which has no media. Raises RequestError and ServiceError."""
    fields = _parse(text)
    given = {name: fields[name] for name in ("prompt", "timeout") if name in fields}
    asked = parse_request(CompletionRequest, msgspec.json.encode(given))
    context = context.with_timeout(asked.timeout)
    forwarded = Forwarded(api, context, fields, len(text), COMPLETIONS, len(asked.prompts))

    def check() -> None:
        for param, prompt in asked.prompts:
            api.prompt_builder.check_text(prompt, param)
        others = {name: value for name, value in fields.items() if name != "prompt"}
        api.prompt_builder.build_items([], others)

    with _preparing(forwarded, has_media=False):
        async with context.within_deadline():
            await api.executor.run(context.record.client, check)
    return forwarded


@contextmanager
def _preparing(forwarded: Forwarded, *, has_media: bool) -> Iterator[None]:
    """Hold a slot while a request for a model that is served is prepared."""
    api, context, fields = forwarded.api, forwarded.context, forwarded.fields
    assert api.servers is not None, "it is a gateway"
    api.servers.check()
    check_model(api, fields.get("model"))
    if (number := forwarded.num_choices) > (limit := api.frontend.admission.max_queue):
        name = "prompt" if forwarded.num_prompts > limit else forwarded.most_choices[1]
        raise InvalidRequest(f"{name}: {number} choices exceed the limit of {limit}", name)
    fields.pop("timeout", None)  # it is kept here
    with api.lifecycle.preparing(
        context.record,
        has_media=has_media,
        number=number,
        priority=forwarded.priority,
        timeout=context.remaining,
        generates=False,
    ):
        yield


async def prepare_fields(
    api: ApiContext, forwarded: Forwarded, conversation: MediaFields | ChatCompletionRequest
) -> Forwarded:
    """Have the media encoded of a chat whose messages have those of ``conversation`` at the same places. Raises
    RequestError and ServiceError."""
    fields, servers, parts = forwarded.fields, api.servers, media_parts(conversation.messages)
    assert servers is not None, "it is a gateway"
    forwarded.context = context = forwarded.context.with_timeout(conversation.timeout)
    with _preparing(forwarded, has_media=bool(parts)):
        placed, prompt = await _plan(api, fields, conversation, context)
    fields.pop("mm_processor_kwargs", None)  # they are in the plan
    forwarded.num_rows = sum(item.plan.rows for item in prompt.items)
    if not prompt.items:
        return forwarded
    nonce = secrets.token_hex(16)
    names = [f"media:{nonce}:{number}:" for number in range(len(placed))]
    for (m, p), name, item in zip(placed, names, prompt.items, strict=True):
        fields["messages"][m]["content"][p] = _server_part(api, item, name_of(item.key, forwarded.cache_salt), name)
    if servers.is_connected:
        forwarded.prompt = prompt
        files = (partial(file_text, item.data) for item in prompt.items)
        forwarded.pieces = dict(zip(names, files, strict=True))
        return forwarded
    media = await collect_rows(api, prompt, context, cache_salt=forwarded.cache_salt, priority=forwarded.priority)
    rows = (partial(npy_text, rows, media.layout) for _, rows in media.items)
    forwarded.pieces = dict(zip(names, rows, strict=True))
    return forwarded


def _server_part(api: ApiContext, item: PlannedItem, key: str, name: str) -> dict[str, Any]:
    """Return what a server gets for an item, with ``name`` in place of rows or the file."""
    model_type, is_connected = api.prompt_builder.model_type, api.servers is not None and api.servers.is_connected
    planner = api.prompt_builder.planner
    if isinstance(planner, PatchPlanner) and model_type.startswith(GRID_FAMILIES):
        times, rows = planner.timestamps(item.plan), "" if is_connected else name
        return grid_part(item.plan.modality, item.plan.grid, key, rows=rows, times=times)
    return file_part(name, key) if is_connected else image_part(name, item.plan.grid, key, model_type)


async def _ended(stream: TokenStream) -> None:
    """Return once a stream ends. Raises the error that it ends with."""
    async for _ in stream:
        pass


def _media_alone(fields: dict[str, Any]) -> MediaFields:
    """Return the request's media, each at its place, as chats have them, and what else is meant for this service.
    Raises InvalidRequest, naming the field."""
    blank = {"type": "text", "text": "."}
    messages = [
        {"role": "user", "content": [part if part["type"] in MEDIA_PARTS else blank for part in content]}
        if isinstance(content := message.get("content"), list)
        else {"role": "user", "content": "."}
        for message in fields["messages"]
    ]
    others = {name: fields.get(name) for name in ("mm_processor_kwargs", "timeout")}
    return parse_request(MediaFields, msgspec.json.encode({"messages": messages, **others}))


def _check_kinds(api: ApiContext, parts: Mapping[PartIndex, RequestPart]) -> None:
    """Raise UnsupportedValue for media whose embeddings servers don't take."""
    for place, part in parts.items():
        where = media_param(*place, "type")
        if isinstance(part, ImageRowsPart):
            raise UnsupportedValue(f"{where}: {part.type!r} isn't taken before a vLLM server", where)
        if why := refusal(api.prompt_builder.model_type, MODALITIES[type(part)]):
            raise UnsupportedValue(f"{where}: {part.type!r}: {why}", where)


async def _plan(
    api: ApiContext, fields: dict[str, Any], conversation: ConversationFields, context: RequestContext
) -> tuple[list[PartIndex], PlannedPrompt]:
    parts = media_parts(conversation.messages)
    _check_kinds(api, parts)
    settings = MediaSettings.from_options(api.prompt_builder.planner.options, conversation.mm_processor_kwargs)
    check_parts(api, parts, settings)
    started = context.record.now()
    async with context.within_deadline():
        media = await fetch_all(api, parts, settings, context)
        fetched = context.record.now()
        messages = [
            message | {"content": [media.get((m, p), part) for p, part in enumerate(content)]}
            if isinstance(content := message.get("content"), list)
            else message
            for m, message in enumerate(fields["messages"])
        ]
        others = {name: value for name, value in fields.items() if name != "messages"}
        build = partial(api.prompt_builder.build_items, messages, others)
        prompt = await api.executor.run(context.record.client, build)
    planner = api.prompt_builder.planner
    for item in prompt.items:
        if isinstance(planner, PatchPlanner) and (why := planner.why_untimed(item.plan)):
            raise UnsupportedValue(f"{item.param}: {why}", item.param)
    context.record.note(Interval("fetch", started, fetched), Interval("plan", fetched, context.record.now()))
    return list(parts), prompt


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def full_response(asked: Forwarded) -> bytes:
    """Return the answer as the server gave it."""
    return await whole(asked, _data_of)


def stream_response(asked: Forwarded) -> AsyncGenerator[bytes, None]:
    """Yield the answer's events as the server sends them."""
    return streamed(asked, _data_of)


def _data_of(part: AnswerPart) -> bytes:
    return part.data


async def whole(asked: Forwarded, read: Callable[[AnswerPart], T]) -> T:
    """Return what ``read`` makes of an answer that isn't streamed. Raises RequestError and ServiceError, also those
    that ``read`` raises: they end the request as its server's."""
    answering = _Answering(asked)
    with answering:
        part = await answering.relay.whole(answering.call)
        answering.note_whole(part)
        return read(part)


async def streamed(asked: Forwarded, read: Callable[[AnswerPart], T]) -> AsyncGenerator[T, None]:
    """Yield what ``read`` makes of each event of a streamed answer. Raises as ``whole``."""
    answering = _Answering(asked)
    with answering:
        async with aclosing(answering.relay.streamed(answering.call)) as parts:
            async for part in parts:
                answering.note(part)
                yield read(part)


class _Answering:
    """The answer to a request, and its record. A context manager, inside which the request is in flight."""

    def __init__(self, asked: Forwarded) -> None:
        api, context = asked.api, asked.context
        assert api.servers is not None, "it is a gateway"
        self._lifecycle, self._metrics = api.lifecycle, api.router.metrics
        self._record = context.record
        self._begin: Callable[[], ChoiceRecord] = partial(context.record.begin_choice, asked.num_rows, ())
        self._server = ""
        self._has_failed = False
        """Whether the server has said so in a stream that the client gets as it is."""
        self.relay = Relay(api.servers)
        self.call = Call(
            path=asked.path,
            form=asked.form,
            request=context.record.id,
            client=context.record.client,
            cost=asked.cost,
            num_choices=asked.num_choices,
            needs=asked.needs,
            prepared=asked.prepared,
            remaining=lambda: context.remaining,
            hold=context.hold,
            moved=partial(self._metrics.recovered, "decode"),
        )
        self._slot = self._lifecycle.holding_choices(context.record, asked.num_choices)

    def __enter__(self) -> None:
        self._slot.__enter__()
        self._choice = self._begin()
        self._metrics.admitted(self._choice)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._slot.__exit__(None, None, None)
        choice, now = self._choice, self._choice.now()
        if isinstance(error, TriptychError):
            choice.finish_reason, choice.error = "error", type(error).__name__
        elif self._has_failed or (error is None and choice.finish_reason is None):
            choice.finish_reason, choice.error = "error", InstanceLost.__name__
        elif error is not None:
            choice.finish_reason = "abort"
        first = choice.first_token or now
        times = [Interval("prefill", choice.submitted, first), Interval("decode", first, now)]
        choice.add(times, self._server)
        self._metrics.ended(choice)

    def note(self, part: AnswerPart) -> None:
        """Record what a part of a stream says."""
        self._server = part.server
        self._has_failed |= part.says is not None and part.says.error is not None
        if part.says is not None and (choices := part.says.choices):
            self._ends(part.says)
            # about: a chunk may have several tokens, which it lists only if the client has asked for that
            tokens = sum(len(one.token_ids) if one.token_ids else 1 for one in choices)
            self._metrics.received_tokens(self._choice, tokens)

    def note_whole(self, part: AnswerPart) -> None:
        """Record what an answer says that isn't streamed."""
        self._server = part.server
        if part.says is not None:
            self._ends(part.says)
            usage = part.says.usage
            self._metrics.received_whole(self._choice, (usage.completion_tokens if usage else 0) or 0)

    def _ends(self, says: ServerAnswer) -> None:
        for one in says.choices:
            self._choice.finish_reason = one.finish_reason or self._choice.finish_reason
