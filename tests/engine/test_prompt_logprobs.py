import numpy as np
import pytest
import torch

from tests.support.generation import request
from triptych.engine.prompt_logprobs import asked_of, joined, score
from triptych.engine.runner import num_largest
from triptych.engine.scheduler import Chunk
from triptych.errors import NonFiniteLogits
from triptych.messages.work import SamplingParams

VOCABULARY = 11


def test_rows_are_those_of_the_chunks_that_ask() -> None:
    """Beside others that sample, or neither ask nor sample."""
    plain, asking = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, prompt_logprobs=2)
    chunks = [
        Chunk(request("0", [1, 2, 3], plain), 0, 3),  # samples
        Chunk(request("1", [4, 5, 6, 7], asking), 0, 2),  # tells of 5 and 6
        Chunk(request("2", [1, 2, 3], plain), 0, 2),  # neither
        Chunk(request("3", [8, 9, 10], asking), 1, 2),  # tells of 10, and samples
        Chunk(request("4", [3], asking), 0, 1),  # has nothing to tell of
    ]
    assert [list(chunk.wanted) for chunk in chunks] == [[2], [0, 1], [], [0, 1], [0]]
    assert [num_largest(chunk) for chunk in chunks] == [[1], [0, 0], [], [0, 1], [1]]
    told = asked_of(chunks)
    assert [(one.first_row, one.tokens, one.most) for one in told] == [(1, [5, 6], 2), (3, [10], 2)]
    answering = request("5", [1, 2, 3], asking)
    answering.tokens.append(4)
    assert list(Chunk(answering, 0, 4).wanted) == [3], "with the first token all has been told"


def test_scores_by_definition() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[4, 3:6] = logits[4].max() + 1  # three that are equally likely
    chunks = [
        Chunk(request("0", [4, 5, 6, 7, 8], SamplingParams(max_tokens=1, prompt_logprobs=3)), 1, 3),
        Chunk(request("1", [1, 4, 9], SamplingParams(max_tokens=1, prompt_logprobs=0)), 0, 2),
    ]
    asked = asked_of(chunks)
    parts = score(logits, asked)
    expected = logits.double().log_softmax(dim=-1).numpy()
    for one, part in zip(asked, parts, strict=True):
        width = 1 + one.most
        tokens = np.frombuffer(part.tokens, "<i4").reshape(-1, width)
        logprobs = np.frombuffer(part.logprobs, "<f4").reshape(-1, width)
        for row, (which, numbers, rank) in enumerate(
            zip(tokens, logprobs, np.frombuffer(part.ranks, "<i4"), strict=True), start=one.first_row
        ):
            assert which[0] == one.tokens[row - one.first_row]
            np.testing.assert_allclose(numbers, expected[row, which], atol=1e-5)
            assert (np.sort(expected[row])[::-1][: one.most] - numbers[1:] < 1e-5).all()
            assert rank == (logits[row] >= logits[row, which[0]]).sum()


def test_the_parts_of_a_prompt_are_joined_in_order() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    whole = request("0", [1, 2, 3, 4, 5], SamplingParams(max_tokens=1, prompt_logprobs=2))
    first, second = Chunk(whole, 0, 3), Chunk(whole, 3, 2)
    parts = [*score(logits[:3], asked_of([first])), *score(logits[3:], asked_of([second]))]
    assert joined(parts) == score(logits, asked_of([Chunk(whole, 0, 5)]))[0]
    assert joined([]) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_fail_their_prompt_alone(value: float) -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
    chunks = [
        Chunk(request(str(n), [1, 4, 9], SamplingParams(max_tokens=1, prompt_logprobs=2)), 0, 2 + (n == 1))
        for n in range(2)
    ]
    expected = score(logits, asked_of(chunks))
    logits[1, 2] = value
    bad, good = score(logits, asked_of(chunks))
    assert isinstance(bad, NonFiniteLogits)
    assert good == expected[1]
