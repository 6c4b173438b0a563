"""DeepSeek-OCR-2's second tower: Qwen2's layers over an image's features and as many queries.

The reference is ``DeepseekOcr2VisionEncoder`` in transformers. Features attend to all features; a query to these, to
itself and to the queries before it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.layers.linear import Linear, RMSNorm
from triptych.layers.mlp import GatedMLP
from triptych.layers.pointwise import rotate
from triptych.models.deepseek_ocr.config import QueryConfig
from triptych.models.shared.tower_weights import TowerWeights


class QueryAttention(nn.Module):
    """Attention of a layer."""

    def __init__(self, query: Linear, key_value: Linear, output: Linear, config: QueryConfig) -> None:
        super().__init__()
        self.query = query
        self.key_value = key_value
        self.output = output
        self.config = config

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """[images * states, hidden] → the same shape; ``mask`` [states, states] says which keys a query sees."""
        config, states = self.config, len(mask)
        key, value = self.key_value(hidden).unflatten(1, (2, config.num_kv_heads, -1)).unbind(1)
        query = rotate(self.query(hidden).unflatten(1, (config.num_heads, -1)), *rotation)
        key = rotate(key.contiguous(), *rotation)
        query, key, value = (part.unflatten(0, (-1, states)).transpose(1, 2) for part in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        output: Tensor = self.output(attended.transpose(1, 2).reshape(len(hidden), -1))
        return output


class QueryLayer(nn.Module):
    """One layer."""

    def __init__(self, attention_norm: RMSNorm, attention: QueryAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """See ``QueryAttention``."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation, mask)
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class QueryEncoder(nn.Module):
    """Features of images of several sizes."""

    def __init__(
        self, config: QueryConfig, queries: Mapping[int, Tensor], layers: Sequence[QueryLayer], norm: RMSNorm
    ) -> None:
        """``queries`` [features, hidden] are by the number of an image's features."""
        super().__init__()
        self.config = config
        self.queries = queries
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, features: Tensor) -> Tensor:
        """[images, features, hidden] → the same shape."""
        images, count, width = features.shape
        queries = self.queries[count].expand(images, -1, -1)
        hidden = torch.cat((features, queries), dim=1).flatten(0, 1)
        mask = torch.ones(2 * count, 2 * count, dtype=torch.bool, device=hidden.device).tril()
        mask[:count, :count] = True
        rotation = self._rotation(2 * count, images, hidden)
        for layer in self.layers:
            hidden = layer(hidden, rotation, mask)
        normed: Tensor = self.norm(hidden)
        return normed.view(images, 2 * count, width)[:, count:]

    def _rotation(self, states: int, images: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [images * states, 1, head_dim] of places from 0 in each image."""
        dim = self.config.head_dim
        halves = torch.arange(0, dim, 2, device=hidden.device, dtype=torch.float32) / dim
        angles = torch.arange(states, device=hidden.device)[:, None] / self.config.rope_theta**halves
        angles = torch.cat((angles, angles), dim=-1).repeat(images, 1)[:, None]
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def load_queries(reader: TowerWeights, config: QueryConfig, tower: str, tables: Mapping[str, int]) -> QueryEncoder:
    """Load the tower of this name; ``tables`` are the numbers of queries by their tensors' names. Raises
    CheckpointError as ``TowerWeights`` does."""
    hidden = config.hidden_size
    return QueryEncoder(
        config,
        {count: reader.parameter(f"{tower}.{name}.weight", count, hidden) for name, count in tables.items()},
        [_layer(reader, config, f"{tower}.model.model.layers.{number}") for number in range(config.num_layers)],
        reader.rms_norm(f"{tower}.model.model.norm", hidden, config.eps),
    )


def _layer(reader: TowerWeights, config: QueryConfig, name: str) -> QueryLayer:
    hidden, inner, narrow = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    attention = QueryAttention(
        reader.linear([f"{name}.self_attn.q_proj"], hidden, hidden),
        reader.linear([f"{name}.self_attn.{kind}_proj" for kind in "kv"], narrow, hidden),
        reader.linear([f"{name}.self_attn.o_proj"], hidden, hidden, bias=False),
        config,
    )
    mlp = GatedMLP(
        reader.linear([f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], inner, hidden, bias=False),
        reader.linear([f"{name}.mlp.down_proj"], hidden, inner, bias=False),
    )
    before, after = (
        reader.rms_norm(f"{name}.{norm}", hidden, config.eps)
        for norm in ("input_layernorm", "post_attention_layernorm")
    )
    return QueryLayer(before, attention, after, mlp)
