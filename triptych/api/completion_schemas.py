"""What clients send to ``/v1/completions``, ``/tokenize`` and ``/detokenize``. The rules: ``fields.py``."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from triptych.api.fields import (
    MAX_TOKENS_LIMIT,
    STRING,
    TEXTS,
    TOKEN_LISTS,
    TOKENS,
    SamplingFields,
    Strict,
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
    """The body of ``POST /v1/completions``. ``suffix`` is there to be refused: the models served here don't fill in the
    middle of texts. ``echo`` begins the answer with the prompt, in ``logprobs`` too; with ``max_tokens: 0`` it is all
    there is."""

    model: str
    prompt: Prompt
    max_tokens: int | None = Field(16, ge=0, le=MAX_TOKENS_LIMIT)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    suffix: Literal[""] | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest("best_of: nothing but n is supported: all choices are told", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens: 0 is only for echo: true", "max_tokens")

    @property
    def scores_prompt(self) -> int | None:
        """How many of the likeliest tokens to tell of in the place of each of the prompt's; None: nothing of either."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((most for most in asked if most is not None), default=None)

    @property
    def prompts(self) -> list[tuple[str, str | list[int]]]:
        """Each with the path that names it."""
        several: Any = self.prompt
        if isinstance(several, str) or (several and isinstance(several[0], int)):
            return [("prompt", several)]
        return [(f"prompt[{number}]", one) for number, one in enumerate(several)]


class TokenizeConversation(ConversationFields):
    """The body of ``POST /tokenize`` for messages. ``model`` may be left out."""

    model: str | None = None  # type: ignore[assignment]
    return_token_strs: bool = False


class TokenizeText(Strict):
    """The body of ``POST /tokenize`` for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """The body of ``POST /detokenize``: the text of all tokens, special ones included."""

    model: str | None = None
    tokens: TokenIds
