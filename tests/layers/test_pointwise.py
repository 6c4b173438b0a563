"""The compiled kernels between products against PyTorch's operations."""

import ctypes

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from triptych.layers import pointwise
from triptych.layers.pointwise import Activation, argmax_rows, gate_and_mul, layer_norm, rms_norm, rotate

TOKENS = (1, 3, 700)
"""Numbers of tokens for a single thread and for several."""


@pytest.fixture(autouse=True)
def _by_these_kernels(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pointwise.declared(kernels)
    monkeypatch.setattr(pointwise, "compiled_kernels", lambda: library)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("shape", [(64,), (37,), (4, 128), (3, 20)])
def test_rms_norm(num_tokens: int, shape: tuple[int, ...]) -> None:
    """Norms of whole tokens, and of heads that are part of a wider tensor."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    wider = 5 * torch.randn(num_tokens, 2 * shape[0], *shape[1:])
    activations = wider[:, : shape[0]]
    expected = weight * (activations * torch.rsqrt(activations.pow(2).mean(-1, keepdim=True) + 1e-6))
    torch.testing.assert_close(rms_norm(activations, weight, 1e-6), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rms_norm(torch.zeros(1, *shape), weight, 1e-6), torch.zeros(1, *shape))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("heads", "dim"), [(4, 128), (3, 20)])
def test_gated_norm(num_tokens: int, heads: int, dim: int) -> None:
    """Gates are part of a wider tensor; some are so negative that their exponentials overflow."""
    torch.manual_seed(0)
    theirs = Qwen3_5RMSNormGated(dim, eps=1e-6)
    weight, values = theirs.weight.data.normal_(), 5 * torch.randn(num_tokens, heads, dim)
    gates = 50 * torch.randn(num_tokens, heads * dim + 7)[:, :-7]
    expected = theirs(values.view(-1, dim), gates.reshape(-1, dim)).view(num_tokens, -1)
    found = pointwise.gated_norm(values, gates, weight, 1e-6)
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-5)
    by_pytorch = pointwise.gated_norm(values.bfloat16(), gates.bfloat16(), weight.bfloat16(), 1e-6)
    assert (by_pytorch - expected).norm() < 2e-2 * expected.norm()


def test_rotate_by_strided_tables() -> None:
    torch.manual_seed(0)
    cos, sin, heads = torch.randn(4000, 1, 64), torch.randn(4000, 1, 64), torch.randn(4000, 2, 64)
    expected = rotate(heads.clone(), cos, sin)
    found = rotate(heads, *(table.permute(2, 1, 0).contiguous().permute(2, 1, 0) for table in (cos, sin)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("heads", "dim"), [(3, 128), (1, 80), (5, 6)])
def test_rotate(num_tokens: int, heads: int, dim: int) -> None:
    torch.manual_seed(0)
    wider = torch.randn(num_tokens, heads + 2, dim)
    tokens, others = wider[:, 1 : heads + 1], wider[:, :: heads + 1].clone()
    angles = torch.rand(num_tokens, 1, dim) * 6
    first, second = tokens.chunk(2, dim=-1)
    expected = tokens * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    torch.testing.assert_close(rotate(tokens, angles.cos(), angles.sin()), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(wider[:, :: heads + 1], others)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", [96, 41])
@pytest.mark.parametrize("activation", Activation)
def test_gate_and_mul(num_tokens: int, width: int, activation: Activation) -> None:
    """Also for large values, whose exponentials overflow."""
    torch.manual_seed(0)
    gate_up = 40 * torch.randn(num_tokens, 2 * width)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = activation(gate.clone()) * up
    torch.testing.assert_close(gate_and_mul(gate_up, activation), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (1, 700, 33)])
@pytest.mark.parametrize("scale", [0.01, 3, 1000])
@pytest.mark.parametrize("activation", Activation)
def test_activations(shape: tuple[int, ...], scale: float, activation: Activation) -> None:
    torch.manual_seed(0)
    values = scale * torch.randn(shape)
    wide = values.double()
    expected = {
        Activation.SILU: F.silu(wide),
        Activation.GELU_TANH: F.gelu(wide, approximate="tanh"),
        Activation.QUICK_GELU: wide * torch.sigmoid(1.702 * wide),
        Activation.GELU: F.gelu(wide),
    }[activation].float()
    found = activation(values)
    assert found is values
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 64), (3, 37), (700, 5), (2, 300, 20)])
def test_layer_norm(shape: tuple[int, ...]) -> None:
    """Also of values whose mean is far from zero, and of equal ones."""
    torch.manual_seed(0)
    weight, bias = torch.randn(2, shape[-1])
    for activations in (5 * torch.randn(shape), 20 + torch.randn(shape), torch.full(shape, 7.0)):
        expected = F.layer_norm(activations.double(), weight.shape, weight.double(), bias.double(), 1e-6).float()
        found = layer_norm(activations, weight, bias, 1e-6)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        strided = layer_norm(activations.repeat_interleave(2, dim=-1)[..., ::2], weight, bias, 1e-6)
        torch.testing.assert_close(strided, expected, atol=1e-4, rtol=1e-4)


def test_other_dtypes_and_layouts_go_through_pytorch() -> None:
    activations, weight = torch.randn(3, 8).bfloat16(), torch.ones(8).bfloat16()
    assert rms_norm(activations, weight, 1e-6).dtype == torch.bfloat16
    assert gate_and_mul(activations, Activation.SILU).dtype == torch.bfloat16
    columns = torch.randn(8, 3).T
    for activation in Activation:
        gated = (gate_and_mul(one, activation) for one in (columns, columns.contiguous()))
        torch.testing.assert_close(*gated)
        torch.testing.assert_close(activation(columns), activation(columns.contiguous()))


@pytest.mark.parametrize(("rows", "width"), [(1, 151_936), (8, 1_003), (3, 5)])
def test_argmax_rows(rows: int, width: int) -> None:
    """The first of equal maxima; rows with a single token allowed, and strided rows."""
    torch.manual_seed(0)
    logits = torch.randint(-3, 4, (rows, width + 7)).float()[:, 3 : width + 3]
    assert argmax_rows(logits).tolist() == [row.tolist().index(max(row.tolist())) for row in logits]
    banned = torch.full((2, width), -torch.inf)
    banned[0, width - 1] = -1000.0
    assert argmax_rows(banned).tolist() == [width - 1, 0]


@pytest.mark.parametrize("width", [5, 1_003, 4_100])
def test_nan_is_the_maximum(width: int) -> None:
    for place in (0, width // 2, width - 1):
        logits = torch.randn(2, width)
        logits[1, place] = torch.nan
        logits[1, width - 1] = torch.nan
        logits[0, 1] = torch.inf
        assert argmax_rows(logits).tolist() == [1, place]
        assert argmax_rows(logits.T.contiguous().T).tolist() == [1, place]
