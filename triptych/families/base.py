"""What a model family provides: the three small files of ``families/<family>/`` satisfy these protocols.

``plan`` runs in the front door (no torch), ``preprocess`` in the encode instance's workers (numpy),
``tower`` in the encode and language instances (torch; its protocol is in ``models/towers.py``).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.types import ImageHeader, ItemPlan, PixelBounds, Span


class Positions(msgspec.Struct, frozen=True):
    """Rope positions of a prompt.

    ``prompt`` is int64 of shape (3, number of prompt tokens): temporal, height and width. The k-th generated
    token has position ``next_position + k`` on all three axes.
    """

    prompt: NDArray[np.int64]
    next_position: int


class Planner(Protocol):
    """Plans items and prompts of one model. Pure: holds configuration only."""

    image_token_id: int
    """The placeholder: stands once per image in the rendered template and once per row in the final prompt."""
    media_token_ids: frozenset[int]
    """Every token that may only come from the template, never from a user's text."""
    context_length: int

    def plan(self, header: ImageHeader, bounds: PixelBounds = ...) -> ItemPlan:
        """What the item will become, resized within a request's ``bounds``. Raises MediaError when the model can't take
        it, or not so."""

    def positions(self, num_tokens: int, spans: Sequence[Span], plans: Sequence[ItemPlan]) -> Positions:
        """Rope positions of a prompt of ``num_tokens`` tokens whose item ``i`` occupies ``spans[i]``."""


class TowerInput(msgspec.Struct, frozen=True):
    """One preprocessed item: ``patches`` is float32 of shape (patches, patch values); ``grid`` as in its plan."""

    patches: NDArray[np.float32]
    grid: tuple[int, int, int]


class Preprocessor(Protocol):
    """Turns an item's bytes into the tower's input, exactly as planned."""

    def __call__(self, data: bytes, plan: ItemPlan) -> TowerInput:
        """Raises MediaError for bytes that can't be decoded, PlanMismatch when the result isn't what was planned."""


ModelConfig = dict[str, Any]
"""A checkpoint folder's ``config.json`` as parsed."""
