"""A tower's attention: the compiled kernel where there is one and it is made for what is asked, else PyTorch's."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from triptych.models.attention.compiled import paged_attention

NAME = "triptych"
"""By which transformers' modules ask for it, as their ``attn_implementation``."""
KNOWN = ("scaling", "is_causal", "dropout")
"""The settings that the kernel can follow."""


def tower_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """As transformers' ``AttentionInterface`` has it: ``query`` [batch, heads, tokens, head_dim], ``key`` and ``value``
    [batch, kv heads, tokens, head_dim] → [batch, tokens, heads, head_dim], and no weights."""
    scale, is_causal, dropout, *others = (settings.get(name) for name in (*KNOWN, *(settings.keys() - KNOWN)))
    plain = attention_mask is None and is_causal is False and not dropout and all(other is None for other in others)
    if plain and len(query) == 1 and key.shape == value.shape and key.numel() and query.device.type == "cpu":
        tokens, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        kernel = paged_attention()
        if kernel is not None and kernel.suits(tokens, keys[None]):
            return kernel.over_all(tokens, keys, values, scale)[None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


AttentionInterface.register(NAME, tower_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
