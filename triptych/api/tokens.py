"""``/tokenize`` and ``/detokenize``: what the model would be given, and what its tokens say."""

import asyncio
import json
from typing import Any

from triptych.api.completion_schemas import DetokenizeRequest, TokenizeConversation, TokenizeText
from triptych.api.conversation import planned
from triptych.api.generation import Caller, check_model
from triptych.api.parsing import parse
from triptych.api.service import Service


def parse_tokenize(body: bytes) -> TokenizeConversation | TokenizeText:
    """Messages where there are any, otherwise a text. Raises InvalidRequest."""
    try:
        has_messages = "messages" in json.loads(body)
    except (ValueError, TypeError, RecursionError):
        has_messages = False
    return parse(TokenizeConversation, body) if has_messages else parse(TokenizeText, body)


async def tokenize(service: Service, request: TokenizeConversation | TokenizeText, caller: Caller) -> dict[str, Any]:
    """``objects.Tokenized``; media count with all tokens that stand for them. Raises RequestError and ServiceError."""
    if isinstance(request, TokenizeText):
        check_model(service, request.model)
        prompt = await asyncio.to_thread(
            service.prompt_builder.build_text,
            request.prompt,
            service.context_length,
            add_special_tokens=request.add_special_tokens,
        )
    else:
        prompt, _ = await planned(service, request, caller)
    tokens = prompt.tokens
    names = [service.tokenizer.token_of(token) or "" for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": service.context_length, "tokens": tokens, "token_strs": names}


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, str]:
    """``objects.Detokenized``. Raises UnknownModel."""
    check_model(service, request.model)
    text = await asyncio.to_thread(service.tokenizer.decode, request.tokens, skip_special_tokens=False)
    return {"prompt": text}
