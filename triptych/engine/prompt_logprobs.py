"""Log probabilities of a prompt's own tokens: which of a step's logits tell of them, and what those say."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.engine.scheduler import Chunk
from triptych.errors import NonFiniteLogits, TriptychError
from triptych.layers.pinned import to_cpu, to_device
from triptych.messages.work import PromptLogprobs


@dataclass(frozen=True)
class Asked:
    """What a step is asked about one chunk's prompt: the log probabilities of ``tokens``, by as many of the step's
    logits from ``first_row`` on, and of the ``most`` likeliest tokens in the place of each."""

    first_row: int
    tokens: list[int]
    most: int


def asked_of(chunks: Sequence[Chunk]) -> list[Asked]:
    """For a step whose logits are those that its chunks want (``Chunk.wanted``), in order."""
    asked, row = [], 0
    for chunk in chunks:
        if chunk.num_scored:
            following = chunk.request.tokens[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]
            asked.append(Asked(row, following, chunk.request.sampling.prompt_logprobs or 0))
        row += len(chunk.wanted)
    return asked


def score(logits: Tensor, asked: Sequence[Asked]) -> list[PromptLogprobs | TriptychError]:
    """The answers, in order, NonFiniteLogits for one that has none. ``logits`` is float32 of shape (rows, vocabulary),
    on any device: the step's, before penalties and temperature."""
    rows = torch.tensor([row for one in asked for row in range(one.first_row, one.first_row + len(one.tokens))])
    rows, tokens = to_device([rows, torch.tensor([token for one in asked for token in one.tokens])], logits.device)
    logprobs = logits[rows].log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs >= own).sum(dim=-1)
    values, likeliest = torch.topk(logprobs, max(one.most for one in asked))
    told = to_cpu([torch.cat([own, values], dim=1), torch.cat([tokens[:, None], likeliest], dim=1).int(), ranks.int()])
    parts = zip(*(torch.split(part, [len(one.tokens) for one in asked]) for part in told), strict=True)
    return [_answer(one.most, *told_of_one) for one, told_of_one in zip(asked, parts, strict=True)]


def _answer(most: int, logprobs: Tensor, tokens: Tensor, ranks: Tensor) -> PromptLogprobs | TriptychError:
    """Of N tokens, on the host: log probabilities and tokens [N, 1 + most or more], ranks [N]."""
    if not bool(logprobs[:, 0].isfinite().all()):
        return NonFiniteLogits("the model's logits for this request's prompt are not finite numbers")
    within = slice(1 + most)
    return PromptLogprobs(most, _bytes(tokens[:, within]), _bytes(logprobs[:, within]), _bytes(ranks))


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """Those of one prompt's chunks as one; None for none."""
    if not parts:
        return None
    return PromptLogprobs(
        most=parts[0].most,
        tokens=b"".join(part.tokens for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        ranks=b"".join(part.ranks for part in parts),
    )


def _bytes(part: Tensor) -> bytes:
    array = part.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
