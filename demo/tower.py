"""First training phase: trains the vision tower by itself, before the decoder is trained with it.

Linear probes on each of the tower's output tokens predict what the drawing program knows exactly: the shape or digit,
its colour, and in which of nine places the token lies. The probes are dropped afterwards. The phase takes a small share
of the training, and the decoder then starts with a tower that already recognises what is drawn.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from demo.pictures import COLOURS, PLACES, SHAPES, Mark, Scene, draw_marked, random_number, random_shapes
from demo.preprocess import MERGE, patches
from demo.questions import through_file

NAMES = (*SHAPES, *"0123456789")
UNCLEAR = -100
"""Label of a token that shows too little of a thing to identify it; excluded from the loss."""
PICTURES = 24


T = TypeVar("T")


@dataclass(frozen=True)
class Labels(Generic[T]):
    """What each token shows, as indices, int64 [tokens] each."""

    names: T
    """Index in ``NAMES``."""
    colours: T
    """Index in ``COLOURS``."""
    places: T
    """Index in ``PLACES``."""


class Probes(nn.Module):
    """Linear probes of each of the tower's outputs: shape or digit, colour (whose last classes mean nothing), place."""

    def __init__(self, num_outputs: int, hidden: int) -> None:
        super().__init__()
        self.names = nn.ModuleList(nn.Linear(hidden, len(NAMES) + 1) for _ in range(num_outputs))
        self.colours = nn.ModuleList(nn.Linear(hidden, len(COLOURS) + 1) for _ in range(num_outputs))
        self.places = nn.ModuleList(nn.Linear(hidden, len(PLACES)) for _ in range(num_outputs))

    def forward(self, outputs: Sequence[torch.Tensor], labels: Labels[torch.Tensor]) -> torch.Tensor:
        """Return the mean loss over outputs, each [tokens, hidden]."""
        losses = []
        for output, name, colour, place in zip(outputs, self.names, self.colours, self.places, strict=True):
            losses.append(_weighted_loss(name(output), labels.names))
            losses.append(_weighted_loss(colour(output), labels.colours))
            losses.append(nn.functional.cross_entropy(place(output), labels.places))
        return torch.stack(losses).mean()


def _weighted_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, in which the many tokens that show nothing have a lower weight."""
    weight = torch.ones(logits.shape[1])
    weight[-1] = 0.3
    return nn.functional.cross_entropy(logits, wanted, weight=weight, ignore_index=UNCLEAR)


def labels(marks: Sequence[Mark], grid: tuple[int, int]) -> Labels[npt.NDArray[np.int64]]:
    """Return what each token of a grid of patches shows."""
    rows, columns = (side // MERGE for side in grid)
    y, x = ((np.arange(rows) + 0.5) / rows)[:, None], ((np.arange(columns) + 0.5) / columns)[None, :]
    names, colours = np.full((rows, columns), len(NAMES)), np.full((rows, columns), len(COLOURS))
    inks = list(COLOURS)
    for mark in marks:
        off_x, off_y = abs(x - mark.x), abs(y - mark.y)
        touched = (off_x < mark.half_width + 0.5 / columns) & (off_y < mark.half_height + 0.5 / rows)
        names[touched], colours[touched] = UNCLEAR, UNCLEAR
    for mark in marks:
        off_x, off_y = abs(x - mark.x), abs(y - mark.y)
        inner = (off_x < 0.6 * mark.half_width) & (off_y < 0.6 * mark.half_height)
        middle = (off_x <= 0.5 / columns) & (off_y <= 0.5 / rows)
        crowded = middle & (names >= 0) & (names < len(NAMES))
        names[inner | middle], colours[inner | middle] = NAMES.index(mark.name), inks.index(mark.colour)
        names[crowded] = UNCLEAR
    places = np.floor(3 * y).astype(np.int64) * 3 + np.floor(3 * x).astype(np.int64)
    return Labels(names.reshape(-1), colours.reshape(-1), places.reshape(-1))


def train_tower(
    model: Qwen3VLForConditionalGeneration,
    optimizers: Sequence[torch.optim.Optimizer],
    rng: Random,
    seconds: float,
) -> None:
    """Train the tower for ``seconds``; ``optimizers`` hold its parameters, with the learning rates to use."""
    tower = model.model.visual
    probes = Probes(1 + len(tower.deepstack_merger_list), tower.config.out_hidden_size)
    own = torch.optim.AdamW(probes.parameters(), lr=3e-3)
    start = reported = time.monotonic()
    step, losses = 0, []
    while time.monotonic() - start < seconds:
        scenes = [random_number(rng) if rng.random() < 0.4 else random_shapes(rng) for _ in range(PICTURES)]
        loss = _loss(model, probes, scenes, rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        for optimizer in (*optimizers, own):
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        losses.append(loss.item())
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            mean = sum(losses) / len(losses)
            print(f"{(reported - start) / 60:5.1f} min  tower step {step}  loss {mean:.4f}", flush=True)
            losses = []


def _loss(model: Qwen3VLForConditionalGeneration, probes: Probes, scenes: Sequence[Scene], rng: Random) -> torch.Tensor:
    pixels, grids, known = [], [], []
    for scene in scenes:
        picture, marks = draw_marked(scene, rng)
        made, grid = patches(through_file(picture, rng))
        pixels.append(made)
        grids.append((1, *grid))
        known.append(labels(marks, grid))
    features = model.model.visual(torch.from_numpy(np.concatenate(pixels)), grid_thw=torch.tensor(grids))
    joined = Labels(
        *(torch.from_numpy(np.concatenate([getattr(one, part.name) for one in known])) for part in fields(Labels))
    )
    return probes([features.pooler_output, *features.deepstack_features], joined)
