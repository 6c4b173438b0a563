from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine import sampler
from triptych.engine import sampling_batch as draws_module
from triptych.engine.history import History
from triptych.engine.sampler import SampledToken, SamplingInput, uniform
from triptych.engine.sampling_batch import Plan, num_candidates
from triptych.errors import NonFiniteLogits, NoTokenAllowed, TriptychError
from triptych.messages.work import GrammarSpec, SamplingParams


def sampling(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 9, "temperature": 1.0} | settings))


def draw(
    one: SamplingParams, index: int, prompt: tuple[int, ...] = (), output: tuple[int, ...] | None = None
) -> SamplingInput:
    """The draw of a request that has generated ``output``, or ``index`` tokens whatever they are."""
    generated = (0,) * index if output is None else output
    return SamplingInput(one, History([*prompt, *generated], len(prompt)), frozenset({0}))


def sample(logits: torch.Tensor, draws: list[SamplingInput]) -> list[int]:
    return [drawn.token for drawn in good(sampler.sample(logits, draws))]


def good(rows: list[SampledToken | TriptychError]) -> list[SampledToken]:
    drawn = [row for row in rows if isinstance(row, SampledToken)]
    assert drawn == rows
    return drawn


def adjust(logits: torch.Tensor, draws: list[SamplingInput]) -> torch.Tensor:
    return sampler._adjusted(logits, Plan(draws, logits.shape[1], logits.device))


def kept_by_definition(logits: np.ndarray, one: SamplingParams) -> dict[int, float]:
    """Token → probability, after temperature, min-p, top-k and top-p, written the long way."""
    scaled = logits.astype(np.float64) / one.temperature
    if not one.top_k and one.top_p == 1 and not one.min_p:
        weights = np.exp(scaled - scaled.max())
        return dict(enumerate(weights / weights.sum()))
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    order = [token for token in order if np.exp(scaled[token] - scaled[order[0]]) >= one.min_p]
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
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    temperature=st.floats(0.1, 3.0),
    nucleus=st.sampled_from([1, 3, 1024]),
)
def test_only_what_the_limits_keep_is_drawn_at_its_place(
    *, seed: int, top_k: int, top_p: float, min_p: float, temperature: float, nucleus: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=10).astype(np.float32)
    one = sampling(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    kept = kept_by_definition(logits, one)
    if top_k in (0, 10, 11, 12) and top_p == 1 and not min_p:
        kept = dict(sorted(kept.items()))  # without limits the vocabulary's own order is as good as any, and free
    for index in range(20):
        with patch.object(sampler, "NUCLEUS", nucleus):
            [token] = sample(torch.from_numpy(logits)[None], [draw(one, index)])
        assert token in kept
        before = sum(weight for other, weight in list(kept.items())[: list(kept).index(token)])
        assert before - 1e-6 <= uniform(seed, index) <= before + kept[token] + 1e-6


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 2.0]),
    top_k=st.integers(0, 35),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.1]),
    alike=st.booleans(),
)
@pytest.mark.parametrize(
    "other",
    [
        {},
        {"repetition_penalty": 4.0},
        {"presence_penalty": 4.0},
        {"frequency_penalty": 4.0},
        {"logit_bias": {7: 9.0}},
        {"min_tokens": 30},
        {"logprobs": 3},
    ],
)
def test_what_is_not_among_the_candidates_does_not_matter(
    *, other: dict[str, Any], seed: int, temperature: float, top_k: int, top_p: float, min_p: float, alike: bool
) -> None:
    one = sampling(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **other)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 30)).astype(np.float32))
    if alike:
        logits = logits.round()
    logits[0, 0] = logits.max()  # ends the answer, and is what has been generated so far
    count = num_candidates(one)
    smallest = logits.sort(descending=True).values[0, min(count, 30) - 1] if count else -torch.inf
    others_gone = logits.where(logits >= smallest, -torch.inf)
    for index in range(20):
        drawn = [draw(one, index, prompt=(1, 2, 3))]
        assert sampler.sample(others_gone, drawn) == sampler.sample(logits, drawn)


def test_equally_likely_tokens_are_chosen_among_alike_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)).mul(2).round()
    logits[7, :2000] = logits[7].max() + 1
    limits = [{"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.4}, {"top_k": 40, "top_p": 0.9}, {"top_k": 1500}, {}]
    limits += [{"top_k": 3000}, {"top_k": 50}]
    for index in range(50):
        draws = [draw(sampling(seed=row, **limit), index) for row, limit in enumerate(limits)]
        alone = [sample(logits[row : row + 1], [draws[row]])[0] for row in range(8)]
        assert sample(logits, draws) == alone


def test_who_has_few_candidates() -> None:
    counts = [
        (sampling(temperature=0), 1),
        (sampling(temperature=0, top_k=20), 1),
        (sampling(top_k=20, top_p=0.8), 20),
        (sampling(), 0),
        (sampling(top_p=0.8), 0),
        (sampling(temperature=0, grammar=GrammarSpec(kind="choice", text='["a"]')), 0),
    ]
    assert [num_candidates(one) for one, _ in counts] == [count for _, count in counts]


def test_draws_are_distributed_as_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    one = sampling(seed=1)
    tokens = sample(probabilities.log().expand(4000, 4), [draw(one, index) for index in range(4000)])
    seen = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(seen, probabilities, atol=0.025)


def test_a_seed_names_its_tokens_whatever_the_batch() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    places = [(1, 0), (1, 1), (2, 0), (3, 7), (2**63 - 1, 9)]
    limits = [{"top_p": 0.9}, {}, {"top_k": 3}, {"min_p": 0.2, "presence_penalty": 1.0}, {"repetition_penalty": 1.3}]
    draws = [draw(sampling(seed=seed, **limit), index) for (seed, index), limit in zip(places, limits, strict=True)]
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
    draws = [draw(sampling(seed=row, temperature=temperature, top_p=top_p), row) for row in range(8)]
    assert sample(logits, draws) == logits.argmax(dim=-1).tolist()


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.zeros(2, 50)
    logits[:, 3] = 0.1
    tokens = {tuple(sample(logits, [draw(sampling(temperature=0), 0), draw(sampling(seed=s), 0)])) for s in range(20)}
    assert {greedy for greedy, _ in tokens} == {3}
    assert len({sampled for _, sampled in tokens}) > 5


def test_penalties_are_those_of_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0, 0.0]])
    one = sampling(temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    adjusted = adjust(logits, [draw(one, 0, prompt=(1, 3), output=(0, 0, 2))])
    torch.testing.assert_close(
        adjusted, torch.tensor([[2.0 / 2 - 2 * 0.5 - 0.25, -1.0 * 2, 0.5 / 2 - 0.5 - 0.25, 3.0 / 2, 0.0]])
    )
    assert logits.tolist() == [[2.0, -1.0, 0.5, 3.0, 0.0]]


def test_each_row_has_its_own_penalties() -> None:
    logits = torch.ones(3, 4)
    draws = [
        draw(sampling(presence_penalty=0.5), 0, output=(1,)),
        draw(sampling(), 0, output=(1,)),
        draw(sampling(frequency_penalty=0.5), 0, output=(2, 2)),
    ]
    assert adjust(logits, draws).tolist() == [[1, 0.5, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]]


def test_a_bias_moves_the_choice_and_min_tokens_forbid_to_end() -> None:
    logits = torch.tensor([[5.0, 1.0, 2.0]])
    greedy = {"temperature": 0}
    assert sample(logits, [draw(sampling(**greedy), 0)]) == [0]
    assert sample(logits, [draw(sampling(**greedy, logit_bias={1: 10.0}), 0)]) == [1]
    assert sample(logits, [draw(sampling(**greedy, min_tokens=2), 1)]) == [2]
    assert sample(logits, [draw(sampling(**greedy, min_tokens=2, logit_bias={0: 100.0}), 1)]) == [2]
    assert sample(logits, [draw(sampling(**greedy, min_tokens=2), 2)]) == [0]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    draws = [
        draw(sampling(logprobs=3, temperature=0.5, logit_bias={7: 50.0}), 0),
        draw(sampling(), 0),
        draw(sampling(logprobs=0, temperature=0), 0),
    ]
    biased, silent, greedy = sampler.sample(logits, draws)
    expected = logits.double().log_softmax(dim=-1)
    assert biased.token == 7
    assert biased.logprob == pytest.approx(expected[0, 7].item(), abs=1e-5)
    assert [token for token, _ in biased.top] == expected[0].topk(3).indices.tolist()
    assert [value for _, value in biased.top] == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert silent == SampledToken(silent.token)
    assert (greedy.logprob, greedy.top) == (pytest.approx(expected[2].max().item(), abs=1e-5), ())


@pytest.mark.parametrize(("nucleus", "copies"), [(1024, 1), (2, 2)])
def test_results_come_in_one_copy_and_in_two_if_the_nucleus_was_too_small(
    monkeypatch: pytest.MonkeyPatch, nucleus: int, copies: int
) -> None:
    """And what the draws are made by goes in one: a GPU would be waited for no more often than that."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    draws = [
        draw(sampling(temperature=0, presence_penalty=1.0), 0, output=(3, 4)),
        draw(sampling(seed=1, logprobs=2, repetition_penalty=1.2), 3),
        draw(sampling(seed=2, top_p=0.9, logprobs=1), 4),
        draw(sampling(seed=3, top_k=2), 5),
    ]
    expected = sampler.sample(logits, draws)
    counts = {"to": 0, "from": 0}

    def counted(name: str, move: Any) -> Any:
        def counting(*arguments: Any) -> Any:
            counts[name] += 1
            return move(*arguments)

        return counting

    monkeypatch.setattr(sampler, "NUCLEUS", nucleus)
    monkeypatch.setattr(sampler, "to_cpu", counted("from", sampler.to_cpu))
    monkeypatch.setattr(draws_module, "to_device", counted("to", draws_module.to_device))
    assert sampler.sample(logits, draws) == expected
    assert counts == {"to": copies, "from": copies}


# ── rows that nothing can be drawn from ──────────────────────────────────────────────────────────────────────────

INF, NAN = torch.inf, torch.nan
BAD_ROWS = {
    "an infinity": {7: INF},
    "two infinities": {7: INF, 9: INF},
    "a NaN": {7: NAN},
    "a NaN first": {0: NAN},
    "a NaN last": {40: NAN},
    "an infinity and a NaN": {3: INF, 9: NAN},
    "nothing but NaNs": dict.fromkeys(range(41), NAN),
    "nothing but minus infinity": dict.fromkeys(range(41), -INF),
}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"top_k": 5},
    {"top_k": 5, "top_p": 0.5},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"logprobs": 3},
    {"temperature": 0.0, "logprobs": 3, "top_k": 2},
    {"temperature": 0.0, "repetition_penalty": 0.01},
    {"repetition_penalty": 100.0},
    {"logit_bias": {9: 100.0}, "presence_penalty": 2.0},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("what", BAD_ROWS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_row_that_is_not_finite_fails_alone(what: str, way: dict[str, Any], place: int) -> None:
    torch.manual_seed(0)
    fine, row = 3 * torch.randn(41), 3 * torch.randn(41)
    for token, value in BAD_ROWS[what].items():
        row[token] = value
    draws = [draw(sampling(**way, seed=5), 1, prompt=(3, 4), output=(5,)) for _ in range(2)]
    rows = torch.stack([row, fine] if place == 0 else [fine, row])
    drawn = sampler.sample(rows, draws)
    assert isinstance(drawn[place], NonFiniteLogits)
    assert drawn[1 - place] == sampler.sample(fine[None], draws[:1])[0]


@pytest.mark.parametrize("way", [one for one in WAYS if "logit_bias" not in one], ids=str)
def test_a_row_whose_tokens_are_all_banned_fails_alone(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 5)
    banned = draw(sampling(**way, min_tokens=2), 1)
    banned = SamplingInput(banned.sampling, banned.history, frozenset(range(5)))
    free = draw(sampling(**way), 1)
    undrawn, drawn = sampler.sample(logits, [banned, free])
    assert isinstance(undrawn, NoTokenAllowed)
    assert drawn == sampler.sample(logits[1:], [free])[0]


@pytest.mark.parametrize("hidden", [NAN, INF])
def test_a_mask_does_not_hide_what_log_probabilities_would_tell(hidden: float) -> None:
    logits = torch.randn(1, 5)
    logits[0, 3] = hidden
    banned = draw(sampling(temperature=0.0, min_tokens=2, logprobs=1), 1)
    [undrawn] = sampler.sample(logits, [SamplingInput(banned.sampling, banned.history, frozenset({3}))])
    assert isinstance(undrawn, NonFiniteLogits)
