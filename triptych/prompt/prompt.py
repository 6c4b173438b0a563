"""Builds planned prompts from messages: tokens with placeholders expanded, positions, and media items."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
from blake3 import blake3

from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.gguf.index import WITHOUT_TOWERS
from triptych.errors import (
    CheckpointError,
    InternalError,
    InvalidRequest,
    MediaError,
    MediaMismatch,
    MediaNotServed,
    PromptTooLong,
    UnsupportedMedia,
)
from triptych.messages.identity import ModelIdentity, update_with_length
from triptych.models.backbones.rope import short_length
from triptych.models.base import MediaToken, Planner, Positions
from triptych.models.registry import family_of, identity_of, resolve
from triptych.models.shared.patch_planner import GIVEN, PatchPlanner
from triptych.models.shared.settings import text_section
from triptych.prompt.caps import MediaBudget, MediaCaps
from triptych.prompt.fitting import Fitter, name_message, place_of
from triptych.prompt.formats.catalog import find_formats
from triptych.prompt.formats.reasoning import Reasoning
from triptych.prompt.probe import probe_image
from triptych.prompt.probe_audio import probe_audio
from triptych.prompt.probe_video import probe_audio_track, probe_video
from triptych.prompt.template import REASONING_FIELDS, ChatTemplate
from triptych.prompt.template_forms import PROBE_TOOLS, find_forms
from triptych.prompt.tokenizer import Tokenizer
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SAMPLING,
    MODEL_SIZE,
    FrameSampling,
    ImageHeader,
    ItemContext,
    ItemPlan,
    MediaHeader,
    OptionValue,
    PixelBounds,
    Placement,
    RequestedSize,
    Span,
)

Message = Mapping[str, Any]
"""See ``fitting.Message``; its media parts are ``MediaPart``."""

Modality = Literal["image", "video", "audio"]


class MediaPart(TypedDict):
    """A part of a message's content that isn't text. What it doesn't say is as the model has it."""

    type: Modality
    data: bytes
    """The file."""
    field: NotRequired[str]
    """The part's field that the file came from, unless it is the URL."""
    bounds: NotRequired[PixelBounds]
    size: NotRequired[RequestedSize]
    options: NotRequired[Mapping[str, OptionValue]]
    """Those that only some families have."""
    sampling: NotRequired[FrameSampling]
    """Which frames of a video are used."""
    use_audio: NotRequired[bool]
    """Whether a video's audio track is used."""
    grid: NotRequired[tuple[int, int, int]]
    """The data are an image's rows, and these its patches in time, rows and columns."""
    num_rows: NotRequired[int]
    """How many rows the data are."""


PROBES: dict[str, Callable[[bytes], MediaHeader]] = {"image": probe_image, "video": probe_video, "audio": probe_audio}
"""Reads a file's header, for each modality."""

PLURALS = {"image": "images", "video": "videos", "audio": "audio clips"}


@dataclass(frozen=True)
class PlannedItem:
    """One media item of a prompt."""

    key: str
    """Names its embedding: 64 hexadecimal digits."""
    data: bytes
    plan: ItemPlan
    placement: Placement
    param: str
    """The request's field that it came from, for errors found later."""
    number: int
    """Its place among the request's items, from 0."""

    @property
    def is_given(self) -> bool:
        """Whether ``data`` are its rows, which needn't be encoded."""
        return isinstance(self.plan.header, ImageHeader) and self.plan.header.format == GIVEN


@dataclass(frozen=True)
class PlannedPrompt:
    """A prompt, ready to be prefilled."""

    tokens: list[int]
    """With ``plan.rows`` placeholders for each item, at its placement."""
    positions: Positions
    """Positions of all tokens."""
    items: tuple[PlannedItem, ...] = ()
    """In the order of their placements, which is the template's and may not be the request's."""
    reasoning: Reasoning = Reasoning.NONE
    """Whether the answer begins with reasoning."""
    lora: str = ""
    """Name of the LoRA that it is computed with; empty: none."""
    num_added: tuple[int, int] = (0, 0)
    """Number of tokens that the tokenizer put before and after a text."""


@dataclass(frozen=True)
class _UnplacedItem:
    """A media item before it has a place in the prompt."""

    data: bytes
    plan: ItemPlan
    label: str
    """See ``Planner.label``."""
    param: str
    number: int


@dataclass(frozen=True)
class Among:
    """An item's place among the request's other items."""

    siblings: int
    """Others of its modality."""
    modalities: frozenset[str]
    """Modalities of all items."""
    index: int
    """Items of its modality before it."""


def media_param(message: int, part: int, field: str) -> str:
    """Return the field that errors name for an item: the one that its bytes came from."""
    return f"messages[{message}].content[{part}].{field}"


class PromptBuilder:
    """Builds prompts for the model of a checkpoint folder.

    ``context_length`` is the longest prompt in tokens: the model's own, or the given one if that is shorter.
    ``short_length`` is ``models.backbones.rope.short_length``. ``caps`` limit the media of a request. ``modalities``
    are those that both the model and its template support; ``audio_in_video`` is whether a video's audio track can be
    used. ``model_type`` is config.json's. ``reasoning_parser`` and ``tool_call_parser`` are vLLM's names for
    ``formats`` other than those found.

    Raises CheckpointError for a folder that can't be served, and ConfigError for an unknown name.
    """

    def __init__(
        self,
        folder: Path,
        context_length: int | None = None,
        caps: MediaCaps | None = None,
        *,
        reasoning_parser: str = "",
        tool_call_parser: str = "",
    ) -> None:
        self._folder = folder = Path(folder)
        config = load_config(folder)
        self._family = family_of(config)
        self._lacks_towers = bool(config.get(WITHOUT_TOWERS))
        self.model_type = str(config.get("model_type", ""))
        self.planner: Planner = resolve(self._family.planner)(
            config, load_preprocessor_config(folder), load_video_config(folder)
        )
        self._caps = caps or MediaCaps()
        template = self._family.template
        self.template = ChatTemplate(
            folder,
            None if template is None else resolve(template),
            ignores_tokenizers=self._family.ignores_tokenizers_template,
        )
        self.tokenizer = Tokenizer(folder)
        self.formats = find_formats(
            self.template.render, self.template.source, self.tokenizer, reasoning_parser, tool_call_parser
        )
        self.context_length: int = min(self.planner.context_length, context_length or self.planner.context_length)
        self.short_length = short_length(text_section(config))
        placed = {name: self._spelling(token) for name, token in self.planner.placeholder_tokens.items()}
        placed |= self.planner.template_texts
        self._modalities = {text: name for name, text in placed.items()}
        self._placeholder_ids = frozenset(map(self._id, self.planner.placeholder_tokens.values()))
        markers = (self.tokenizer.id_of(text) for text in self.planner.markers)
        self._media_ids = frozenset(map(self._id, self.planner.media_tokens)).union(
            marker for marker in markers if marker is not None
        )
        for token in {*self.planner.placeholder_tokens.values(), *self.planner.media_tokens}:
            self._check_token(token)
        tokens = map(self._spelling, self.planner.media_tokens)
        self._media_texts = sorted({*tokens, *placed.values(), *self.planner.markers})
        self._placeholder = re.compile("|".join(map(re.escape, self._modalities)) or r"(?!)")
        places = {name: (place_of(name), text) for name, text in placed.items()}
        plain, with_tools = (
            Fitter(find_forms(partial(self.template.render, tools=tools), places), placed, self.formats.write)
            for tools in (None, PROBE_TOOLS if self.template.supports_tools else None)
        )
        self._fitters = {False: plain, True: with_tools}
        """By whether a request has tools."""
        self.modalities = [name for spelling, name in self._modalities.items() if self._places(name, spelling)]
        self.audio_in_video = self.planner.audio_in_video and "video" in self.modalities

    @cached_property
    def identity(self) -> ModelIdentity:
        """The model's identity. Determining it may read all weights, and raises CheckpointError if that fails."""
        return identity_of(self._folder)

    def build(
        self,
        messages: Sequence[Message],
        context_length: int | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> PlannedPrompt:
        """Plan one request. Reads media headers and decodes nothing.

        ``context_length`` is the instances' current limit, if it is below the builder's own. ``add_generation_prompt``
        ends the prompt with the start of an answer, ``continue_final_message`` with the last message's text instead.
        ``template_variables`` go to the template, such as ``tools``.

        Raises InvalidRequest for text with the model's media tokens and for messages that the template rejects, and
        MediaError for an item that can't be used; both name the field. Raises PromptTooLong, and InternalError if the
        template places an item twice.
        """
        self._refuse_media_tokens(messages, "messages")
        for name, value in template_variables.items():
            self._refuse_media_tokens(value, name)
        messages = self.formats.with_ids(messages)
        media = list(self._plan_media(messages))
        longest = min(self.context_length, context_length or self.context_length)
        _check_length(1 + sum(one.plan.rows for one in media), longest, "messages", is_least=True)
        fitter = self._fitters[bool(template_variables.get("tools"))]
        fitted = fitter.fit(messages, continues=continue_final_message)
        try:
            text = self.template.render(
                [one.message for one in fitted], add_generation_prompt, continue_final_message, **template_variables
            )
        except InvalidRequest as error:
            raise name_message(error, fitted, partial(self.template.render, **template_variables)) from error
        media = self._as_placed(text, media)
        plans = [one.plan for one in media]
        # as transformers' processors do, which models with media have; tokenizers of text models add nothing
        adds_special = self._family.takes_media and not self.template.starts_sequence(text)
        rendered = self._encode(self._with_placeholders(text, media), longest, "messages", adds_special)
        runs = [run for plan in plans for run in _runs(plan, self.planner.runs(plan))]
        if (placed := sum(map(rendered.count, self._placeholder_ids))) != len(runs):
            raise InternalError(f"the prompt has {placed} placeholders for {len(runs)} runs of rows")
        num_tokens = len(rendered) + sum(plan.rows for plan in plans) - len(runs)
        _check_length(num_tokens, longest, "messages")
        tokens, spans = self._expand(rendered, runs)
        placements = _placements(spans, [len(self.planner.runs(plan)) for plan in plans])
        return PlannedPrompt(
            tokens=tokens,
            positions=self.planner.positions(num_tokens, placements, plans),
            items=tuple(
                PlannedItem(self._key(one.data, one.plan), one.data, one.plan, placement, one.param, one.number)
                for one, placement in zip(media, placements, strict=True)
            ),
            reasoning=self._reasoning(text, fitted[-1].message if continue_final_message else None),
            lora=self._lora(plans),
        )

    def build_items(self, messages: Sequence[Message], texts: Mapping[str, Any]) -> PlannedPrompt:
        """Plan the media of a conversation whose prompt another engine makes: the items in the request's order, and no
        tokens. ``texts`` are what else gets into that prompt. Raises as ``build``."""
        self._refuse_media_tokens(messages, "messages")
        for name, value in texts.items():
            self._refuse_media_tokens(value, name)
        media = list(self._plan_media(messages))
        _check_length(1 + sum(one.plan.rows for one in media), self.context_length, "messages", is_least=True)
        placements = [Placement((Span(0, one.plan.rows),)) for one in media]
        return PlannedPrompt(
            tokens=[],
            positions=self.planner.positions(0, [], []),
            items=tuple(
                PlannedItem(self._key(one.data, one.plan), one.data, one.plan, placement, one.param, one.number)
                for one, placement in zip(media, placements, strict=True)
            ),
        )

    def build_text(
        self,
        prompt: str | Sequence[int],
        context_length: int | None = None,
        /,
        *,
        param: str = "prompt",
        add_special_tokens: bool = True,
    ) -> PlannedPrompt:
        """Plan a prompt without a template, from text or tokens. Raises InvalidRequest for the model's media tokens and
        for an empty prompt, and PromptTooLong; both name ``param``."""
        longest = min(self.context_length, context_length or self.context_length)
        num_added = (0, 0)
        self.check_text(prompt, param)
        if isinstance(prompt, str):
            num_added = self.tokenizer.num_added if add_special_tokens else num_added
            tokens = self._encode(prompt, longest, param, add_special_tokens)
        else:
            tokens = list(prompt)
        if not tokens:
            raise InvalidRequest(f"{param} has no tokens", param)
        _check_length(len(tokens), longest, param)
        return PlannedPrompt(tokens, self.planner.positions(len(tokens), [], []), num_added=num_added)

    def check_text(self, prompt: str | Sequence[int], param: str) -> None:
        """Raise InvalidRequest, naming ``param``, for a text or tokens with the model's media tokens."""
        if isinstance(prompt, str):
            self._refuse_media_tokens(prompt, param)
        elif forbidden := self._media_ids.intersection(prompt):
            raise InvalidRequest(f"{param} may not contain token {min(forbidden)}, which stands for media", param)

    def _reasoning(self, text: str, continued: Message | None) -> Reasoning:
        if continued is None or not self.formats.reasoning:
            return self.formats.reasoning_at_end(text)
        return self.formats.reasoning_at_end(text, _continued_text(continued, self.formats.reasoning[0].open))

    def _encode(self, text: str, longest: int, param: str, add_special_tokens: bool = False) -> list[int]:
        # megabytes of text would take seconds to tokenize, only to be rejected then
        _check_length(self.tokenizer.min_num_tokens(text), longest, param, is_least=True)
        return self.tokenizer.encode(text, add_special_tokens)

    def _id(self, token: MediaToken) -> int:
        found = self.tokenizer.id_of(token) if isinstance(token, str) else token
        if found is None:
            raise CheckpointError(f"tokenizer.json has no token {token!r}, which stands for media")
        return found

    def _spelling(self, token: MediaToken) -> str:
        spelled = self.tokenizer.token_of(self._id(token))
        if not spelled:
            raise CheckpointError(f"tokenizer.json has no token {token}, which config.json gives to media")
        return spelled

    def _check_token(self, token: MediaToken) -> None:
        """Raise CheckpointError for a token that the tokenizer has, but never makes of its text: media would have no
        place, and what surrounds them would be other tokens."""
        spelled = self._spelling(token)
        if self.tokenizer.encode(spelled).count(self._id(token)) != 1:
            raise CheckpointError(f"tokenizer.json doesn't read {spelled!r}, which stands for media, as one token")

    def _places(self, modality: str, placeholder: str) -> bool:
        """Return whether the template places media of a modality; True if that can't be determined."""
        try:
            (fitted,) = self._fitters[False].fit([{"role": "user", "content": [place_of(modality)]}])
            return placeholder in self.template.render([fitted.message])
        except InvalidRequest:
            return True

    def _refuse_media_tokens(self, value: Any, path: str) -> None:
        """Reject media tokens and markers from the client, which would claim rows that don't exist, or fake the borders
        of media. Only the template may add them.

        Templates join texts, so a token that is split between two texts counts too.
        """
        longest = max(map(len, self._media_texts), default=0)
        before = ""
        for param, text, is_alone in _texts(value, path):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest("the text is not valid Unicode: it has half of a surrogate pair", param) from None
            joined = text if is_alone else before + text
            for token in self._media_texts:
                if token in joined:
                    raise InvalidRequest(f"the text may not contain {token}, which stands for media", param)
            if not is_alone:
                before = joined[-longest:] if longest else ""

    def _plan_media(self, messages: Sequence[Message]) -> Iterator[_UnplacedItem]:
        counted = MediaBudget(self._caps)
        contents = [message.get("content") for message in messages]
        lists = [(i, content) for i, content in enumerate(contents) if isinstance(content, list)]
        totals = Counter(part["type"] for _, content in lists for part in content)
        planned: Counter[str] = Counter()
        for i, content in lists:
            for j, part in enumerate(content):
                if (modality := part["type"]) not in PROBES:
                    continue
                param = media_param(i, j, part.get("field", f"{modality}_url.url"))
                try:
                    among = Among(totals[modality] - 1, frozenset(totals).intersection(PROBES), planned[modality])
                    plan, label = self._plan(part, counted, among)
                except MediaError as error:
                    error.param = param
                    raise
                yield _UnplacedItem(part["data"], plan, label, param, planned.total())
                planned[modality] += 1

    def check_takes_media(self) -> None:
        """Raise MediaNotServed if the model takes text alone."""
        if not self._family.takes_media:
            hint = "; if it has encoders, the operator gives their GGUF file as --mmproj" if self._lacks_towers else ""
            raise MediaNotServed(f"this model takes text alone{hint}")

    def _plan(self, part: MediaPart, counted: MediaBudget, among: Among) -> tuple[ItemPlan, str]:
        """Return an item's plan and its label."""
        modality = part["type"]
        self.check_takes_media()
        if modality not in self.modalities:
            raise UnsupportedMedia(f"the model takes no {PLURALS[modality]}")
        if (grid := part.get("grid")) is not None:
            return self._plan_rows(grid, part["num_rows"], counted), ""
        header = PROBES[modality](part["data"])
        counted.add_header(header)
        audio_track = probe_audio_track(part["data"]) if part.get("use_audio") else None
        if audio_track is not None:
            counted.add_header(audio_track)
        context = ItemContext(
            part.get("bounds", MODEL_BOUNDS),
            part.get("sampling", MODEL_SAMPLING),
            audio_track,
            siblings=among.siblings,
            modalities=among.modalities,
            options=part.get("options", {}),
            index=among.index,
            size=part.get("size", MODEL_SIZE),
        )
        plan = self.planner.plan(header, context)
        counted.add_plan(plan)
        return plan, self.planner.label(plan, context)

    def _plan_rows(self, grid: tuple[int, int, int], num_rows: int, counted: MediaBudget) -> ItemPlan:
        """Return the plan of an image whose rows are given."""
        if not isinstance(self.planner, PatchPlanner):
            raise UnsupportedMedia("the model takes no embeddings")
        plan = self.planner.plan_rows(grid)
        counted.add_plan(plan)
        if plan.rows != num_rows:
            raise MediaMismatch(f"{num_rows} rows, and the grid has {plan.rows}")
        return plan

    def _lora(self, plans: Sequence[ItemPlan]) -> str:
        """Return the name of the LoRA of a request with these items; empty: none."""
        modalities = {plan.modality for plan in plans}
        return next((lora for modality, lora in self.planner.loras.items() if modality in modalities), "")

    def _as_placed(self, text: str, media: Sequence[_UnplacedItem]) -> list[_UnplacedItem]:
        """Return the items in the order of the rendered template, which may place a modality before another. Raises
        InvalidRequest if the template omits items, and InternalError if it places more."""
        placed = [self._modalities[place[0]] for place in self._placeholder.finditer(text)]
        if len(placed) < len(media):
            # some templates place media only in certain messages, such as those of users
            raise InvalidRequest(
                f"the model's chat template has a place for {len(placed)} of {len(media)} items", "messages"
            )
        if Counter(placed) != Counter(one.plan.modality for one in media):
            raise InternalError(f"the chat template placed {len(placed)} items of {len(media)}, or of other modalities")
        waiting = {kind: iter([one for one in media if one.plan.modality == kind]) for kind in set(placed)}
        return [next(waiting[kind]) for kind in placed]

    def _with_placeholders(self, text: str, media: Sequence[_UnplacedItem]) -> str:
        """Replace each item's placeholder in the rendered template by its label and its planned text; ``media`` are in
        the template's order."""
        pieces = []
        copied = 0
        for place, one in zip(self._placeholder.finditer(text), media, strict=True):
            placeholder = self.planner.placeholder(one.plan, self._spelling)
            pieces += [text[copied : place.start()], one.label, placeholder]
            copied = place.end()
        return "".join(pieces) + text[copied:]

    def _expand(self, rendered: Sequence[int], runs: Sequence[tuple[int, bool, int]]) -> tuple[list[int], list[Span]]:
        """Repeat each placeholder once for each row of its run; return the tokens and the runs' spans. A run is the
        fields of its span but for the first."""
        tokens: list[int] = []
        spans: list[Span] = []
        for token in rendered:
            if token not in self._placeholder_ids:
                tokens.append(token)
                continue
            spans.append(Span(len(tokens), *runs[len(spans)]))
            tokens += [token] * spans[-1].length
        return tokens, spans

    def _key(self, data: bytes, plan: ItemPlan) -> str:
        """Return the 256-bit BLAKE3 digest, in hexadecimal, of the model's identity, the plan (MessagePack) and the
        item's bytes, each preceded by its length."""
        digest = blake3()
        for field in (self.identity.digest.encode(), msgspec.msgpack.encode(plan), data):
            update_with_length(digest, field)
        return digest.hexdigest()


def _runs(plan: ItemPlan, lengths: Sequence[int]) -> Iterator[tuple[int, bool, int]]:
    """Yield each run of an item's rows: its length, whether it is an atomic span, and its rows of second weights."""
    left = plan.second
    for length in lengths:
        yield length, plan.atomic, min(length, left)
        left = max(0, left - length)


def _placements(spans: Sequence[Span], counts: Sequence[int]) -> list[Placement]:
    """Group the spans by item; ``counts`` are the numbers of spans of each."""
    rest = iter(spans)
    return [Placement(tuple(itertools.islice(rest, count))) for count in counts]


def _check_length(num_tokens: int, longest: int, param: str, *, is_least: bool = False) -> None:
    if num_tokens > longest:
        raise PromptTooLong.of(longest, num_tokens, param=param, is_least=is_least)


def _texts(value: Any, path: str, is_alone: bool = False) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, text, is_alone) of every string within, in order, keys included. ``is_alone`` marks those that
    templates don't join with other texts: keys, and the values of ``type`` and ``role``."""
    if isinstance(value, str):
        yield path, value, is_alone
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield path, key, True
            yield from _texts(member, f"{path}.{key}", key in ("type", "role"))
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            yield from _texts(member, f"{path}[{i}]")


def _continued_text(message: Message, tag: str) -> str:
    """Return the text of a fitted message that is continued: its reasoning behind a tag, if that is continued."""
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return text or tag + next((message[name] for name in REASONING_FIELDS if message.get(name)), "")
