"""What the HTTP handlers stand on."""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from triptych.api.fair_threads import FairExecutor
from triptych.api.fields import MinP, RepetitionPenalty, Temperature, TopK, TopP
from triptych.api.held import MemoryBudget
from triptych.api.named_media import NamedMedia
from triptych.api.observed import Observer
from triptych.checkpoint.config_files import GENERATION_CONFIG, load_generation_config
from triptych.config import FrontendConfig
from triptych.errors import CheckpointError
from triptych.prompt.media import MediaSource
from triptych.prompt.prompt import PromptBuilder
from triptych.prompt.tokenizer import Tokenizer
from triptych.router.router import Router


class _GenerationConfig(BaseModel):
    """What of ``generation_config.json`` matters here. A default is what a request could ask for; null means unset."""

    model_config = ConfigDict(strict=True)

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's own sampling, for what requests leave open. Without one, OpenAI's defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> "GenerationDefaults":
        """From the folder's ``generation_config.json``, in which a ``do_sample`` that is false or unset means greedy.
        What vLLM reads there as well, but for ``max_new_tokens``: that would cut answers short.
        Raises CheckpointError, naming file and field, for a value that a request couldn't ask for."""
        values = load_generation_config(folder)
        if not values:
            return cls()
        try:
            config = _GenerationConfig.model_validate(values)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            raise CheckpointError(
                f"{folder / GENERATION_CONFIG}: {detail['loc'][0]} {detail['input']!r}: {detail['msg']}"
            ) from None
        given = {name: value for name, value in config.model_dump(exclude={"do_sample"}).items() if value is not None}
        return cls(**given | ({} if config.do_sample else {"temperature": 0.0}))


@dataclass(frozen=True)
class Service:
    """The frontend's parts, wired together by ``roles/frontend.py``. ``observers`` are told of every request once
    it is over."""

    model_name: str
    router: Router
    prompt_builder: PromptBuilder
    tokenizer: Tokenizer
    media: MediaSource
    named_media: NamedMedia
    generation_defaults: GenerationDefaults
    frontend: FrontendConfig
    observers: tuple[Observer, ...] = ()
    held: MemoryBudget = field(init=False)
    planning: FairExecutor = field(default_factory=FairExecutor)
    """Where prompts are made, and log probabilities told: a long text, or a header with many pieces, takes a while."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "held", MemoryBudget(self.frontend.admission.max_inflight_mb * 2**20))

    @property
    def input_modalities(self) -> list[str]:
        """What requests may be made of."""
        return ["text", *(sorted(self.prompt_builder.modalities) if self.router.takes_media else ())]

    @property
    def context_length(self) -> int:
        """The longest sequence, in tokens: what the model and the settings allow, and, once language instances are
        there, what the KV cache of each holds."""
        longest = self.router.registry.context_length()
        return (
            self.prompt_builder.context_length if longest is None else min(self.prompt_builder.context_length, longest)
        )
