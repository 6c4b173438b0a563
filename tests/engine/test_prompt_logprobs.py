import numpy as np
import pytest
import torch

from tests.support.generation import request
from triptych.engine.prompt_logprobs import joined, prompt_logprobs_queries, score
from triptych.engine.runner import num_largest
from triptych.engine.scheduler import Chunk
from triptych.errors import NonFiniteLogits
from triptych.messages.work import SamplingParams

VOCABULARY = 11


def test_queries_cover_the_chunks_that_request_logprobs() -> None:
    """Beside chunks that only sample, or do neither."""
    plain, asking = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, prompt_logprobs=2)
    chunks = [
        Chunk(request("0", [1, 2, 3], plain), 0, 3),  # samples
        Chunk(request("1", [4, 5, 6, 7], asking), 0, 2),  # scores 5 and 6
        Chunk(request("2", [1, 2, 3], plain), 0, 2),  # neither
        Chunk(request("3", [8, 9, 10], asking), 1, 2),  # scores 10, and samples
        Chunk(request("4", [3], asking), 0, 1),  # has nothing to score
    ]
    assert [list(chunk.wanted) for chunk in chunks] == [[2], [0, 1], [], [0, 1], [0]]
    assert [num_largest(chunk) for chunk in chunks] == [[1], [0, 0], [], [0, 1], [1]]
    queries = prompt_logprobs_queries(chunks)
    assert [(one.first_row, one.tokens, one.num_top) for one in queries] == [(1, [5, 6], 2), (3, [10], 2)]
    answering = request("5", [1, 2, 3], asking)
    answering.tokens.append(4)
    assert list(Chunk(answering, 0, 4).wanted) == [3], "prompt logprobs go out with the first token"


def test_scores_follow_the_definition() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[4, 3:6] = logits[4].max() + 1  # three that are equally likely
    chunks = [
        Chunk(request("0", [4, 5, 6, 7, 8], SamplingParams(max_tokens=1, prompt_logprobs=3)), 1, 3),
        Chunk(request("1", [1, 4, 9], SamplingParams(max_tokens=1, prompt_logprobs=0)), 0, 2),
    ]
    queries = prompt_logprobs_queries(chunks)
    parts = score(logits, queries)
    expected = logits.double().log_softmax(dim=-1).numpy()
    for one, part in zip(queries, parts, strict=True):
        width = 1 + one.num_top
        tokens = np.frombuffer(part.tokens, "<i4").reshape(-1, width)
        logprobs = np.frombuffer(part.logprobs, "<f4").reshape(-1, width)
        for row, (which, numbers, rank) in enumerate(
            zip(tokens, logprobs, np.frombuffer(part.ranks, "<i4"), strict=True), start=one.first_row
        ):
            assert which[0] == one.tokens[row - one.first_row]
            np.testing.assert_allclose(numbers, expected[row, which], atol=1e-5)
            assert (np.sort(expected[row])[::-1][: one.num_top] - numbers[1:] < 1e-5).all()
            assert rank == (logits[row] >= logits[row, which[0]]).sum()


def test_a_prompts_chunks_are_joined_in_order() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(2))
    whole = request("0", [1, 2, 3, 4, 5], SamplingParams(max_tokens=1, prompt_logprobs=2))
    first, second = Chunk(whole, 0, 3), Chunk(whole, 3, 2)
    parts = [
        *score(logits[:3], prompt_logprobs_queries([first])),
        *score(logits[3:], prompt_logprobs_queries([second])),
    ]
    assert joined(parts) == score(logits, prompt_logprobs_queries([Chunk(whole, 0, 5)]))[0]
    assert joined([]) is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_fail_only_their_prompt(value: float) -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3))
    chunks = [
        Chunk(request(str(n), [1, 4, 9], SamplingParams(max_tokens=1, prompt_logprobs=2)), 0, 2 + (n == 1))
        for n in range(2)
    ]
    expected = score(logits, prompt_logprobs_queries(chunks))
    logits[1, 2] = value
    bad, good = score(logits, prompt_logprobs_queries(chunks))
    assert isinstance(bad, NonFiniteLogits)
    assert good == expected[1]
