from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_instances import generate
from triptych.engine import sampler, sampling_batch
from triptych.engine.history import History
from triptych.engine.request import make_request
from triptych.engine.sampler import SampledToken, SamplingInput, uniform
from triptych.engine.sampling_batch import SamplingBatch, num_candidates
from triptych.errors import InvalidRequest, NonFiniteLogits, NoTokenAllowed, TriptychError
from triptych.layers.pinned import to_cpu, to_device
from triptych.messages.work import ReasoningBudget, SamplingParams


def sampling(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 9, "temperature": 1.0} | settings))


def row_input(
    one: SamplingParams, index: int, prompt: tuple[int, ...] = (), output: tuple[int, ...] | None = None
) -> SamplingInput:
    """The input of a request that has generated ``output``, or else ``index`` arbitrary tokens."""
    generated = (0,) * index if output is None else output
    return SamplingInput(one, History([*prompt, *generated], len(prompt)), frozenset({0}))


def sample(logits: torch.Tensor, inputs: list[SamplingInput]) -> list[int]:
    return [sampled.token for sampled in good(sampler.sample(logits, inputs))]


def good(rows: list[SampledToken | TriptychError | None]) -> list[SampledToken]:
    sampled = [row for row in rows if isinstance(row, SampledToken)]
    assert sampled == rows
    return sampled


def adjust(logits: torch.Tensor, inputs: list[SamplingInput]) -> torch.Tensor:
    return sampler.adjusted_logits(logits, SamplingBatch(inputs, logits.shape[1], logits.device))


def kept_by_definition(logits: np.ndarray, one: SamplingParams) -> dict[int, float]:
    """Token → probability after temperature, min-p, top-k and top-p, in the plainest way."""
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


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**63 - 1),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    temperature=st.floats(0.1, 3.0),
    nucleus=st.sampled_from([1, 3, 1024]),
)
def test_tokens_follow_the_limited_cumulative_distribution(
    *, seed: int, top_k: int, top_p: float, min_p: float, temperature: float, nucleus: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=10).astype(np.float32)
    one = sampling(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    kept = kept_by_definition(logits, one)
    if top_k in (0, 10, 11, 12) and top_p == 1 and not min_p:
        kept = dict(sorted(kept.items()))  # without limits the vocabulary's own order is as good as any, and free
    for index in range(20):
        with patch.object(sampler, "NUCLEUS", nucleus):
            [token] = sample(torch.from_numpy(logits)[None], [row_input(one, index)])
        assert token in kept
        before = sum(weight for other, weight in list(kept.items())[: list(kept).index(token)])
        assert before - 1e-6 <= uniform(seed, index) <= before + kept[token] + 1e-6


@settings(max_examples=50)
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
def test_logits_outside_the_candidates_do_not_matter(
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
        inputs = [row_input(one, index, prompt=(1, 2, 3))]
        assert sampler.sample(others_gone, inputs) == sampler.sample(logits, inputs)


def test_ties_are_broken_independently_of_the_batch() -> None:
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)).mul(2).round()
    logits[7, :2000] = logits[7].max() + 1
    limits: list[dict[str, Any]] = [
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.4},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 1500},
        {},
    ]
    limits += [{"top_k": 3000}, {"top_k": 50}]
    for index in range(50):
        inputs = [row_input(sampling(seed=row, **limit), index) for row, limit in enumerate(limits)]
        alone = [sample(logits[row : row + 1], [inputs[row]])[0] for row in range(8)]
        assert sample(logits, inputs) == alone


def test_num_candidates() -> None:
    counts = [
        (sampling(temperature=0), 1),
        (sampling(temperature=0, top_k=20), 1),
        (sampling(top_k=20, top_p=0.8), 20),
        (sampling(), 0),
        (sampling(top_p=0.8), 0),
        (sampling(temperature=0, grammar='start: "a"'), 0),
    ]
    assert [num_candidates(one) for one, _ in counts] == [count for _, count in counts]


def test_sampled_tokens_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    one = sampling(seed=1)
    tokens = sample(probabilities.log().expand(4000, 4), [row_input(one, index) for index in range(4000)])
    seen = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(seen, probabilities, atol=0.025)


def test_a_seed_determines_its_tokens_whatever_the_batch() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    places = [(1, 0), (1, 1), (2, 0), (3, 7), (2**63 - 1, 9)]
    limits: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {},
        {"top_k": 3},
        {"min_p": 0.2, "presence_penalty": 1.0},
        {"repetition_penalty": 1.3},
    ]
    inputs = [
        row_input(sampling(seed=seed, **limit), index) for (seed, index), limit in zip(places, limits, strict=True)
    ]
    together = sample(logits, inputs)
    assert [sample(logits[row : row + 1], [inputs[row]])[0] for row in range(5)] == together
    assert sample(logits.flip(0), inputs[::-1])[::-1] == together


def test_each_seed_and_index_has_its_own_number() -> None:
    numbers = {uniform(seed, index) for seed in range(20) for index in range(20)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-300, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_temperature_towards_zero_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    inputs = [row_input(sampling(seed=row, temperature=temperature, top_p=top_p), row) for row in range(8)]
    assert sample(logits, inputs) == logits.argmax(dim=-1).tolist()


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.zeros(2, 50)
    logits[:, 3] = 0.1
    tokens = {
        tuple(sample(logits, [row_input(sampling(temperature=0), 0), row_input(sampling(seed=s), 0)]))
        for s in range(20)
    }
    assert {greedy for greedy, _ in tokens} == {3}
    assert len({sampled for _, sampled in tokens}) > 5


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0, 0.0]])
    one = sampling(temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    adjusted = adjust(logits, [row_input(one, 0, prompt=(1, 3), output=(0, 0, 2))])
    torch.testing.assert_close(
        adjusted, torch.tensor([[2.0 / 2 - 2 * 0.5 - 0.25, -1.0 * 2, 0.5 / 2 - 0.5 - 0.25, 3.0 / 2, 0.0]])
    )
    assert logits.tolist() == [[2.0, -1.0, 0.5, 3.0, 0.0]]


def test_each_row_has_its_own_penalties() -> None:
    logits = torch.ones(3, 4)
    inputs = [
        row_input(sampling(presence_penalty=0.5), 0, output=(1,)),
        row_input(sampling(), 0, output=(1,)),
        row_input(sampling(frequency_penalty=0.5), 0, output=(2, 2)),
    ]
    assert adjust(logits, inputs).tolist() == [[1, 0.5, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]]


def test_biases_and_min_tokens() -> None:
    logits = torch.tensor([[5.0, 1.0, 2.0]])
    greedy = {"temperature": 0}
    assert sample(logits, [row_input(sampling(**greedy), 0)]) == [0]
    assert sample(logits, [row_input(sampling(**greedy, logit_bias={1: 10.0}), 0)]) == [1]
    assert sample(logits, [row_input(sampling(**greedy, min_tokens=2), 1)]) == [2]
    assert sample(logits, [row_input(sampling(**greedy, min_tokens=2, logit_bias={0: 100.0}), 1)]) == [2]
    assert sample(logits, [row_input(sampling(**greedy, min_tokens=2), 2)]) == [0]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    inputs = [
        row_input(sampling(logprobs=3, temperature=0.5, logit_bias={7: 50.0}), 0),
        row_input(sampling(), 0),
        row_input(sampling(logprobs=0, temperature=0), 0),
    ]
    biased, silent, greedy = good(sampler.sample(logits, inputs))
    expected = logits.double().log_softmax(dim=-1)
    assert biased.token == 7
    assert biased.logprob == pytest.approx(expected[0, 7].item(), abs=1e-5)
    assert [token for token, _ in biased.top] == expected[0].topk(3).indices.tolist()
    assert [value for _, value in biased.top] == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert silent == SampledToken(silent.token)
    assert greedy.logprob == pytest.approx(expected[2].max().item(), abs=1e-5)
    assert greedy.top == ()


@pytest.mark.parametrize(("nucleus", "copies"), [(1024, 1), (2, 2)])
def test_results_take_one_copy_or_two_if_the_nucleus_is_too_small(
    monkeypatch: pytest.MonkeyPatch, nucleus: int, copies: int
) -> None:
    """And parameters take one: on a GPU there are no further synchronizations."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    inputs = [
        row_input(sampling(temperature=0, presence_penalty=1.0), 0, output=(3, 4)),
        row_input(sampling(seed=1, logprobs=2, repetition_penalty=1.2), 3),
        row_input(sampling(seed=2, top_p=0.9, logprobs=1), 4),
        row_input(sampling(seed=3, top_k=2), 5),
    ]
    expected = sampler.sample(logits, inputs)
    counts = {"to": 0, "from": 0}

    def counted(name: str, move: Any) -> Any:
        def counting(*arguments: Any) -> Any:
            counts[name] += 1
            return move(*arguments)

        return counting

    monkeypatch.setattr(sampler, "NUCLEUS", nucleus)
    monkeypatch.setattr(sampler, "to_cpu", counted("from", to_cpu))
    monkeypatch.setattr(sampling_batch, "to_device", counted("to", to_device))
    assert sampler.sample(logits, inputs) == expected
    assert counts == {"to": copies, "from": copies}


# ── rows that nothing can be sampled from ──────────────────────────────────────────────────────────────────────────

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
    inputs = [row_input(sampling(**way, seed=5), 1, prompt=(3, 4), output=(5,)) for _ in range(2)]
    rows = torch.stack([row, fine] if place == 0 else [fine, row])
    sampled = sampler.sample(rows, inputs)
    assert isinstance(sampled[place], NonFiniteLogits)
    assert sampled[1 - place] == sampler.sample(fine[None], inputs[:1])[0]


@pytest.mark.parametrize("way", [one for one in WAYS if "logit_bias" not in one], ids=str)
def test_a_row_whose_tokens_are_all_banned_fails_alone(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 5)
    banned = row_input(sampling(**way, min_tokens=2), 1)
    banned = SamplingInput(banned.sampling, banned.history, frozenset(range(5)))
    free = row_input(sampling(**way), 1)
    undrawn, sampled = sampler.sample(logits, [banned, free])
    assert isinstance(undrawn, NoTokenAllowed)
    assert sampled == sampler.sample(logits[1:], [free])[0]


@pytest.mark.parametrize("hidden", [NAN, INF])
def test_a_mask_does_not_hide_log_probabilities_that_are_not_finite(hidden: float) -> None:
    logits = torch.randn(1, 5)
    logits[0, 3] = hidden
    banned = row_input(sampling(temperature=0.0, min_tokens=2, logprobs=1), 1)
    [undrawn] = sampler.sample(logits, [SamplingInput(banned.sampling, banned.history, frozenset({3}))])
    assert isinstance(undrawn, NonFiniteLogits)


OPEN, CLOSE, AFTER, OTHER = 40, 41, 42, 3
BUDGETS = [
    ((), [CLOSE, AFTER], 2, (OTHER,), None),
    ((), [CLOSE, AFTER], 2, (OTHER, OTHER), CLOSE),
    ((), [CLOSE, AFTER], 2, (OTHER, OTHER, CLOSE), AFTER),
    ((), [CLOSE, AFTER], 2, (OTHER, OTHER, CLOSE, AFTER), None),
    ((), [CLOSE, AFTER], 2, (OTHER, CLOSE), None),
    ((), [CLOSE, AFTER], 2, (OTHER, OTHER, OTHER), CLOSE),
    ((), [CLOSE, AFTER], 2, (OTHER, OTHER, OTHER, CLOSE), AFTER),
    ((), [CLOSE, AFTER], 2, (OTHER, OTHER, OTHER, CLOSE, AFTER), None),
    ((), [CLOSE], 0, (), CLOSE),
    ((OPEN,), [CLOSE], 1, (OPEN,), None),
    ((OPEN,), [CLOSE], 1, (OPEN, OTHER), CLOSE),
    ((OPEN,), [CLOSE], 1, (OTHER, OTHER), None),
    ((OPEN,), [CLOSE], 0, (), None),
    ((OPEN,), [CLOSE], 0, (OPEN,), CLOSE),
]


@pytest.mark.parametrize("case", BUDGETS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_reasoning_ends_with_its_budget(
    way: dict[str, Any], case: tuple[tuple[int, ...], list[int], int, tuple[int, ...], int | None]
) -> None:
    """It ends by its history alone, so on another instance, too; the prompt's tokens don't count."""
    opening, end, tokens, output, forced = case
    torch.manual_seed(0)
    logits = torch.randn(1, 50)
    one = sampling(**way, reasoning_budget=ReasoningBudget(tokens, end, list(opening)))
    found = sample(logits, [row_input(one, 0, prompt=(CLOSE, OPEN), output=output)])
    free = sample(logits, [row_input(sampling(**way), 0, prompt=(CLOSE, OPEN), output=output)])
    assert found == ([forced] if forced is not None else free)


@pytest.mark.parametrize(("end", "opening"), [([300], []), ([-1], []), ([1], [300])])
def test_a_budget_of_tokens_outside_the_vocabulary_is_refused(end: list[int], opening: list[int]) -> None:
    budget = ReasoningBudget(1, end, opening)
    message = msgspec.structs.replace(generate("r"), sampling=SamplingParams(1, reasoning_budget=budget))
    with pytest.raises(InvalidRequest, match="out of vocabulary") as raised:
        make_request(message, [], 64, 300)
    assert raised.value.param == "thinking_token_budget"
