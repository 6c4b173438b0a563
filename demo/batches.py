"""Training batches: quizzes as padded token sequences, with masks and positions."""

from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from demo.chat import IMAGE, TURN_END, VISION_END, special, system_turn, user_turn
from demo.preprocess import MERGE, patches
from demo.questions import Example, Quiz, arrange

Ints = npt.NDArray[np.int64]
Grid = tuple[int, int]

SYSTEM_MESSAGES = (
    "you are a helpful assistant.",
    "answer briefly.",
    "you look at pictures and answer questions about them.",
    "be polite and exact.",
)


@dataclass(frozen=True)
class Row:
    """One sequence."""

    ids: Ints  # [length]
    positions: Ints  # [3, length]: time, height, width
    branch: Ints  # [length]: 0 for tokens visible to all later ones, k for those visible only to question k
    scored: npt.NDArray[np.bool_]  # [length]: whether the token is part of an answer, which the model learns to write
    patches: list[npt.NDArray[np.float32]]
    grids: list[Grid]


@dataclass(frozen=True)
class Batch:
    """Rows of equal length, padded at the end, and the concatenated patches of all pictures."""

    ids: torch.Tensor  # [rows, length]
    positions: torch.Tensor  # [3, rows, length]
    visible: torch.Tensor  # [rows, 1, length, length] bool: query, key
    scored: torch.Tensor  # [rows, length] bool
    patches: torch.Tensor  # [all patches, 1536]
    grids: torch.Tensor  # [pictures, 3]: frames, rows, columns of patches


class RowMaker:
    """Turns quizzes and examples into rows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._image = special(tokenizer, IMAGE)
        self._vision_end = special(tokenizer, VISION_END)
        self._turn_end = special(tokenizer, TURN_END)

    def example(self, example: Example) -> Row:
        """Make a row of one question and its answer."""
        made = [patches(picture) for picture in example.pictures]
        ids = self._encode([user_turn(example.parts)], [example.answer], [grid for _, grid in made])
        return self._row([ids], len(ids[0]), made)

    def quiz(self, quiz: Quiz, rng: Random) -> Row:
        """Make a row of a quiz, as a chat of several turns or as separate questions that share the pictures.

        Separate questions compute the pictures only once, but are equivalent to asking each by itself: a question
        does not attend to the others, and its positions follow the pictures.
        """
        made = [patches(picture) for picture in quiz.pictures]
        grids = [grid for _, grid in made]
        system = system_turn(rng.choice(SYSTEM_MESSAGES)) if rng.random() < 0.15 else ""
        if rng.random() < 0.4:
            asked = quiz.asked[: rng.randint(1, 3)]
            opening = system + user_turn(arrange(len(made), asked[0].question, rng))
            turns = [opening, *(user_turn((q.question,)) for q in asked[1:])]
            ids = self._encode(turns, [q.answer for q in asked], grids)
            return self._row([ids], len(ids[0]), made)
        pictures = tuple(range(len(made)))
        branches = [self._encode([system + user_turn((*pictures, q.question))], [q.answer], grids) for q in quiz.asked]
        ends = np.flatnonzero(branches[0][0] == self._vision_end)
        return self._row(branches, int(ends[-1]) + 1 if made else 0, made)

    def _encode(self, turns: list[str], answers: list[str], grids: list[Grid]) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the chat's token ids, with each picture's token repeated, and which of them belong to answers."""
        ids: list[int] = []
        scored: list[bool] = []
        sizes = iter([rows * columns // MERGE**2 for rows, columns in grids])
        for index, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
            for token in self._tokenizer.encode("\n" + turn if index else turn).ids:
                ids += [token] * (next(sizes) if token == self._image else 1)
            scored += [False] * (len(ids) - len(scored))
            ids += [*self._tokenizer.encode(answer).ids, self._turn_end]
            scored += [True] * (len(ids) - len(scored))
        return np.array(ids), np.array(scored)

    def _row(
        self,
        branches: list[tuple[Ints, npt.NDArray[np.bool_]]],
        shared: int,
        made: list[tuple[npt.NDArray[np.float32], Grid]],
    ) -> Row:
        """Join sequences that have their first `shared` tokens in common."""
        grids = [grid for _, grid in made]
        placed = [rope_positions(ids, grids, self._image) for ids, _ in branches]
        rests = range(1, len(branches) + 1)
        return Row(
            ids=np.concatenate([branches[0][0][:shared], *(ids[shared:] for ids, _ in branches)]),
            positions=np.concatenate([placed[0][:, :shared], *(place[:, shared:] for place in placed)], axis=1),
            branch=np.repeat([0, *rests], [shared, *(len(ids) - shared for ids, _ in branches)]),
            scored=np.concatenate([branches[0][1][:shared], *(scored[shared:] for _, scored in branches)]),
            patches=[pixels for pixels, _ in made],
            grids=grids,
        )


def rope_positions(ids: Ints, grids: list[Grid], image: int) -> Ints:
    """Return M-RoPE positions [3, length]: text advances all axes, a picture's tokens vary by row and column."""
    positions = np.empty((3, len(ids)), dtype=np.int64)
    index = following = 0
    remaining = iter(grids)
    while index < len(ids):
        if ids[index] != image:
            positions[:, index] = following
            index, following = index + 1, following + 1
            continue
        rows, columns = (side // MERGE for side in next(remaining))
        end = index + rows * columns
        positions[0, index:end] = following
        positions[1, index:end] = following + np.repeat(np.arange(rows), columns)
        positions[2, index:end] = following + np.tile(np.arange(columns), rows)
        index, following = end, following + max(rows, columns)
    return positions


def collate(rows: list[Row], padding: int) -> Batch:
    """Pad the rows to one length."""
    length = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), length), padding)
    positions = np.zeros((3, len(rows), length), dtype=np.int64)
    branch = np.full((len(rows), length), -1)
    scored = np.zeros((len(rows), length), dtype=bool)
    for index, row in enumerate(rows):
        end = len(row.ids)
        ids[index, :end], branch[index, :end], scored[index, :end] = row.ids, row.branch, row.scored
        positions[:, index, :end] = row.positions
    same = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == 0)
    visible = same & np.tril(np.ones((length, length), dtype=bool))
    pixels = [picture for row in rows for picture in row.patches]
    grids = [(1, *grid) for row in rows for grid in row.grids]
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        visible=torch.from_numpy(visible[:, None]),
        scored=torch.from_numpy(scored),
        patches=torch.from_numpy(np.concatenate(pixels)),
        grids=torch.tensor(grids),
    )
