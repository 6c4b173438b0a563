"""One request as the language engine sees it: tokens, what of them is in the KV cache, and the pages that hold it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from triptych.engine.history import History
from triptych.messages.work import PlacedItem, PromptLogprobs, SamplingParams
from triptych.types import RequestId


@dataclass(eq=False)
class Request:
    """Prompt, output and progress of one request.

    ``tokens`` is the prompt followed by what was generated; ``positions`` is float64 of shape (3, prompt tokens);
    ``num_computed`` tokens have their keys and values in ``pages``, the first ``num_reused`` of the prompt's without
    having been computed for this request; ``prompt_logprobs`` tell of those that have been, if that is asked for.
    Filled in by the scheduler: ``arrival`` and what follows it. Filled in by the host: ``tokens`` beyond the prompt,
    ``prompt_logprobs``.

    ``timeout`` is how many seconds its request had when it came.

    ``ready`` is what was ready when the scheduler last looked. One that is ``running`` has one of the places among
    ``max_num_seqs``; ``num_passed`` says how often later ones have taken pages that it had or needed.
    One that isn't ``prefilled_here`` is ``admitted`` when it gets its pages, before its KV comes; one that isn't
    ``decoded_here`` takes those of all its tokens at once and keeps them from when its KV is sent from there
    (``sends_pages``).
    """

    id: RequestId
    tokens: list[int]
    positions: NDArray[np.float64]
    next_position: float
    items: list[PlacedItem]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    cache_salt: str = ""
    timeout: float = 0.0
    prefilled_here: bool = True
    decoded_here: bool = True
    history: History = field(init=False)
    arrival: int = 0
    ready: int = 0
    running: bool = False
    admitted: bool = False
    sends_pages: bool = False
    num_passed: int = 0
    num_computed: int = 0
    num_reused: int = 0
    num_published: int = 0
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

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
        """The most tokens the request can come to. The last one generated is never computed, but counts."""
        return self.num_prompt + self.sampling.max_tokens

    @property
    def decoding(self) -> bool:
        """Whether exactly the newest token is left to compute."""
        return self.running and self.lacks_newest_only

    @property
    def lacks_newest_only(self) -> bool:
        """Whether an answer has begun, and all but its newest token is computed."""
        return self.num_generated > 0 and self.num_computed == len(self.tokens) - 1

    @property
    def wholly_ready(self) -> bool:
        """Whether nothing more must come from elsewhere before the next token."""
        return self.ready >= len(self.tokens)

    @property
    def waits(self) -> bool:
        """Whether nothing can be computed before something comes from elsewhere."""
        return self.ready <= self.num_computed if self.prefilled_here else not self.wholly_ready

    @property
    def ends_alone(self) -> bool:
        """Whether the newest token is computed in a step of its own. Logits differ in their last bits with the length
        of the chunk, and with a grammar they must not depend on how soon its mask is there."""
        return self.sampling.grammar is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log probabilities are still to be told: they go out with the first token."""
        return self.sampling.prompt_logprobs is not None and not self.num_generated

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end generation. Those of the model are how a grammar ends, even where they are ignored."""
        ignored = self.sampling.ignore_eos and self.sampling.grammar is None
        return frozenset(self.sampling.stop_token_ids) | (frozenset() if ignored else self.eos_token_ids)

    def finish_reason(self) -> str | None:
        """Why generation ends with the newest token, or None when it doesn't."""
        if self.tokens[-1] in self.end_token_ids and self.num_generated > self.sampling.min_tokens:
            return "stop"
        return "length" if self.num_generated >= self.sampling.max_tokens else None

    def positions_of(self, start: int, count: int) -> list[list[float]]:
        """Rope positions of tokens ``[start, start + count)``: three lists."""
        known = min(max(self.num_prompt - start, 0), count)
        offset = self.next_position - self.num_prompt
        generated = [token + offset for token in range(start + known, start + count)]
        if not known:
            return [generated] * 3
        return [axis + generated for axis in self.positions[:, start : start + known].tolist()]
