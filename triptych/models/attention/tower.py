"""A tower's attention: the compiled kernel where there is one and it is made for what is asked, else PyTorch's."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from triptych.models.attention.compiled import paged_attention

NAME = "triptych"
"""By which transformers' modules ask for it, as their ``attn_implementation``."""


def tower_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """As transformers' ``AttentionInterface`` has it: ``query`` [batch, heads, tokens, head_dim], ``key`` and ``value``
    [batch, kv heads, tokens, head_dim] → [batch, tokens, heads, head_dim], and no weights."""
    kernel = paged_attention()
    sees_all = attention_mask is None and settings.get("is_causal") is False and not settings.get("dropout")
    if kernel is not None and sees_all and len(query) == 1:
        tokens, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if kernel.suits(tokens, keys[None]):
            return kernel.over_all(tokens, keys, values, settings["scaling"])[None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


AttentionInterface.register(NAME, tower_attention)
