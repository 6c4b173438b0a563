"""Scheduler, runner and sampler without an instance around them: prompts in, tokens out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from triptych.engine.cache_manager import CacheManager
from triptych.engine.kv_cache import PagePool
from triptych.engine.prompt_logprobs import joined, prompt_logprobs_queries
from triptych.engine.request import Request
from triptych.engine.runner import MediaEmbeddings, Runner
from triptych.engine.sampler import SampledToken, SamplingInput
from triptych.engine.scheduler import Chunk, Scheduler
from triptych.engine.step_graphs import only_decodes
from triptych.layers.decoder import Decoder
from triptych.messages.work import PromptLogprobs, SamplingParams
from triptych.types import RequestId

PAGE_SIZE = 4


@dataclass
class Generating:
    """Answers of ``runner``, over a pool of ``num_pages``. Every prompt has rows for its tokens 2 to 4: as media have,
    but made up. ``batches`` counts the steps that only decoded, by their number of requests."""

    runner: Runner
    decoder: Decoder
    num_pages: int
    max_num_seqs: int = 5
    budget: int = 12
    batches: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    scored: dict[int, PromptLogprobs | None] = field(default_factory=dict)
    """What the prompts' log probabilities are, by the prompts' numbers."""

    def answers(self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]) -> list[list[int]]:
        """The generated tokens of each prompt."""
        pool = CacheManager([PagePool(self.num_pages, PAGE_SIZE)])
        scheduler = Scheduler(pool, self.max_num_seqs, self.budget, reuse_prefixes=False)
        requests = [
            request(str(index), tokens, sampling)
            for index, (tokens, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        for one in requests:
            scheduler.add(one)
        while scheduler:
            self._step(scheduler)
        pool.check_all_free()
        self.num_preemptions = scheduler.num_preemptions
        return [one.tokens[one.num_prompt :] for one in requests]

    def _step(self, scheduler: Scheduler) -> None:
        step = scheduler.schedule(lambda one: len(one.tokens))
        batch = self.runner.batch(step.chunks, self._media(step.chunks))
        sampling = [c.request for c in step.chunks if c.samples]
        sampling_inputs = [SamplingInput(s.sampling, s.history, s.end_token_ids) for s in sampling]
        self.runner.prepare(step.chunks)
        output = self.runner.run(batch, sampling_inputs, prompt_logprobs_queries(step.chunks))
        for one, scored in zip([c.request for c in step.chunks if c.num_scored], output.scored, strict=True):
            assert isinstance(scored, PromptLogprobs)
            one.prompt_logprobs.append(scored)
        self.num_steps += 1
        if only_decodes(batch):
            self.batches[len(step.chunks)] = self.batches.get(len(step.chunks), 0) + 1
        scheduler.mark_computed(step.chunks)
        for one, token in zip(sampling, output.sampled, strict=True):
            assert isinstance(token, SampledToken)
            one.tokens.append(token.token)
            self.scored[int(one.id)] = self.scored.get(int(one.id)) or joined(one.prompt_logprobs)
            if one.finish_reason():
                scheduler.remove(one.id)

    def _media(self, chunks: Sequence[Chunk]) -> MediaEmbeddings:
        config, index, rows, first = self.decoder.config, [], [], 0
        width = config.hidden_size * (1 + config.num_deepstack_layers)
        for chunk in chunks:
            for place in range(max(2, chunk.start), min(5, chunk.start + chunk.length)):
                index.append(first + place - chunk.start)
                generator = torch.Generator().manual_seed(sum(chunk.request.tokens[:2]) + place)
                rows.append(0.5 * torch.randn(width, generator=generator))
            first += chunk.length
        stacked = torch.stack(rows) if rows else torch.empty(0, width)
        return MediaEmbeddings(torch.tensor(index, dtype=torch.int64), stacked.to(self.decoder.dtype))


def request(name: str, tokens: list[int], sampling: SamplingParams) -> Request:
    """A prompt whose positions are those of text."""
    positions = np.broadcast_to(np.arange(len(tokens), dtype=np.float64), (3, len(tokens)))
    return Request(RequestId(name), list(tokens), positions, len(tokens), [], sampling, frozenset())


def prompts(vocabulary: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
