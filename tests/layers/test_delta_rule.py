"""The gated delta rule's backends against transformers' functions, and against the recurrence in float64.

Triton runs in its interpreter, slowly, so it has fewer cases, and fewer heads.
"""

import platform
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from tests.layers.conftest import load_variant
from triptych.layers import native
from triptych.layers.delta_rule.base import BLOCK, DeltaBatch, DeltaHeads, DeltaRule, DeltaState, DeltaWeights
from triptych.layers.delta_rule.compiled import CompiledDeltaRule
from triptych.layers.delta_rule.reference import PyTorchDeltaRule

CPU = torch.device("cpu")
HEADS = DeltaHeads(2, 4, 20, 40)
FEW = DeltaHeads(1, 1, 12, 20)
SLOTS = 7


def triton_rule() -> DeltaRule:
    pytest.importorskip("triton", reason="Triton isn't installed")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, Triton doesn't interpret")
    from triptych.layers.delta_rule.triton_backend import TritonDeltaRule

    return TritonDeltaRule()


def compiled_rule(name: str | None) -> DeltaRule:
    usable = [variant for variant in native.usable_variants() if name is None or variant.name == name]
    if not usable or (name and platform.machine() != "x86_64"):
        pytest.skip("this processor lacks its instructions")
    return CompiledDeltaRule(load_variant(usable[0]))


RULES: dict[str, Callable[[], DeltaRule]] = {
    "PyTorch": PyTorchDeltaRule,
    "the fastest": lambda: compiled_rule(None),
    "avx2": lambda: compiled_rule("avx2"),
    "x86-64": lambda: compiled_rule("x86-64"),
}


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> DeltaRule:
    return RULES[request.param]()


class Case:
    """A layer, the state of its slots, and new tokens."""

    def __init__(self, num_tokens: int, heads: DeltaHeads = HEADS) -> None:
        torch.manual_seed(num_tokens)
        rates, biases = torch.randn(heads.value_heads), torch.randn(heads.value_heads)
        self.weights = DeltaWeights.of(heads, torch.randn(heads.channels, 1, 4) / 2, rates, biases)
        self.state = DeltaState.allocate(heads, SLOTS, torch.float32, CPU)
        self.state.recurrent.normal_()
        self.state.conv.normal_()
        self.mixed = torch.randn(num_tokens, heads.channels)
        self.a, self.b = torch.randn(2, num_tokens, heads.value_heads)

    def copy(self) -> DeltaState:
        return DeltaState(self.state.recurrent.clone(), self.state.conv.clone())

    def run(self, rule: DeltaRule, state: DeltaState, batch: DeltaBatch, tokens: slice = slice(None)) -> Tensor:
        return rule(self.mixed[tokens], self.a[tokens], self.b[tokens], self.weights, state, batch)

    def by_transformers(self, tokens: slice, slot: int, *, fresh: bool) -> tuple[Tensor, Tensor]:
        """Output and recurrent state of one sequence."""
        heads, weights = self.weights.heads, self.weights
        history = self.mixed[tokens]
        if not fresh:
            history = torch.cat((self.state.conv[slot], history))
        mixed = hf.causal_conv1d_fn(history.T[None], weights.taps.T.contiguous(), None, activation="silu")
        count = len(self.mixed[tokens])
        query, key, value = (
            part.unflatten(-1, (-1, dim))
            for part, dim in zip(
                mixed.mT[:, -count:].split(heads.segments, dim=-1),
                (heads.key_dim, heads.key_dim, heads.value_dim),
                strict=True,
            )
        )
        decay = -weights.rates * F.softplus(self.a[tokens] + weights.dt_bias)
        function = hf.torch_recurrent_gated_delta_rule if count == 1 else hf.torch_chunk_gated_delta_rule
        output, state = function(
            query, key, value, g=decay[None], beta=self.b[tokens].sigmoid()[None],
            initial_state=None if fresh else self.state.recurrent[slot : slot + 1],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return output[0], state[0]


def by_recurrence(case: Case) -> tuple[Tensor, Tensor]:
    """Output and state of one new sequence, token by token in float64."""
    heads, weights = case.weights.heads, case.weights
    history = torch.cat((torch.zeros(3, heads.channels), case.mixed)).double()
    count, shared = len(case.mixed), heads.value_heads // heads.key_heads
    taken = torch.stack([history[tap : tap + count] * weights.taps[tap].double() for tap in range(4)])
    mixed = F.silu(taken.sum(0))
    query, key, value = mixed.split(heads.segments, dim=1)
    query, key = (one.unflatten(1, (heads.key_heads, -1)) for one in (query, key))
    query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    query, key = (one.repeat_interleave(shared, 1) for one in (query * heads.key_dim**-0.5, key))
    value = value.unflatten(1, (heads.value_heads, -1))
    decay = (-weights.rates.double() * F.softplus(case.a.double() + weights.dt_bias)).exp()
    beta = case.b.double().sigmoid()
    state = torch.zeros(heads.value_heads, heads.key_dim, heads.value_dim, dtype=torch.float64)
    outputs = []
    for token in range(count):
        state = state * decay[token][:, None, None]
        change = (value[token] - torch.einsum("hkv,hk->hv", state, key[token])) * beta[token][:, None]
        state = state + key[token][:, :, None] * change[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, query[token]))
    return torch.stack(outputs).float(), state.float()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-4)


def check(rule: DeltaRule, case: Case, lens: list[int]) -> None:
    """Compare a step with transformers' results of each sequence; every other sequence is a new one."""
    slots = [5, 0, 6, 2, 3][: len(lens)]
    batch = DeltaBatch(lens, slots, [index % 2 == 0 for index in range(len(lens))])
    state = case.copy()
    output = case.run(rule, state, batch)
    start = 0
    for count, slot, fresh in zip(lens, slots, batch.fresh, strict=True):
        tokens = slice(start, start := start + count)
        expected, recurrent = case.by_transformers(tokens, slot, fresh=fresh)
        close(output[tokens], expected)
        close(state.recurrent[slot], recurrent)
        past = torch.zeros_like(case.state.conv[slot]) if fresh else case.state.conv[slot]
        assert torch.equal(state.conv[slot], torch.cat((past, case.mixed[tokens]))[-3:])
    for slot in set(range(SLOTS)) - set(slots):
        assert torch.equal(state.recurrent[slot], case.state.recurrent[slot])
        assert torch.equal(state.conv[slot], case.state.conv[slot])


@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 200])
def test_one_sequence(rule: DeltaRule, count: int) -> None:
    check(rule, Case(count), [count])


@pytest.mark.parametrize(
    "heads", [DeltaHeads(1, 1, 5, 3), DeltaHeads(1, 3, 64, 16), DeltaHeads(2, 2, 128, 128)], ids=str
)
def test_heads_of_any_size(rule: DeltaRule, heads: DeltaHeads) -> None:
    check(rule, Case(36, heads), [33, 1, 2])


def test_prefill_beside_decode_in_slots_in_any_order(rule: DeltaRule) -> None:
    check(rule, Case(91), [1, 40, 1, 48, 1])


def test_triton() -> None:
    check(triton_rule(), Case(38, DeltaHeads(1, 2, 12, 40)), [1, 33, 1, 3])


@pytest.mark.parametrize("name", [*RULES, "Triton"])
def test_results_do_not_depend_on_the_batch(name: str) -> None:
    """To the bit; nor on where a prompt is divided, if it is at multiples of the block."""
    rule = triton_rule() if name == "Triton" else RULES[name]()
    case = Case(2 * BLOCK + 5, FEW if name == "Triton" else HEADS)
    state, alone = case.copy(), case.copy()
    lens = [BLOCK + 1, 1, BLOCK + 3]
    together = case.run(rule, state, DeltaBatch(lens, [3, 1, 4], [True, False, True]))
    parts = [
        (slice(BLOCK + 1, BLOCK + 2), 1, False),
        (slice(BLOCK), 3, True),
        (slice(BLOCK, BLOCK + 1), 3, False),
        (slice(BLOCK + 2, 2 * BLOCK + 2), 4, True),
        (slice(2 * BLOCK + 2, None), 4, False),
    ]
    for tokens, slot, fresh in parts:
        count = len(case.mixed[tokens])
        output = case.run(rule, alone, DeltaBatch([count], [slot], [fresh]), tokens)
        assert torch.equal(output, together[tokens]), tokens
    assert torch.equal(state.recurrent, alone.recurrent)
    assert torch.equal(state.conv, alone.conv)


def test_a_prompt_divided_anywhere_differs_by_rounding(rule: DeltaRule) -> None:
    case = Case(90)
    whole, parts = case.copy(), case.copy()
    expected = case.run(rule, whole, DeltaBatch([90], [2], [True]))
    start, outputs = 0, []
    for count in (2, 31, 1, 36, 20):
        batch = DeltaBatch([count], [2], [start == 0])
        outputs.append(case.run(rule, parts, batch, slice(start, start := start + count)))
    close(torch.cat(outputs), expected)
    close(parts.recurrent, whole.recurrent)


def test_a_ranks_heads_give_the_same_bits_also_with_threads(rule: DeltaRule) -> None:
    """Each of two ranks has one key head of two, in strided tensors that both share."""
    case, heads = Case(70), HEADS
    batch = DeltaBatch([40, 1, 29], [3, 0, 1], [True, False, False])
    whole, shared = case.copy(), case.copy()
    expected = case.run(rule, whole, batch)
    torch.set_num_threads(3)  # conftest.py restores it
    half = replace(heads, key_heads=1, value_heads=2)
    for rank in range(2):
        channels = torch.cat([part.chunk(2)[rank] for part in torch.arange(heads.channels).split(heads.segments)])
        own = slice(2 * rank, 2 * rank + 2)
        weights = DeltaWeights(
            half, case.weights.taps[:, channels].contiguous(), case.weights.rates[own], case.weights.dt_bias[own]
        )
        state = DeltaState(shared.recurrent[:, own], shared.conv[:, :, channels])
        mixed = torch.randn(70, half.channels + 9)[:, 4:-5]
        mixed.copy_(case.mixed[:, channels])
        output = rule(mixed, case.a[:, own], case.b[:, own], weights, state, batch)
        if isinstance(rule, PyTorchDeltaRule):
            close(output, expected[:, own])
        else:
            assert torch.equal(output, expected[:, own])
            assert torch.equal(state.recurrent, whole.recurrent[:, own])


def hostile(kind: str, num_tokens: int, heads: DeltaHeads) -> Case:
    case = Case(num_tokens, heads)
    if kind == "strong decays":  # e^g is 0, between tokens that are remembered
        case.a[::3] = 1e9
        case.a[1::3] = -4
    elif kind == "no decay":
        case.a.fill_(-1e9)
    elif kind == "nothing":
        case.mixed.zero_()
    elif kind == "large":
        case.mixed *= 1e6
    else:  # one key for all tokens, and each change replaces the one before
        case.mixed[3:] = case.mixed[3]
        case.a.fill_(-30)
        case.b.fill_(30)
    return case


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(RULES, ["strong decays", "no decay", "nothing", "large", "equal keys"]),
        *product(["Triton"], ["strong decays", "equal keys"]),  # the interpreter takes long
    ],
)
def test_hostile_values(name: str, kind: str) -> None:
    rule = triton_rule() if name == "Triton" else RULES[name]()
    case = hostile(kind, *((33, FEW) if name == "Triton" else (70, HEADS)))
    state = case.copy()
    output = case.run(rule, state, DeltaBatch([len(case.mixed)], [4], [True]))
    expected, recurrent = by_recurrence(case)
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(output, expected, atol=1e-5 * scale, rtol=1e-4)
    torch.testing.assert_close(state.recurrent[4], recurrent, atol=1e-5 * scale, rtol=1e-4)


def test_nan_stays_in_its_sequence(rule: DeltaRule) -> None:
    """A new sequence ignores what its slot held; NaN of others doesn't reach it."""
    case = Case(44)
    case.mixed[5], case.a[20], case.b[38] = (torch.nan,) * 3
    case.state.recurrent.fill_(torch.nan)
    case.state.conv.fill_(torch.nan)
    lens, state = [17, 17, 1, 1, 7, 1], case.copy()
    output = case.run(rule, state, DeltaBatch(lens, [6, 5, 4, 3, 2, 1], [True, True, True, False, True, True]))
    finite = [bool(part.isfinite().all()) for part in output.split(lens)]
    assert finite == [False, False, True, False, False, True]
    assert state.recurrent[[4, 1]].isfinite().all()
    assert state.conv[[4, 1]].isfinite().all()


def test_bfloat16_on_cpus() -> None:
    case = Case(40)
    weights = replace(case.weights, taps=case.weights.taps.bfloat16())
    state = DeltaState(case.state.recurrent.clone(), case.state.conv.bfloat16())
    batch, rule = DeltaBatch([39, 1], [1, 2], [True, False]), compiled_rule(None)
    exact = case.run(rule, case.state, batch)
    found = rule(case.mixed.bfloat16(), case.a.bfloat16(), case.b.bfloat16(), weights, state, batch)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 2e-2 * exact.norm()


def test_invalid_operands(rule: DeltaRule) -> None:
    case = Case(2)
    for slot in (-1, SLOTS):
        with pytest.raises(IndexError, match=str(slot)):
            case.run(rule, case.state, DeltaBatch([2], [slot], [False]))
    with pytest.raises(ValueError, match="slot"):
        DeltaBatch([1, 1], [3, 3], [False, False])
    with pytest.raises(ValueError, match="fresh"):
        DeltaBatch([1], [3], [])
    with pytest.raises(ValueError, match="without new tokens"):
        DeltaBatch([0], [3], [False])
    with pytest.raises(ValueError, match="value heads"):
        DeltaHeads(2, 3, 8, 8)
    with pytest.raises(ValueError, match="none"):
        DeltaHeads(2, 4, 0, 8)
    rates = torch.zeros(4)
    with pytest.raises(ValueError, match="convolution"):
        DeltaWeights.of(HEADS, torch.zeros(HEADS.channels, 1, 3), rates, rates)
    with pytest.raises(ValueError, match="A_log"):
        DeltaWeights.of(HEADS, torch.zeros(HEADS.channels, 1, 4), rates[:3], rates)
