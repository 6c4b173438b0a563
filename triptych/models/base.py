"""What a model family provides: the three small files of ``families/<family>/`` satisfy these protocols.

``plan`` runs in the frontend (no torch), ``preprocess`` in the encode instance's workers (numpy),
``tower`` in the encode and language instances (torch; its protocol is in ``models/towers.py``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.types import AudioHeader, FrameSampling, ItemPlan, MediaHeader, PixelBounds, Placement

VISION, AUDIO = "vision", "audio"
"""A family's towers."""


class Positions(msgspec.Struct, frozen=True):
    """Rope positions of a prompt.

    ``prompt`` is float64 of shape (3, number of prompt tokens): temporal, height and width, whole numbers unless a
    family places frames between them. The k-th generated token has position ``next_position + k`` on all three axes.
    """

    prompt: NDArray[np.float64]
    next_position: float


class Planner(Protocol):
    """Plans items and prompts of one model. Pure: holds configuration only."""

    placeholder_ids: Mapping[str, int]
    """The placeholder of each modality that is served: stands once per item in the rendered template and once per row
    in the final prompt."""
    media_token_ids: frozenset[int]
    """Every token that may only come from the template, never from a user's text."""
    context_length: int
    max_image_pixels: int
    """The largest area that an image is resized to; 0 where none are taken."""
    audio_in_video: bool
    """Whether a video's sound can be heard with it."""

    def plan(
        self,
        header: MediaHeader,
        bounds: PixelBounds = ...,
        sampling: FrameSampling = ...,
        sound: AudioHeader | None = ...,
    ) -> ItemPlan:
        """What the item will become, resized within a request's ``bounds``, and of a video the frames that its
        ``sampling`` takes, with its ``sound`` if that shall be heard. Raises MediaError when the model can't take it,
        or not so."""

    def placeholder(self, plan: ItemPlan, spelling: Callable[[int], str]) -> str:
        """What takes the place of an item's placeholder in the rendered template, with one placeholder for each run of
        rows. ``spelling`` is the text of a token."""

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """How many rows stand at each placeholder of ``placeholder``, in order; together the plan's rows."""

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Rope positions of a prompt of ``num_tokens`` tokens whose item ``i`` is at ``placements[i]``."""


class EncoderInput(msgspec.Struct, frozen=True):
    """One preprocessed part of an item, which ``tower`` encodes by itself: ``patches`` is float32 of shape (patches,
    patch values); ``grid`` counts them in time, rows and columns. ``name`` is the same for parts that look or sound the
    same, and no others: 64 hexadecimal digits."""

    patches: NDArray[np.float32]
    grid: tuple[int, int, int]
    name: str
    tower: str = VISION


class Preprocessor(Protocol):
    """Turns an item's bytes into the tower's inputs, exactly as planned."""

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """The item's parts, ``plan.num_parts`` of them, in order, each made when it is asked for; their rows are the
        item's rows. Raises MediaError for bytes that can't be decoded, PlanMismatch when the result isn't what was
        planned."""


ModelConfig = dict[str, Any]
"""A checkpoint folder's ``config.json`` as parsed."""
