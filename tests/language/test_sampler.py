import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.language.sampler import Draw, sample, uniform
from triptych.messages.work import Sampling


def sampling(**settings: float) -> Sampling:
    return Sampling(**({"max_tokens": 9, "temperature": 1.0} | settings))


def kept_by_definition(logits: np.ndarray, one: Sampling) -> dict[int, float]:
    """Token → probability, after temperature, top-k and top-p, written the long way."""
    scaled = logits.astype(np.float64) / one.temperature
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if one.top_k:
        order = order[: one.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    kept, total = {}, 0.0
    for token, weight in zip(order, weights, strict=True):
        if total >= one.top_p:
            break
        kept[token] = weight
        total += weight
    return {token: weight / total for token, weight in kept.items()}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    temperature=st.floats(0.1, 3.0),
)
def test_only_what_top_k_and_top_p_keep_is_drawn_at_its_place(
    seed: int, top_k: int, top_p: float, temperature: float
) -> None:
    logits = np.random.default_rng(seed).normal(size=10).astype(np.float32)
    one = sampling(seed=seed, top_k=top_k, top_p=top_p, temperature=temperature)
    kept = kept_by_definition(logits, one)
    for index in range(20):
        [token] = sample(torch.from_numpy(logits)[None], [Draw(one, index)])
        assert token in kept
        before = sum(weight for other, weight in list(kept.items())[: list(kept).index(token)])
        assert before - 1e-6 <= uniform(seed, index) <= before + kept[token] + 1e-6


def test_draws_are_distributed_as_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    one = sampling(seed=1)
    tokens = sample(probabilities.log().expand(4000, 4), [Draw(one, index) for index in range(4000)])
    seen = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(seen, probabilities, atol=0.025)


def test_a_seed_names_its_tokens_whatever_the_batch() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    draws = [
        Draw(sampling(seed=seed, top_p=0.9), index) for seed, index in [(1, 0), (1, 1), (2, 0), (3, 7), (2**63 - 1, 9)]
    ]
    together = sample(logits, draws)
    assert [sample(logits[row : row + 1], [draws[row]])[0] for row in range(5)] == together
    assert sample(logits.flip(0), draws[::-1])[::-1] == together


def test_seeds_and_places_have_numbers_of_their_own() -> None:
    numbers = {uniform(seed, index) for seed in range(20) for index in range(20)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-300, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_temperature_towards_zero_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    draws = [Draw(sampling(seed=row, temperature=temperature, top_p=top_p), row) for row in range(8)]
    assert sample(logits, draws) == logits.argmax(dim=-1).tolist()


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.zeros(2, 50)
    logits[:, 3] = 0.1
    tokens = {tuple(sample(logits, [Draw(sampling(temperature=0), 0), Draw(sampling(seed=s), 0)])) for s in range(20)}
    assert {greedy for greedy, _ in tokens} == {3}
    assert len({sampled for _, sampled in tokens}) > 5
