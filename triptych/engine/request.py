"""A request as the engine sees it: its tokens, and which of them are in the KV cache on which pages."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.engine.history import History
from triptych.messages.work import PlacedItem, PromptLogprobs, SamplingParams
from triptych.types import RequestId


@dataclass(eq=False)
class Request:
    """Prompt, output and progress of one request."""

    id: RequestId
    tokens: list[int]
    """The prompt, followed by the generated tokens, which the loop appends."""
    positions: NDArray[np.float64]
    """Rope positions of the prompt, of shape (3, prompt tokens)."""
    next_position: float
    """Rope position of the first generated token."""
    items: list[PlacedItem]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    cache_salt: str = ""
    timeout: float = 0.0
    """Seconds between the request's arrival and its deadline."""
    prefilled_here: bool = True
    """Whether this instance prefills the request. If not, its KV is received from a prefill instance."""
    decoded_here: bool = True
    """Whether this instance decodes the request. If not, its KV is sent to a decode instance."""
    history: History = field(init=False)

    # Set by the scheduler.
    arrival: int = 0
    """Position in the queue."""
    num_ready: int = 0
    """Ready tokens when the scheduler last checked."""
    running: bool = False
    """Whether the request occupies one of the ``max_num_seqs`` slots."""
    admitted: bool = False
    """Whether a request that another instance prefills has its pages. Its KV follows."""
    sends_pages: bool = False
    """Whether KV is being sent from the pages. Then the request has the pages of all its tokens and can't be
    preempted."""
    num_bypassed: int = 0
    """Times that later requests have taken pages that this one held or needed."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in ``pages``."""
    num_reused: int = 0
    """Leading tokens of the prompt that were found in the prefix cache."""
    num_cached_pages: int = 0
    """Leading pages that are in the prefix cache."""
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)

    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's computed chunks, if requested. Set by the loop."""

    def __post_init__(self) -> None:
        self.history = History(self.tokens, len(self.tokens))

    @property
    def num_prompt(self) -> int:
        return self.history.num_prompt

    @property
    def num_generated(self) -> int:
        return self.history.num_generated

    @property
    def max_length(self) -> int:
        """Largest number of tokens that the request can reach, including the last one, which is never computed."""
        return self.num_prompt + self.sampling.max_tokens

    @property
    def decoding(self) -> bool:
        """Whether the request runs and exactly its newest token is left to compute."""
        return self.running and self.only_newest_left

    @property
    def only_newest_left(self) -> bool:
        """Whether generation has begun and all but the newest token are computed."""
        return self.num_generated > 0 and self.num_computed == len(self.tokens) - 1

    @property
    def fully_ready(self) -> bool:
        """Whether all tokens are ready."""
        return self.num_ready >= len(self.tokens)

    @property
    def blocked(self) -> bool:
        """Whether nothing can be computed before media embeddings, KV or a grammar mask arrive."""
        return self.num_ready <= self.num_computed if self.prefilled_here else not self.fully_ready

    @property
    def samples_alone(self) -> bool:
        """Whether the newest token is computed in a step of its own. Logits differ in their last bits with the chunk's
        length; with a grammar they must not depend on when the mask arrives."""
        return self.sampling.grammar is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log probabilities are still to be sent. They go out with the first token."""
        return self.sampling.prompt_logprobs is not None and not self.num_generated

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end generation. A grammar ends with the model's own end tokens, even if ``ignore_eos`` is set."""
        ignored = self.sampling.ignore_eos and self.sampling.grammar is None
        return frozenset(self.sampling.stop_token_ids) | (frozenset() if ignored else self.eos_token_ids)

    def finish_reason(self) -> str | None:
        """Return why generation ends with the newest token; None if it doesn't."""
        if self.tokens[-1] in self.end_token_ids and self.num_generated > self.sampling.min_tokens:
            return "stop"
        return "length" if self.num_generated >= self.sampling.max_tokens else None

    def positions_of(self, start: int, count: int) -> list[list[float]]:
        """Return the rope positions of tokens ``[start, start + count)``: three lists."""
        known = min(max(self.num_prompt - start, 0), count)
        offset = self.next_position - self.num_prompt
        generated = [token + offset for token in range(start + known, start + count)]
        if not known:
            return [generated] * 3
        return [axis + generated for axis in self.positions[:, start : start + known].tolist()]
