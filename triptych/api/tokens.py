"""``/tokenize`` and ``/detokenize``: the tokens of a prompt, and the text of tokens."""

from functools import partial
from typing import Any

import msgspec

from triptych.api.completion_schemas import DetokenizeRequest, TokenizeConversation, TokenizeText
from triptych.api.context import ApiContext
from triptych.api.conversation import plan_conversation
from triptych.api.generation import RequestContext, check_model
from triptych.api.validation import parse_request
from triptych.prompt.prompt import PlannedPrompt


class _Kind(msgspec.Struct):
    """Shows whether a body has messages; the rest is not decoded."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def parse_tokenize(body: bytes) -> TokenizeConversation | TokenizeText:
    """Parse a body as a conversation if it has messages, otherwise as a text. Raises InvalidRequest."""
    try:
        has_messages = msgspec.json.decode(body, type=_Kind).messages is not msgspec.UNSET
    except (msgspec.DecodeError, ValueError, RecursionError):
        has_messages = False
    return parse_request(TokenizeConversation, body) if has_messages else parse_request(TokenizeText, body)


async def tokenize(
    api: ApiContext, request: TokenizeConversation | TokenizeText, context: RequestContext
) -> dict[str, Any]:
    """Return ``objects.Tokenized``, with all tokens of media. Raises RequestError and ServiceError."""
    with api.lifecycle.holding_slot(context.record):
        async with context.within_deadline():
            tokens = (await _prompt(api, request, context)).tokens
            names = None
            if request.return_token_strs:
                names = await api.executor.run(context.record.client, partial(_token_strings, api, tokens))
    return {"count": len(tokens), "max_model_len": api.context_length, "tokens": tokens, "token_strs": names}


async def _prompt(
    api: ApiContext, request: TokenizeConversation | TokenizeText, context: RequestContext
) -> PlannedPrompt:
    if not isinstance(request, TokenizeText):
        return (await plan_conversation(api, request, context))[0]
    check_model(api, request.model)
    build = partial(
        api.prompt_builder.build_text,
        request.prompt,
        api.context_length,
        add_special_tokens=request.add_special_tokens,
    )
    return await api.executor.run(context.record.client, build)


def _token_strings(api: ApiContext, tokens: list[int]) -> list[str]:
    return [api.tokenizer.token_of(token) or "" for token in tokens]


async def detokenize(api: ApiContext, request: DetokenizeRequest, context: RequestContext) -> dict[str, str]:
    """Return ``objects.Detokenized``. Raises RequestError and ServiceError."""
    check_model(api, request.model)
    decode = partial(api.tokenizer.decode, request.tokens, skip_special_tokens=False)
    with api.lifecycle.holding_slot(context.record):
        async with context.within_deadline():
            return {"prompt": await api.executor.run(context.record.client, decode)}
