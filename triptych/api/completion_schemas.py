"""Request schemas of ``/v1/completions``, ``/tokenize`` and ``/detokenize``, by the rules of ``fields.py``."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from triptych.api import field_table
from triptych.api.fields import (
    MAX_TOKENS_LIMIT,
    STRING,
    TEXTS,
    TOKEN_LISTS,
    TOKENS,
    SamplingFields,
    StrictModel,
    TokenIds,
)
from triptych.api.schemas import ConversationFields
from triptych.errors import InvalidRequest

MAX_PROMPTS = 1024


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return STRING
    if not isinstance(value, list):
        return None
    if value and isinstance(value[0], int):
        return TOKENS
    return TOKEN_LISTS if value and isinstance(value[0], list) else TEXTS


Prompt = Annotated[
    Annotated[str, Tag(STRING)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TEXTS)]
    | Annotated[TokenIds, Tag(TOKENS)]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag(TOKEN_LISTS)],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="Input should be a string, token ids, or an array of one or the other",
    ),
]


class CompletionRequest(SamplingFields):
    """The body of ``POST /v1/completions``."""

    rules = field_table.COMPLETION
    model: str | None = None
    """The only one by default."""
    prompt: Prompt
    max_tokens: int | None = Field(16, ge=0, le=MAX_TOKENS_LIMIT)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    """Begin the answer and its ``logprobs`` with the prompt. With ``max_tokens: 0``, the answer is only the prompt."""
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 is only for echo: true", "max_tokens")

    @property
    def scores_prompt(self) -> int | None:
        """How many alternatives to score for each prompt token; None if the prompt isn't scored."""
        requested = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((num_top for num_top in requested if num_top is not None), default=None)

    @property
    def prompts(self) -> list[tuple[str, str | list[int]]]:
        """The prompts, each with its path in the request."""
        several: Any = self.prompt
        if isinstance(several, str) or (several and isinstance(several[0], int)):
            return [("prompt", several)]
        return [(f"prompt[{number}]", one) for number, one in enumerate(several)]


class TokenizeConversation(ConversationFields):
    """The body of ``POST /tokenize`` for messages."""

    return_token_strs: bool = False


class TokenizeText(StrictModel):
    """The body of ``POST /tokenize`` for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    """The body of ``POST /detokenize``: the text of all tokens, special ones included."""

    model: str | None = None
    tokens: TokenIds
