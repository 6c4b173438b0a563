"""Attention in towers: by the compiled kernel and without it, as transformers' modules ask for it."""

import ctypes

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.models.attention import tower
from triptych.models.attention.compiled import PagedAttention


def operands(num_tokens: int, heads: int, dim: int) -> list[Tensor]:
    """Query and key by themselves, as rotation leaves them, the value a view of what was projected; [1, heads, T, d]"""
    torch.manual_seed(num_tokens)
    query, key, _ = (torch.randn(num_tokens, heads, dim) for _ in range(3))
    value = torch.randn(num_tokens, 3, heads, dim)[:, 2]
    return [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    wide = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), scale=scale)
    return wide.transpose(1, 2).float()


@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (2, 72), (3, 80), (1, 8)])
@pytest.mark.parametrize("num_tokens", [1, 2, 64, 150])
def test_each_token_sees_all(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, num_tokens: int, heads: int, dim: int
) -> None:
    monkeypatch.setattr(tower, "paged_attention", lambda: PagedAttention(kernels))
    query, key, value = operands(num_tokens, heads, dim)
    for scale in (dim**-0.5, 0.3):
        found, _ = tower.tower_attention(nn.Module(), query, key, value, None, scaling=scale, is_causal=False)
        torch.testing.assert_close(found, expected(query, key, value, scale), atol=2e-5, rtol=2e-5)


def test_what_the_kernel_is_not_made_for_goes_through_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = operands(40, 4, 64)
    settings = {"scaling": 0.125, "is_causal": False}
    mask = (
        torch.zeros(1, 1, 40, 40).masked_fill_(torch.rand(40, 40) < 0.3, -torch.inf).index_fill_(3, torch.tensor(0), 0)
    )
    masked, _ = tower.tower_attention(nn.Module(), query, key, value, mask, **settings)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(masked, wanted)
    twice, _ = tower.tower_attention(
        nn.Module(), *(t.expand(2, -1, -1, -1) for t in (query, key, value)), None, **settings
    )
    torch.testing.assert_close(twice, expected(query, key, value, 0.125).expand(2, -1, -1, -1), atol=2e-5, rtol=2e-5)
    halves = [tensor.bfloat16() for tensor in (query, key, value)]
    assert tower.tower_attention(nn.Module(), *halves, None, **settings)[0].dtype == torch.bfloat16
    monkeypatch.setattr(tower, "paged_attention", lambda: None)
    without, _ = tower.tower_attention(nn.Module(), query, key, value, None, **settings)
    torch.testing.assert_close(without, expected(query, key, value, 0.125), atol=2e-5, rtol=2e-5)


def test_the_kernel_is_not_asked_for_what_it_has_no_operands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of another size than keys, no keys at all, settings beyond those it knows."""
    monkeypatch.setattr(tower, "paged_attention", lambda: pytest.fail("the kernel was asked for"))
    query, key, value = operands(20, 4, 64)
    settings = {"scaling": None, "is_causal": False}
    found, _ = tower.tower_attention(nn.Module(), query, key, value[..., :16], None, **settings)
    torch.testing.assert_close(found, expected(query, key, value[..., :16], 0.125))
    nothing, _ = tower.tower_attention(nn.Module(), query, key[:, :, :0], value[:, :, :0], None, **settings)
    assert nothing.shape == (1, 20, 4, 64)
    bias = torch.randn(1, 4, 20, 20)
    biased, _ = tower.tower_attention(nn.Module(), query, key, value, None, position_bias=bias, **settings)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2)
    torch.testing.assert_close(biased, wanted)


def test_the_kernel_refuses_what_it_has_no_answer_to(kernels: ctypes.CDLL) -> None:
    kernel = PagedAttention(kernels)
    assert not kernel.suits(torch.zeros(5, 3, 8), torch.zeros(1, 5, 2, 8))
    with pytest.raises(IndexError):
        kernel.over_all(torch.zeros(3, 2, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8))
