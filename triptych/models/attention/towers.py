"""Attention of transformers' towers by the compiled kernel, where it suits; by PyTorch's elsewhere."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from triptych.models.attention.compiled import paged_attention

NAME = "triptych"
"""An ``attn_implementation`` of transformers'."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """``query``, ``key``, ``value`` [B, heads, T, d]; the options are those of transformers'. Returns
    [B, T, heads, d]."""
    kernel = paged_attention()
    swapped = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    plain = attention_mask is None and options.get("is_causal") is False and query.shape[2] == key.shape[2]
    if kernel is None or not plain or not kernel.suits(swapped[0][0], swapped[1]):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return kernel.unmasked(*swapped, options.get("scaling") or query.shape[3] ** -0.5), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
