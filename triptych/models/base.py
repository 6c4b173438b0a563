"""Protocols of the three entry points of a model family, ``models/<family>/{plan,preprocess,encoder}.py``. What they
share, such as configs and towers, is in further files of the family, or in ``models/shared``.

``plan`` runs in the frontend (no torch), ``preprocess`` in an encode instance's workers (numpy) and ``encoder`` in
encode and language instances (torch). The protocol of the last one, ``ModelAdapter``, is in ``layers/encoder.py``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.types import ItemContext, ItemPlan, MediaHeader, Placement

VISION, AUDIO = "vision", "audio"
"""The names of a family's towers."""
Pixels = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class ImageSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What images are resized to, under the names of transformers' processors, whose meaning differs by family."""

    longest_edge: Pixels
    """Maximum area in pixels, or the length in pixels of the longer side (Idefics3, SmolVLM, Pixtral, Mistral 3)."""
    shortest_edge: Pixels | None = None
    """Minimum area in pixels; the model's own by default. Families with a longer side in place of an area have none."""


Options = dict[str, Any]
"""Names of ``mm_processor_kwargs``, each with the type that ``msgspec.convert`` checks its value by."""
AREA_OPTIONS: Options = {"min_pixels": Pixels, "max_pixels": Pixels}
"""Those that become ``ItemContext.bounds``."""
SIZE_OPTIONS: Options = {"size": ImageSize}
"""The one that becomes ``ItemContext.size``."""
FRAME_OPTIONS: Options = {
    "fps": Annotated[float, msgspec.Meta(ge=0.001, le=240.0)],
    "num_frames": Annotated[int, msgspec.Meta(ge=1, le=2**16)],
}
"""Those that become ``ItemContext.sampling``."""
NO_OPTIONS: Options = {}


def at_most(most: int) -> Any:
    """Return the type of an option that is a number from 1 on."""
    return Annotated[int, msgspec.Meta(ge=1, le=most)]


class Positions(msgspec.Struct, frozen=True):
    """Rope positions of a prompt."""

    prompt: NDArray[np.float64]
    """float64 [3, prompt tokens]: temporal, height and width. Fractional only if a family spaces frames that way."""
    next_position: float
    """Position of the first generated token on all three axes; each following token adds 1."""


MediaToken = int | str
"""A token's id or, if no config has that, its text."""


class Planner(Protocol):
    """Plans items and prompts of one model. Pure: holds configuration only."""

    placeholder_tokens: Mapping[str, MediaToken]
    """Placeholder token of each served modality: once per embedding in the prompt and, unless ``template_texts`` has
    another text, once per item in the rendered template."""
    template_texts: Mapping[str, str]
    """What a template that writes no placeholder tokens has for an item, by modality."""
    loras: Mapping[str, str]
    """Names of the LoRAs that requests with media are computed with, by modality; a request of several has the first
    one's. A modality without one, and text alone, need none."""
    media_tokens: frozenset[MediaToken]
    """Tokens that only the template may produce, never a user's text."""
    markers: frozenset[str]
    """Texts around embeddings that only the template may produce, too. Not every tokenizer has them as tokens."""
    context_length: int
    """Maximum number of tokens of prompt and answer together."""
    max_image_pixels: int
    """Largest area an image is resized to, in pixels; 0 if the model takes no images."""
    atomic_rows: int
    """Rows of the longest atomic span that an item becomes, unless a request's options ask for more; 0 for none."""
    audio_in_video: bool
    """Whether the model can take a video's audio track together with its frames."""
    options: Options
    """The ``mm_processor_kwargs`` that the model takes; a request with another one is refused. Those that no other
    family has come as ``ItemContext.options``. ``use_audio_in_video`` is not among them."""

    def plan(self, header: MediaHeader, context: ItemContext = ...) -> ItemPlan:
        """Return what the item becomes. Raises MediaError if the model can't take the item or what the request asks
        for."""

    def num_frames(self, plan: ItemPlan) -> int:
        """Return how many frames of a planned video are sampled."""

    def label(self, plan: ItemPlan, context: ItemContext) -> str:
        """Return the text before the placeholder of an item that was planned with ``context``, such as its number.

        It is no part of the item's key. What changes the item's rows must therefore be in the plan, and what changes
        text alone should not be.
        """

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the text that replaces an item's placeholder in the rendered template.

        It holds one placeholder for each contiguous run of the item's embeddings. ``spelling`` gives a token's text.
        """

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return the number of embeddings at each placeholder of ``placeholder``, in order; they sum to
        ``plan.rows``."""

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Return the rope positions of a prompt of ``num_tokens`` tokens whose item ``i`` is at ``placements[i]``."""


class EncoderInput(msgspec.Struct, frozen=True):
    """One preprocessed part of an item, encoded independently of the item's other parts."""

    patches: NDArray[np.float32]
    """float32 [patches, values per patch]; for audio, [feature frames, mel bands]."""
    grid: tuple[int, int, int]
    """Number of patches in time, rows and columns."""
    name: str
    """Digest of the content, 64 hexadecimal digits: equal exactly for parts with equal patches, grid and layout."""
    tower: str = VISION
    """Name of the tower that encodes the part."""
    layout: tuple[int, ...] = ()
    """What the family's tower needs to know of the part beyond its grid. Nothing else reads it."""


Parts = Sequence[int] | None
"""Numbers of an item's parts, ascending and at least one; None stands for all."""


def chosen(plan: ItemPlan, parts: Parts) -> Sequence[int]:
    """Return the numbers of parts."""
    return range(plan.num_parts) if parts is None else parts


class Preprocessor(Protocol):
    """Turns an item's bytes into encoder inputs, exactly as planned."""

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = ...) -> Iterator[EncoderInput]:
        """Yield these parts of the item in order, each computed when it is requested, with as little as possible of
        what only others need.

        Raises MediaError if the bytes can't be decoded, and PlanMismatch if the result isn't what was planned.
        """


ModelConfig = dict[str, Any]
"""A checkpoint folder's ``config.json`` as parsed."""
