"""Prompts of a workload's requests for one model, by what its profile says of items."""

from collections.abc import Iterable, Iterator

from blake3 import blake3

from triptych.costs.profile import Profile
from triptych.models.base import VISION
from triptych.simulate.instance import SimulatedModel
from triptych.simulate.load import Asked, ItemAsked
from triptych.types import ImageHeader, ItemPart, ItemPlan, VideoHeader
from triptych.workload.trace import BLOCK_TOKENS, TraceMedia, TraceRequest

MAX_PARTS = 4096
"""Most parts of an item. Several frames of a longer video are one part."""
MAX_PLANS = 256
"""Plans that are kept for further items."""
FRAME_RATE = 24.0
"""Frames per second of videos, whose length in time doesn't matter here."""


class Prompts:
    """Makes the prompts. Plans are kept for items of the same size."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._plans: dict[tuple[int, int, int, str], ItemPlan] = {}

    def of(self, requests: Iterable[TraceRequest], scale: float = 1.0) -> Iterator[Asked]:
        """Yield requests as a simulated service takes them, without those that the model can't hold. Times are
        multiplied by ``scale``."""
        for number, request in enumerate(requests):
            media = request.media if self._profile.model.takes_media else ()
            rows = sum(self._sizes(one)[1] for one in media)
            if max(1, request.text) + rows + request.answer > self._profile.model.context_length:
                continue
            items = tuple(ItemAsked(one.name, self._plan(one), one.bytes) for one in media)
            yield Asked(
                at=request.at * scale,
                text=_tokens(request, number),
                answer=request.answer,
                items=items,
                client=request.client,
                lead=min(request.lead, request.text),
            )

    def _plan(self, media: TraceMedia) -> ItemPlan:
        key = media.width, media.height, media.frames, media.format
        if (plan := self._plans.get(key)) is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(media)
        return plan

    def _sizes(self, media: TraceMedia) -> tuple[int, int, int]:
        """Return an item's parts, rows and patches."""
        item = self._profile.item(media.width, media.height)
        parts = min(MAX_PARTS, max(1, item.parts) * media.frames)
        return parts, max(parts, item.rows * media.frames), item.patches * media.frames

    def _new_plan(self, media: TraceMedia) -> ItemPlan:
        """Return a plan like that of the measured image whose size is nearest; of that many such frames for a video."""
        pieces, rows, patches = self._sizes(media)
        parts, first = list[ItemPart](), 0
        for number in range(pieces):
            end = rows * (number + 1) // pieces
            share = patches * (number + 1) // pieces - patches * number // pieces
            parts.append(ItemPart(((first, end - first),), max(1, share), float(max(1, share)), VISION))
            first = end
        size = media.width, media.height
        return ItemPlan(
            modality="image" if media.frames == 1 else "video",
            header=ImageHeader(media.format, *size)
            if media.frames == 1
            else VideoHeader(media.format, *size, frames=media.frames, rate=FRAME_RATE),
            resized_height=media.height,
            resized_width=media.width,
            grid=(sum(one.patches for one in parts), 1, 1),
            rows=rows,
            patches=sum(one.patches for one in parts),
            cost=sum(one.cost for one in parts),
            parts=tuple(parts),
        )


def model_of(profile: Profile) -> SimulatedModel:
    """Return what a simulation needs to know of a profile's model."""
    model = profile.model
    return SimulatedModel(
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        kv_token_bytes=model.kv_rows_per_token * model.kv_row_bytes,
        kv_token_rows=max(1, model.kv_rows_per_token),
        embedding_bytes=max(1, model.embedding_row_bytes),
    )


def _tokens(request: TraceRequest, number: int) -> list[int]:
    """Return a text's tokens, which begin as those of others with the same blocks do."""
    text = bytearray()
    for block in request.blocks[: request.text // BLOCK_TOKENS]:
        text += blake3(b"block %d" % block).digest(BLOCK_TOKENS)
    text += blake3(b"request %d" % number).digest(max(1, request.text) - len(text))
    return list(text)
