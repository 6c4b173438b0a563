"""Attention in towers: by the compiled kernel and without it."""

import ctypes
import threading

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.layers.attention import tower
from triptych.layers.attention.compiled import PagedAttention
from triptych.layers.attention.tower import attend

SEGMENTS = [[1], [2], [64], [150], [64, 32, 32, 16], [3, 1, 70], [1, 1], [4, 0, 4]]


def operands(num_tokens: int, heads: int, dim: int) -> list[Tensor]:
    """Queries, keys and values as projected: adjacent in one tensor."""
    torch.manual_seed(num_tokens)
    return list(torch.randn(num_tokens, 3, heads, dim).unbind(1))


def expected(operands: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    wide = [tensor.double().transpose(0, 1).split(lengths, dim=1) for tensor in operands]
    parts = [F.scaled_dot_product_attention(q, k, v, scale=scale) for q, k, v in zip(*wide, strict=True)]
    return torch.cat(parts, dim=1).transpose(0, 1).float()


@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (2, 72), (3, 80), (1, 8)])
@pytest.mark.parametrize("lengths", SEGMENTS)
def test_each_token_attends_to_its_segment(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, lengths: list[int], heads: int, dim: int
) -> None:
    monkeypatch.setattr(tower, "paged_attention", lambda in_bf16=False: PagedAttention(kernels, in_bf16))
    query, key, value = operands(sum(lengths), heads, dim)
    for keys in (key, key.contiguous()):
        for scale in (dim**-0.5, 0.3):
            found = attend(query, keys, value, lengths, scale)
            torch.testing.assert_close(found, expected([query, key, value], lengths, scale), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 32), (192, 64), (40, 24)])
def test_the_first_values_alone(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, dim: int, value_dim: int, *, in_bf16: bool
) -> None:
    """What follows isn't read, nor written: by the kernel and by PyTorch."""
    lengths = [3, 1, 70]
    query, key, value = operands(sum(lengths), 2, dim)
    for kernel in (PagedAttention(kernels, in_bf16), None):
        monkeypatch.setattr(tower, "paged_attention", lambda _, kernel=kernel: kernel)
        whole = attend(query, key, value, lengths, 0.125, in_bf16)
        value[..., value_dim:] = torch.nan
        found = attend(query, key, value, lengths, 0.125, in_bf16, value_dim)
        torch.testing.assert_close(found, whole[..., :value_dim], atol=1e-6, rtol=1e-5)
        value.nan_to_num_()


@pytest.mark.parametrize("dim", [8, 64, 72, 80, 256])
@pytest.mark.parametrize("lengths", SEGMENTS)
def test_in_bf16_where_the_processor_can(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, lengths: list[int], dim: int
) -> None:
    monkeypatch.setattr(tower, "paged_attention", lambda in_bf16=False: PagedAttention(kernels, in_bf16))
    query, key, value = operands(sum(lengths), 2, dim)
    brief, whole = (attend(query, key, value, lengths, 0.125, in_bf16) for in_bf16 in (True, False))
    assert (brief - whole).norm() < 2**-7 * whole.norm()
    can = bool(ctypes.c_int.in_dll(kernels, "attention_has_bf16").value)
    assert torch.equal(brief, whole) == (not can or max(lengths) == 1)


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("dim", [64, 72])
def test_a_segment_comes_to_the_same_beside_others(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, dim: int, *, in_bf16: bool
) -> None:
    monkeypatch.setattr(tower, "paged_attention", lambda in_bf16=False: PagedAttention(kernels, in_bf16))
    lengths = [70, 129, 1, 64]
    query, key, value = operands(sum(lengths), 3, dim)
    torch.set_num_threads(3)
    together = attend(query, key, value, lengths, 0.125, in_bf16)
    torch.set_num_threads(1)
    each = (part.split(lengths) for part in (together, query, key, value))
    for found, queries, keys, values in zip(*each, strict=True):
        assert torch.equal(found, attend(queries, keys, values, [len(found)], 0.125, in_bf16))


@pytest.mark.parametrize("lengths", SEGMENTS)
def test_unsupported_shapes_use_pytorch(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    query, key, value = operands(sum(lengths), 4, 64)
    wanted = expected([query, key, value], lengths, 0.125)
    halves = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), lengths, 0.125)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), wanted, atol=0.03, rtol=0.03)
    monkeypatch.setattr(tower, "paged_attention", lambda *_: None)
    torch.testing.assert_close(attend(query, key, value, lengths, 0.125), wanted, atol=2e-5, rtol=2e-5)


def test_segments_of_a_wrong_total_are_rejected(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = operands(20, 4, 64)
    for kernel in (PagedAttention(kernels), None):
        monkeypatch.setattr(tower, "paged_attention", lambda _, kernel=kernel: kernel)
        for lengths in ([8, 8], [8, 16]):
            with pytest.raises((ValueError, RuntimeError)):
                attend(query, key, value, lengths, 0.125)


def test_empty_operands_are_rejected(kernels: ctypes.CDLL) -> None:
    kernel = PagedAttention(kernels)
    assert not kernel.suits(torch.zeros(5, 3, 8), torch.zeros(1, 5, 2, 8))
    with pytest.raises(ValueError, match="0 keys"):
        kernel.over_segments(torch.zeros(3, 2, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), [3])
    nothing = torch.zeros(0, 2, 8)
    with pytest.raises(ValueError, match="0 queries"):
        kernel.over_segments(nothing, nothing, nothing, [0])


@pytest.mark.parametrize("dim", [256, 576])
def test_threads_with_stacks_of_2_mib_suffice(kernels: ctypes.CDLL, dim: int) -> None:
    """As many have where the stack is unlimited; a larger array on the stack would end the process."""
    query, key, value = operands(512, 8, dim)
    kernel, outputs = PagedAttention(kernels), list[Tensor]()
    before = threading.stack_size(2**21)
    try:
        thread = threading.Thread(target=lambda: outputs.append(kernel.over_segments(query, key, value, [512], 0.1)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    torch.testing.assert_close(outputs[0], expected([query, key, value], [512], 0.1), atol=2e-5, rtol=2e-5)
