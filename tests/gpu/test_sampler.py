"""Sampling on a GPU equals sampling on the CPU, and synchronizes only for the result."""

import pytest
import torch

from triptych.engine import sampler
from triptych.engine.history import History
from triptych.engine.sampler import SamplingInput
from triptych.layers.pinned import to_cpu
from triptych.messages.work import SamplingParams

VOCABULARY = 151_936
LIMITS = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05, "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logit_bias": {7: 50.0}, "logprobs": 0},
    {"top_p": 0.999, "temperature": 5.0},  # reaches beyond the nucleus
]


def inputs() -> list[SamplingInput]:
    return [
        SamplingInput(
            SamplingParams(**({"max_tokens": 9, "temperature": 1.0, "seed": row} | LIMITS[row % 8])),
            History([5, 6, 7], 1),
            frozenset(),
        )
        for row in range(16)
    ]


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return 3 * torch.randn(16, VOCABULARY, generator=torch.Generator().manual_seed(0))


def test_tokens_are_those_of_the_cpu(gpu: torch.device, logits: torch.Tensor) -> None:
    expected, found = sampler.sample(logits, inputs()), sampler.sample(logits.to(gpu), inputs())
    assert [one.token for one in found] == [one.token for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-4))
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_a_seed_determines_its_tokens_in_any_batch(gpu: torch.device, logits: torch.Tensor) -> None:
    on_gpu = logits.to(gpu)
    together = sampler.sample(on_gpu, inputs())
    alone = [sampler.sample(on_gpu[row : row + 1], [one])[0] for row, one in enumerate(inputs())]
    assert [one.token for one in alone] == [one.token for one in together]


def test_sampling_waits_only_for_the_result(
    gpu: torch.device, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0

    def waiting(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        nonlocal waits
        waits += 1
        torch.cuda.set_sync_debug_mode("default")
        found = to_cpu(tensors)
        torch.cuda.set_sync_debug_mode("error")
        return found

    on_gpu = logits.to(gpu)
    monkeypatch.setattr(sampler, "to_cpu", waiting)
    sampler.sample(on_gpu, inputs())  # first uses may wait
    waits = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.sample(on_gpu, inputs())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == 2  # the last row's nucleus was too small
