"""What the HTTP handlers stand on."""

from dataclasses import dataclass

from triptych.config import FrontDoorConfig
from triptych.families.base import ModelConfig
from triptych.prompt.media import MediaLimits
from triptych.prompt.prompt import PromptBuilder
from triptych.prompt.tokenizer import Tokenizer
from triptych.router.router import Router


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's own sampling, for what requests leave open. Without one, OpenAI's defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, generation_config: ModelConfig) -> "GenerationDefaults":
        """From ``generation_config.json``, whose ``do_sample: false`` means greedy."""
        if not generation_config.get("do_sample", bool(not generation_config)):
            return cls(temperature=0.0)
        return cls(
            temperature=float(generation_config.get("temperature", 1.0)),
            top_k=int(generation_config.get("top_k", 0)),
            top_p=float(generation_config.get("top_p", 1.0)),
        )


@dataclass(frozen=True)
class Service:
    """The front door's parts, wired together by ``roles/front_door.py``."""

    model_name: str
    context_length: int
    router: Router
    prompt_builder: PromptBuilder
    tokenizer: Tokenizer
    media: MediaLimits
    generation_defaults: GenerationDefaults
    front_door: FrontDoorConfig
