"""``/tokenize`` and ``/detokenize``: what the model would be given, and what its tokens say."""

from functools import partial
from typing import Any

import msgspec

from triptych.api.completion_schemas import DetokenizeRequest, TokenizeConversation, TokenizeText
from triptych.api.conversation import planned
from triptych.api.generation import RequestContext, check_model
from triptych.api.parsing import parse
from triptych.api.service import Service
from triptych.observe.requests import current_client
from triptych.prompt.prompt import PlannedPrompt


class _Kind(msgspec.Struct):
    """What is looked for first; the rest is skipped."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def parse_tokenize(body: bytes) -> TokenizeConversation | TokenizeText:
    """Messages where there are any, otherwise a text. Raises InvalidRequest."""
    try:
        has_messages = msgspec.json.decode(body, type=_Kind).messages is not msgspec.UNSET
    except (msgspec.DecodeError, ValueError, RecursionError):
        has_messages = False
    return parse(TokenizeConversation, body) if has_messages else parse(TokenizeText, body)


async def tokenize(
    service: Service, request: TokenizeConversation | TokenizeText, context: RequestContext
) -> dict[str, Any]:
    """``objects.Tokenized``; media count with all tokens that stand for them. Raises RequestError and ServiceError."""
    with service.router.holding_slot():
        async with context.in_time():
            tokens = (await _prompt(service, request, context)).tokens
            names = None
            if request.return_token_strs:
                names = await service.planning.run(current_client(), partial(_spelled, service, tokens))
    return {"count": len(tokens), "max_model_len": service.context_length, "tokens": tokens, "token_strs": names}


async def _prompt(
    service: Service, request: TokenizeConversation | TokenizeText, context: RequestContext
) -> PlannedPrompt:
    if not isinstance(request, TokenizeText):
        return (await planned(service, request, context))[0]
    check_model(service, request.model)
    build = partial(
        service.prompt_builder.build_text,
        request.prompt,
        service.context_length,
        add_special_tokens=request.add_special_tokens,
    )
    return await service.planning.run(current_client(), build)


def _spelled(service: Service, tokens: list[int]) -> list[str]:
    return [service.tokenizer.token_of(token) or "" for token in tokens]


async def detokenize(service: Service, request: DetokenizeRequest, context: RequestContext) -> dict[str, str]:
    """``objects.Detokenized``. Raises RequestError and ServiceError."""
    check_model(service, request.model)
    decode = partial(service.tokenizer.decode, request.tokens, skip_special_tokens=False)
    with service.router.holding_slot():
        async with context.in_time():
            return {"prompt": await service.planning.run(current_client(), decode)}
