"""What the HTTP handlers share: the service's parts and the checkpoint's generation defaults."""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from triptych.api.fair_executor import FairExecutor
from triptych.api.fields import MinP, RepetitionPenalty, Temperature, TopK, TopP
from triptych.api.grammar_checker import GrammarChecker
from triptych.api.memory_budget import MemoryBudget
from triptych.api.recording import TraceRecorder
from triptych.api.request_records import Observer
from triptych.api.response_store import ResponseStore
from triptych.api.uuid_cache import UuidMediaCache
from triptych.api.viewers import Viewers
from triptych.checkpoint.config_files import GENERATION_CONFIG, load_generation_config
from triptych.config import FrontendConfig
from triptych.errors import CheckpointError
from triptych.gateway.servers import Servers
from triptych.observe.pipeline import ALONE, FrontendNames
from triptych.observe.request_history import RequestHistory
from triptych.prompt.media import MediaSource
from triptych.prompt.prompt import PromptBuilder
from triptych.prompt.tokenizer import Tokenizer
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.pipeline_view import PipelineView
from triptych.router.router import Router


class _GenerationConfig(BaseModel):
    """The supported fields of ``generation_config.json``, within the limits of a request's; null means unset."""

    model_config = ConfigDict(strict=True)

    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint, for fields that a request leaves unset; initially OpenAI's defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> "GenerationDefaults":
        """Read the folder's ``generation_config.json``; ``do_sample`` false or unset means greedy.

        Reads what vLLM reads, except ``max_new_tokens``, which would truncate answers. Raises CheckpointError, naming
        file and field, for a value that a request couldn't have."""
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
class ApiContext:
    """The frontend's parts, wired together by ``server/frontend.py``."""

    model_name: str
    router: Router
    prompt_builder: PromptBuilder
    tokenizer: Tokenizer
    media: MediaSource
    uuid_cache: UuidMediaCache
    generation_defaults: GenerationDefaults
    grammars: GrammarChecker
    frontend: FrontendConfig
    observers: tuple[Observer, ...] = ()
    """Called with the record of every request that has ended."""
    ui_trace_url: str = ""
    """Where the page at ``/ui`` links to a trace, as configured."""
    responses: ResponseStore | None = None
    """None if no responses are stored."""
    among: FrontendNames = ALONE
    """The frontends of the same supervisor."""
    recorder: TraceRecorder | None = field(init=False)
    """The one of the observers that records what is asked; None if none does."""
    memory_budget: MemoryBudget = field(init=False)
    pipeline: PipelineView = field(init=False)
    """What the page at ``/ui`` shows of the router."""
    viewers: Viewers = field(init=False)
    """Clients that watch that page."""
    history: RequestHistory = field(default_factory=RequestHistory)
    """The requests that it shows."""
    executor: FairExecutor = field(default_factory=FairExecutor)
    """Runs what would block the event loop: planning of prompts, formatting of log probabilities."""

    def __post_init__(self) -> None:
        recorders = (one for one in self.observers if isinstance(one, TraceRecorder))
        object.__setattr__(self, "recorder", next(recorders, None))
        object.__setattr__(self, "memory_budget", MemoryBudget(self.frontend.admission.max_inflight_mb * 2**20))
        object.__setattr__(
            self, "pipeline", PipelineView(self.router, self.model_name, self.among, kills=self.frontend.http.ui_kills)
        )
        object.__setattr__(self, "viewers", Viewers(self.pipeline))

    @property
    def lifecycle(self) -> RequestLifecycle:
        """Where requests are admitted, submitted and ended."""
        return self.router.lifecycle

    @property
    def servers(self) -> Servers | None:
        """The language servers of another project that answer; None if instances do."""
        return self.router.servers

    @property
    def input_modalities(self) -> list[str]:
        """Modalities that requests may contain."""
        return ["text", *(sorted(self.prompt_builder.modalities) if self.router.availability.takes_media else ())]

    @property
    def context_length(self) -> int:
        """Maximum tokens of prompt and answer: the limit of model and settings, and of the smallest KV cache."""
        longest = self.router.membership.context_length()
        return (
            self.prompt_builder.context_length if longest is None else min(self.prompt_builder.context_length, longest)
        )
