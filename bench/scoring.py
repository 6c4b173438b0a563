"""Distributions of the next token by a model with given settings, without a service, and how far two of them differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.layers.attention.base import AttentionBatch
from triptych.layers.decoder import ForwardBatch
from triptych.layers.encoder import Encoder
from triptych.layers.parallel import SINGLE_RANK
from triptych.models.base import EncoderInput
from triptych.server.model_bundle import ModelBundle


@dataclass(frozen=True)
class Excerpt:
    """A sequence of T tokens, some of which stand for M rows of media."""

    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """float64 [3, T]."""
    scored: Tensor
    """int64 [S], ascending: the tokens after which the next one is scored."""
    media: Sequence[EncoderInput] = ()
    media_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [M]: indices of the media tokens."""

    @classmethod
    def of_text(cls, tokens: Tensor) -> "Excerpt":
        """Return text, scored after every token."""
        places = torch.arange(len(tokens))
        return cls(tokens, places.double().expand(3, -1), places)


class Scorer:
    """A checkpoint folder's model on the CPU, loaded as an instance with these settings loads it."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        given: dict[str, Any] = {"device": "cpu", **settings}
        self._bundle = ModelBundle(Checkpoint(folder), EngineConfig(**given))
        self._decoder = self._bundle.load_decoder(SINGLE_RANK)

    @cached_property
    def _encoder(self) -> Encoder:
        return self._bundle.load_encoder()

    @torch.inference_mode()
    def log_probabilities(self, excerpt: Excerpt) -> Tensor:
        """Return float32 [S, vocabulary], the distributions after the scored tokens."""
        count, page_size = len(excerpt.tokens), self._bundle.page_size
        pages = -(-count // page_size)
        rows = torch.cat(self._encoder.encode(excerpt.media)) if excerpt.media else self._no_rows
        groups = len(self._decoder.config.cache_groups.windows)
        batch = ForwardBatch(
            tokens=excerpt.tokens,
            positions=excerpt.positions,
            media_index=excerpt.media_index,
            media_embeddings=rows,
            logits_index=excerpt.scored,
            attention=[AttentionBatch([count], [count], [torch.arange(pages)], torch.arange(count), generated=[False])]
            * groups,
        )
        cache = self._bundle.make_cache(SINGLE_RANK, [pages] * groups, "").whole
        return self._decoder(batch, cache).log_softmax(dim=1)

    @property
    def _no_rows(self) -> Tensor:
        return torch.empty(0, self._bundle.adapter.embedding_width)


@dataclass
class Divergence:
    """How far distributions are from a reference's, over all that were added."""

    divergences: list[Tensor] = field(default_factory=list)
    """In nats, of each distribution."""
    same: list[Tensor] = field(default_factory=list)
    """Whether the likeliest token is the same."""

    def add(self, ours: Tensor, reference: Tensor) -> None:
        """Add log probabilities [S, vocabulary]."""
        self.divergences.append(F.kl_div(ours, reference, reduction="none", log_target=True).sum(dim=1).clamp(min=0))
        self.same.append(ours.argmax(dim=1) == reference.argmax(dim=1))

    def summary(self) -> dict[str, float]:
        """Return mean and 99th percentile of the Kullback-Leibler divergence from the reference, in nats, and the share
        of distributions with the same likeliest token."""
        divergence, same = torch.cat(self.divergences).double(), torch.cat(self.same).double()
        return {
            "kl_mean": float(f"{divergence.mean():.3g}"),
            "kl_p99": float(f"{divergence.quantile(0.99):.3g}"),
            "top_1": round(same.mean().item(), 4),
            "scored": len(divergence),
        }
