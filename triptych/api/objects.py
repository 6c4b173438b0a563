"""Response schemas. The OpenAPI document is generated from them, and tests validate answers against them.

Answers are dicts at run time, because a stream has thousands of them."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class TokenDetails(TypedDict):
    cached_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts. ``cached_tokens`` counts prompt tokens that were in the KV cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    completion_tokens_details: NotRequired[OutputDetails]


class StageTiming(TypedDict):
    """One interval of a request's timeline, relative to the request's arrival."""

    stage: str
    item: NotRequired[int | None]
    start_ms: float
    end_ms: float


class Logprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Logprob):
    top_logprobs: list[Logprob]


class PromptLogprob(TypedDict):
    """``rank`` is 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, the token itself and the likeliest alternatives by token id; null for the first token."""


class ChatLogprobs(TypedDict):
    content: list[TokenLogprobs]
    refusal: None


class ToolCallFunction(TypedDict):
    name: str
    arguments: str


class MessageToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class CustomToolCallInput(TypedDict):
    name: str
    input: str


class MessageCustomToolCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CustomToolCallInput


class Message(TypedDict):
    """``reasoning`` (vLLM's name) and ``reasoning_content`` (SGLang's name) are the same text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[MessageToolCall | MessageCustomToolCall]]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


FinishReason = Literal["stop", "length", "tool_calls"]
StopReason = str | int | None
"""The stop string, or the token of ``stop_token_ids``, that ended the answer, as in vLLM."""


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: PromptLogprobs | None
    timeline: NotRequired[list[StageTiming]]


class FunctionDelta(TypedDict, total=False):
    name: str
    arguments: str


class CustomDelta(TypedDict, total=False):
    name: str
    input: str


class ToolCallDelta(TypedDict):
    """What is new of a call: of a function or, of a custom tool, its input."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class MessageDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]
    reasoning: str
    reasoning_content: str


class ChunkChoice(TypedDict):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage]
    prompt_token_ids: NotRequired[list[int]]
    timeline: NotRequired[list[StageTiming]]


class CompletionLogprobs(TypedDict):
    """An entry for each token, null for the first of a prompt; ``text_offset`` is in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[StopReason]
    prompt_token_ids: NotRequired[list[int] | None]
    token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class TextCompletion(TypedDict):
    """A completion, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]
    timeline: NotRequired[list[StageTiming]]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class MediaSize(TypedDict):
    height: int
    width: int


class MediaItem(TypedDict):
    """One media item of a conversation."""

    index: int
    type: Literal["image", "video", "audio"]
    key: str
    """Names the item's content, plan and model: equal ones have equal rows."""
    tokens: int
    """Rows, which are the prompt's tokens for the item."""
    grid_thw: list[int]
    """Patches in time, rows and columns."""
    size: NotRequired[MediaSize]
    """What it is resized to, in pixels; not for audio."""
    seconds: NotRequired[float]
    """Length of a video or of audio."""


class EmbeddingItem(MediaItem):
    """One media item's embedding. ``rows`` is a NumPy file in base64; a safetensors answer has a tensor instead."""

    object: Literal["embedding"]
    shape: list[int]
    rows: NotRequired[str]


class MediaPlan(MediaItem):
    """What becomes of one media item, known from its header."""

    object: Literal["media.plan"]
    file_bytes: int
    file_size: NotRequired[MediaSize]
    """Size of the image, or of the video's frames, in pixels."""
    frames: NotRequired[int]
    """Frames of a video that are used."""
    parts: int
    """Parts that are encoded by themselves."""
    patches: int
    cost: float
    """Cost of encoding, in units of the work that the tower's linear layers do for one patch."""
    bytes: int | None
    """Size of its rows; null before an encode instance has joined."""
    cached: bool
    """Whether an encode instance probably has its rows, or is encoding them."""


class KeptMedia(MediaItem):
    """One media item that was encoded ahead of questions."""

    object: Literal["media"]
    uuid: str
    """What stands for it in chats of the same API key."""
    expires_at: int
    """Until when that holds, in seconds since the epoch; less if the cache of such files is full."""
    cached: bool
    """Whether an encode instance probably has its rows now: chats then don't encode it again."""


class KeptMediaList(TypedDict):
    """The media of a conversation, in its order."""

    object: Literal["list"]
    model: str
    data: list[KeptMedia]


class PlannedAdmission(TypedDict):
    """Whether the request would be admitted now. Forecasts are null while too little is known."""

    admitted: bool
    wait_seconds: float | None
    """Until work on it begins."""
    answer_seconds: float | None
    """Until it is answered."""
    error: "ErrorDetails | None"
    """What the request would be answered with otherwise."""
    retry_after: int | None
    """Seconds after which it may be admitted."""


class PromptPlan(TypedDict):
    """What becomes of a chat request."""

    object: Literal["plan"]
    model: str
    prompt_tokens: int
    """Tokens of the whole prompt, those of its media included."""
    max_tokens: int
    """Tokens that the answer may have at most."""
    data: list[MediaPlan]
    """Its media, in the request's order."""
    admission: PlannedAdmission


class EmbeddingList(TypedDict):
    """The embeddings of a conversation's media, in its order."""

    object: Literal["list"]
    model: str
    model_type: str
    """config.json's."""
    dtype: str
    width: int
    """Values of a row: the embedding's and, after it, those of each deepstack level."""
    weight_dtype: str
    layout: str
    """Digest of the model and of all of the above: only rows of one layout may be mixed."""
    data: list[EmbeddingItem]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    input_modalities: list[str]
    reasoning_parser: str | None
    tool_call_parser: str | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Version(TypedDict):
    version: str


class Health(TypedDict):
    status: Literal["ok"]


class Ready(TypedDict):
    """``reason`` is only there if the service isn't ready."""

    ready: bool
    reason: NotRequired[str]


class ErrorDetails(TypedDict):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class Error(TypedDict):
    error: ErrorDetails


class InputDetails(TypedDict):
    """``cache_write_tokens`` is always 0: writing to the prefix cache isn't metered."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(TypedDict):
    """``output`` has items of the types reasoning, message and function_call. Most other fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: NotRequired[str]
    timeline: NotRequired[list[StageTiming]]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseInputItems(TypedDict):
    """The items of a response's conversation before its answer."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(TypedDict):
    """One event of a streamed response; further fields depend on its type."""

    type: str
    sequence_number: int


class AnthropicUsage(TypedDict):
    """Token counts. ``input_tokens`` are those of the prompt that were not in the KV cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of the types ``thinking``, ``text`` and ``tool_use``."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage
    timeline: NotRequired[list[StageTiming]]


class AnthropicEvent(TypedDict):
    """An event of a streamed answer of ``/v1/messages``; which other members it has depends on its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: NotRequired[dict[str, Any]]
    index: NotRequired[int]
    content_block: NotRequired[dict[str, Any]]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[AnthropicUsage]
    error: NotRequired[dict[str, str]]
    timeline: NotRequired[list[StageTiming]]


class TokenCount(TypedDict):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
