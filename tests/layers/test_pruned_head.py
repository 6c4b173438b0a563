"""The pruned head's largest outputs are bit-identical to those of the full product, whatever the weights."""

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import load_adapter
from tests.support.generation import PAGE_SIZE, Generating, prompts
from triptych.checkpoint.reader import Checkpoint
from triptych.engine.runner import Runner
from triptych.layers import native
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.float_product import FbgemmProduct, bf16_product, float_product, half_product
from triptych.layers.linear import QUANTIZED_FORMATS, WEIGHT_FORMATS
from triptych.layers.products import CompiledProduct, Product
from triptych.layers.pruned_head import PrunedHead, is_faster, pruned_head_of, rounding_steps
from triptych.messages.work import SamplingParams

Pack = Callable[[Tensor, Tensor | None], Product]


@pytest.fixture(autouse=True)
def _by_these_kernels(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(native, "library", lambda: kernels)


def made(weight: Tensor, pack: Pack = half_product) -> tuple[CompiledProduct, PrunedHead]:
    product = pack(weight, None)
    assert isinstance(product, CompiledProduct)
    return product, PrunedHead(product, weight)


def check(product: CompiledProduct, pruned_head: PrunedHead, tokens: Tensor, counts: list[int]) -> list[int]:
    """Return the number of outputs computed in full for each token."""
    whole, found = product(tokens), pruned_head(tokens, counts)
    for row, count in enumerate(counts):
        wanted = whole[row] >= whole[row].sort(descending=True).values[min(count, whole.shape[1]) - 1] if count else ...
        assert torch.equal(found[row][wanted], whole[row][wanted])
        computed = found[row] != -torch.inf
        assert torch.equal(found[row][computed], whole[row][computed])
    return [panels * pruned_head.panel_outputs or product.outputs for panels in pruned_head.num_panels]


def like_a_vocabulary(weight: Tensor) -> Tensor:
    """Rows of very different magnitudes, some with single large values, some nearly equal."""
    weight = weight * torch.rand(len(weight), 1).mul(6).exp() / 1000
    weight[::7, -1] *= 40
    weight[5::50] = weight[4::50][: len(weight[5::50])]
    weight[2::90] = 0
    return weight


@pytest.mark.parametrize("pack", [half_product, bf16_product, float_product])
@pytest.mark.parametrize(("outputs", "inputs"), [(5000, 128), (3001, 77), (700, 1030), (31, 5), (1, 1)])
def test_the_largest_have_the_bits_of_the_whole_product(pack: Pack, outputs: int, inputs: int) -> None:
    product, pruned_head = made(like_a_vocabulary(torch.randn(outputs, inputs)), pack)
    tokens = torch.randn(40, inputs) * torch.rand(40, 1).mul(12).sub(6).exp()
    tokens[:, ::13] *= 30
    for counts in ([1] * 40, [20] * 40, [64, 1, 7, 3] * 10, [0, 1] * 20, [0] * 40, [65, 1] * 20):
        check(product, pruned_head, tokens, counts)
    assert (
        check(product, pruned_head, tokens, [1] * 39 + [0]) == [outputs] * 40
    )  # one token that needs all outputs makes the product full
    assert pruned_head(tokens[:0], []).shape == (0, outputs)


def test_few_outputs_are_computed() -> None:
    product, pruned_head = made(torch.randn(20_000, 512) / 20)
    computed = check(product, pruned_head, torch.randn(20, 512), [1] * 20)
    assert max(computed) < 1000
    tokens = torch.randn(20, 512)
    tokens[:, 7] = 100.0
    assert max(check(product, pruned_head, tokens, [1] * 20)) < 4000


def test_outputs_that_int8_cannot_distinguish() -> None:
    """If there are too many, the product is computed in full."""
    weight = torch.randn(1, 256).expand(4000, -1).clone()
    weight[:, 0] += torch.randn(4000) * 1e-3
    product, pruned_head = made(weight, float_product)
    tokens = torch.randn(3, 256)
    assert check(product, pruned_head, tokens, [1, 1, 20]) == [4000] * 3


def test_weights_with_the_largest_rounding_error() -> None:
    """All of them by half a step, and the token points the same way. Next to them, one that rounding doesn't change
    comes to almost as much."""
    signs = torch.randint(0, 2, (50, 65)) * 2.0 - 1
    signs[:, 0] = 0
    changed = signs * 0.5
    unchanged = signs * (torch.arange(65) <= 31)
    weight = torch.cat([changed, unchanged, torch.randn(3000, 65) / 100])
    weight[:, 0] = 127  # a step is 1, and half of one is rounded to the next even number, which is 0
    product, pruned_head = made(weight)
    assert product(signs).argmax(dim=1).tolist() == list(range(50))  # 32 for 31
    check(product, pruned_head, signs, [1] * 50)


def test_tokens_with_the_largest_rounding_error(kernels: ctypes.CDLL) -> None:
    """All values by nearly half a step of what is left after the first rounding, and the weights point the same way."""
    steps = rounding_steps(kernels)
    step = 0.5 / steps
    signs = torch.randint(0, 2, (2, 66)) * 2.0 - 1
    tokens = signs * step * 20.49
    tokens[:, 0], tokens[:, 1] = steps, 0.5
    signs[:, :2] = 0
    changed = signs.clone()
    unchanged = torch.zeros(2, 66)
    unchanged[:, 0] = (64 * step * 20.49 - step * 2) / steps
    weight = torch.cat([changed, unchanged, torch.randn(3000, 66) / 10_000])
    product, pruned_head = made(weight, float_product)
    assert product(tokens).argmax(dim=1).tolist() == [0, 1]
    check(product, pruned_head, tokens, [1] * 2)


def test_sums_whose_rounding_decides_the_order(kernels: ctypes.CDLL) -> None:
    """int8 changes none of these weights and tokens, and its sums are exact. The whole product's aren't, and whose are
    largest is decided by that."""
    numbers = torch.randint(100, 127, (2**14,)).float()
    permuted = torch.stack([numbers[torch.randperm(len(numbers))] for _ in range(500)])
    weight = torch.cat([torch.tensor([126.0, 127.0]).expand(500, -1), permuted], dim=1)
    weight[7, 0] = 127
    product, pruned_head = made(weight)
    tokens = torch.full((1, weight.shape[1]), float(rounding_steps(kernels)))
    assert (weight.double() @ tokens[0].double()).argmax() == 7
    assert product(tokens).argmax() != 7
    check(product, pruned_head, tokens, [1])


def test_the_last_output_may_be_the_largest() -> None:
    weight = torch.randn(1001, 64)
    weight[-1] *= 9
    product, pruned_head = made(weight)
    tokens = weight[-1:] * torch.tensor([[1.0], [2.0]])
    assert product(tokens).argmax(dim=1).tolist() == [1000, 1000]
    check(product, pruned_head, tokens, [1, 3])


def test_output_does_not_depend_on_the_batch() -> None:
    _, pruned_head = made(torch.randn(3000, 100))
    tokens = torch.randn(37, 100)
    counts = [(1, 20, 7, 64)[row % 4] for row in range(37)]
    together = pruned_head(tokens, counts)
    torch.set_num_threads(3)
    again = pruned_head(tokens, counts)
    alone = torch.cat([pruned_head(tokens[row : row + 1], counts[row : row + 1]) for row in range(37)])
    assert torch.equal(together, again)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e25, 1e-25, 1e-42, 0.0])
def test_activations_without_bounds_use_the_full_product(value: float) -> None:
    product, pruned_head = made(torch.randn(2000, 50), float_product)
    tokens = torch.randn(5, 50)
    expected = pruned_head(tokens, [1] * 5)
    tokens[2] = 0
    tokens[2, ::7] = value
    found = pruned_head(tokens, [1] * 5)
    assert torch.equal(found[2].nan_to_num(-7), product(tokens[2:3])[0].nan_to_num(-7))
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e5])
def test_weights_that_fp16_rounds(dtype: torch.dtype, size: float) -> None:
    """Larger weights saturate at fp16's largest value."""
    product, pruned_head = made((torch.randn(3000, 100) * size).to(dtype))
    check(product, pruned_head, torch.randn(40, 100), [1, 2, 3, 4] * 10)


def test_strided_tokens_and_wrong_shapes() -> None:
    product, pruned_head = made(torch.randn(300, 100))
    check(product, pruned_head, torch.randn(4, 230)[:, 5:105], [1] * 4)
    check(product, pruned_head, torch.randn(100, 4).T, [1] * 4)
    with pytest.raises(ValueError, match="101 inputs for a layer of 100"):
        pruned_head(torch.randn(4, 101), [1] * 4)
    with pytest.raises(ValueError, match="3 numbers for 4 tokens"):
        pruned_head(torch.randn(4, 100), [1] * 3)


def test_used_only_where_it_is_faster(kernels: ctypes.CDLL) -> None:
    weight = torch.randn(300, 100)
    assert (pruned_head_of(half_product(weight, None), weight) is not None) == is_faster(kernels)
    assert pruned_head_of(FbgemmProduct(weight, None), weight) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e20])
def test_weights_without_bounds_are_rejected(value: float) -> None:
    weight = torch.randn(300, 100)
    weight[7, 3] = value
    product: Any = float_product(weight, None)
    with pytest.raises(ValueError, match="whose sums are finite"):
        PrunedHead(product, weight)
    assert pruned_head_of(product, weight) is None
    wide = torch.ones(1, 2**16 + 1)
    with pytest.raises(ValueError, match="at most 65536 inputs"):
        PrunedHead(cast(Any, float_product(wide, None)), wide)


FEW = [{}, {"temperature": 1.0, "top_k": 9}]
ALL = [{"temperature": 1.0}, {"logprobs": 3}]


@pytest.mark.parametrize("name", ["float16", "float32", "int8"])
@pytest.mark.parametrize("settings", [FEW, FEW + ALL])
def test_answers_are_the_same(
    checkpoint_folder: Callable[..., Path], name: str, settings: list[dict[str, Any]]
) -> None:
    folder = checkpoint_folder(tied=True)
    weights = (WEIGHT_FORMATS | QUANTIZED_FORMATS)[name]
    decoder = load_adapter(folder).load_decoder(Checkpoint(folder), weights, torch.device("cpu"))
    lengths = [7, 13, 1, 9, 20, 5, 2, 9]
    samplings = [SamplingParams(max_tokens=8, seed=row, **settings[row % len(settings)]) for row in range(len(lengths))]

    def answers(pruned_head: PrunedHead | None) -> list[list[int]]:
        decoder.head.pruned_head = pruned_head
        specs = decoder.config.cache_specs(cache_format(torch.float32))
        cache = KVTensors.allocate(specs, [40], PAGE_SIZE, torch.device("cpu"))
        generating = Generating(Runner(decoder, cache, PAGE_SIZE), decoder, 40)
        return generating.answers(prompts(decoder.config.vocab_size, lengths), samplings)

    asked: list[int] = []
    pruned_head = PrunedHead(cast(Any, decoder.head.linear.product), decoder.embedding)
    with pytest.MonkeyPatch.context() as patch:
        call = PrunedHead.__call__

        def noted(head: PrunedHead, hidden: Tensor, counts: list[int]) -> Any:
            asked.extend(counts)
            return call(head, hidden, counts)

        patch.setattr(PrunedHead, "__call__", noted)
        found = answers(pruned_head)
    assert set(asked) == ({1, 9} if settings == FEW else {0, 1, 9})
    assert found == answers(None)
