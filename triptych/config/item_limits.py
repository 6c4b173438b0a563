"""How many media items one request may have."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triptych.errors import ConfigError

_COUNT = re.compile(r"\d{1,6}", re.ASCII)


@dataclass(frozen=True)
class ItemLimits:
    """Value of ``--limit-mm-per-prompt``: the most items of each modality in one request."""

    image: int = 64
    video: int = 4
    audio: int = 16

    @classmethod
    def parse(cls, text: str) -> "ItemLimits":
        """Read either of vLLM's spellings: image=16,video=2 or a JSON object, in which a limit may be an object with
        nothing but a count. A modality that isn't named keeps its default. Raises ConfigError for anything else."""
        try:
            if text.lstrip().startswith("{"):
                given = json.loads(text, object_pairs_hook=_without_twins)
            else:
                given = _without_twins([part.partition("=")[::2] for part in text.replace(" ", "").split(",")])
            counts = {modality: _count(limit) for modality, limit in given.items()}
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{text!r} doesn't give a number for each modality, as image=16,video=2 does, or "
                '{"image": 16, "video": 2}'
            ) from None
        if unknown := counts.keys() - asdict(cls()).keys():
            raise ConfigError(f"{text!r}: {min(unknown)!r} is not one of {', '.join(asdict(cls()))}")
        return cls(**counts)

    def of(self, modality: str) -> int:
        """Return the limit of a modality: ``image``, ``video`` or ``audio``."""
        limits: dict[str, int] = asdict(self)
        return limits[modality]

    def __str__(self) -> str:
        return ",".join(f"{modality}={limit}" for modality, limit in asdict(self).items())


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("one is there twice")
    return found


def _count(limit: Any) -> int:
    if isinstance(limit, dict) and limit.keys() == {"count"}:
        limit = limit["count"]
    if isinstance(limit, bool | dict | list) or not _COUNT.fullmatch(str(limit)):
        raise ValueError("not a number of items")
    return int(limit)
