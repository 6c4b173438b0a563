"""A tower's attention: by the compiled kernel if it exists and supports the shapes, else by PyTorch."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.layers.attention.compiled import paged_attention
from triptych.layers.linear import RMSNorm
from triptych.layers.pointwise import rotate


class TowerAttention(nn.Module):
    """The attention of a tower's layer: its products, norms and rotation."""

    def __init__(
        self,
        inputs: Sequence[nn.Module],
        output: nn.Module,
        num_heads: int,
        scale: float,
        in_bf16: bool,
        *,
        norms: Sequence[nn.Module] = (),
        heads_norm: RMSNorm | None = None,
    ) -> None:
        """``in_bf16`` lets the compiled kernel multiply in bfloat16; ``norms``, if any, are those of queries and
        of keys, over all heads together. ``heads_norm``, if any, normalises each head of queries, keys and values: its
        weight is [3 * heads, head_dim]."""
        super().__init__()
        self.inputs = nn.ModuleList(inputs)
        self.output = output
        self.num_heads = num_heads
        self.scale = scale
        self.in_bf16 = in_bf16
        self.norms = nn.ModuleList(norms)
        self.heads_norm = heads_norm

    def attended(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the input of ``output``, [T, hidden], for ``hidden_states`` [T, hidden].

        ``cu_seqlens`` [segments + 1] are the segments' boundaries; ``position_embeddings`` are cos and sin, float32
        [T, head_dim], by which queries and keys are rotated.
        """
        count = 3 // len(self.inputs)
        projected = [part for linear in self.inputs for part in linear(hidden_states).chunk(count, dim=1)]
        for number, norm in enumerate(self.norms):
            projected[number] = norm(projected[number])
        if self.heads_norm is None:
            query, key, value = (part.unflatten(1, (self.num_heads, -1)) for part in projected)
        else:
            heads = torch.cat(projected, dim=1).unflatten(1, (3 * self.num_heads, -1))
            query, key, value = self.heads_norm(heads).chunk(3, dim=1)
        if position_embeddings is not None:
            cos, sin = (table.unsqueeze(1) for table in position_embeddings)
            query, key = (rotate(part, cos, sin).to(part.dtype) for part in (query, key))
        return attend(query, key, value, cu_seqlens.diff().tolist(), self.scale, self.in_bf16).flatten(1)


def attend(  # noqa: PLR0917 (a kernel's operands)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float,
    in_bf16: bool = False,
    value_dim: int | None = None,
) -> Tensor:
    """Attend from each token to all tokens of its segment; operands are [T, heads, head_dim], and the result is
    [T, heads, value_dim]: of values only the first ``value_dim`` are read, by default all.

    ``lengths`` are those of the consecutive segments; ``in_bf16`` lets the compiled kernel multiply float32 operands in
    bfloat16. Raises an error if the segments don't add up to T tokens.
    """
    kernel = paged_attention(in_bf16) if query.device.type == "cpu" else None
    if kernel is not None and kernel.suits(query, key[None]):
        return kernel.over_segments(query, key, value, lengths, scale, value_dim)
    operands = query, key, value[..., :value_dim]
    runs = [(length, len(list(equal))) for length, equal in itertools.groupby(lengths)]
    of_runs = (one.split([length * count for length, count in runs]) for one in operands)
    parts = []
    for (length, count), *run in zip(runs, *of_runs, strict=True):  # consecutive segments of one length are a batch
        q, k, v = (one.unflatten(0, (count, length)).transpose(1, 2) for one in run)  # [segments, heads, length, dim]
        parts.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
