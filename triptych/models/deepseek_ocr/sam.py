"""SAM's vision transformer (arXiv:2304.02643), and the convolutions that leave a 16th of its features.

The reference is ``DeepseekOcr2SamVisionEncoder`` in transformers. Most layers attend within windows. Attention has
relative positions: each query's products with one vector per difference of rows, and per difference of columns.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.layers.attention.tower import TowerAttention, attend
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.deepseek_ocr.config import SamConfig
from triptych.models.shared.tower_weights import TowerWeights

MAX_SCORES = 2**24
"""Scores of a part of the queries, computed together. Bounds the memory for biases, of which an image of 1024 by
1024 pixels has 200 million."""
MAX_SIDES = 4
"""Sides of images whose interpolated positions are kept."""
PADDED = 32
"""Values of a query or a key are padded to a multiple of as many."""


def resized_table(table: Tensor, side: int) -> Tensor:
    """Interpolate absolute positions [side, side, hidden] to another side."""
    if table.shape[:2] == (side, side):
        return table
    image = table.float().permute(2, 0, 1)[None]
    made = F.interpolate(image, (side, side), mode="bicubic", align_corners=False, antialias=True)
    return made[0].permute(1, 2, 0).to(table.dtype)


def relative_vectors(table: Tensor, side: int) -> Tensor:
    """Return the vectors [side, side, head_dim] of each query's and key's place, of a table [differences, head_dim]
    that may be made for another side."""
    wanted = 2 * side - 1
    if len(table) != wanted:
        made = F.interpolate(table.float().T[None], wanted, mode="linear", align_corners=False)
        table = made[0].T.to(table.dtype)
    places = torch.arange(side, device=table.device)
    return table[places[:, None] - places + side - 1]


class RelativeAttention(nn.Module):
    """Attention within square images or windows, with relative positions."""

    def __init__(self, num_heads: int, tables: tuple[Tensor, Tensor], in_bf16: bool) -> None:
        """``tables`` [differences, head_dim] are those of rows and of columns; ``in_bf16`` is as in
        ``TowerAttention``."""
        super().__init__()
        self.num_heads = num_heads
        self.tables = nn.ParameterList(frozen(table) for table in tables)
        self.in_bf16 = in_bf16

    def forward(self, projected: Tensor) -> Tensor:
        """Queries, keys and values [squares, side, side, 3 * width] → [squares, side, side, width]."""
        count, side = projected.shape[:2]
        query, key, value = projected.view(count * side**2, 3, self.num_heads, -1).unbind(1)
        rows, columns = (relative_vectors(table, side) for table in self.tables)
        attend_to = self._by_longer_keys if self.in_bf16 and query.device.type == "cpu" else self._by_biases
        return attend_to(query, key, value, rows, columns).reshape(count, side, side, -1)

    def _by_longer_keys(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return [tokens, heads, head_dim]. Positions are values of queries and keys: a query has its products with all
        rows' and all columns' vectors, and a key has ones at its row and at its column. Biases would be one for each
        score."""
        side, dim = len(rows), query.shape[2]
        squares = query.view(-1, side, side, *query.shape[1:])
        of_rows = torch.einsum("bhwnc,hkc->bhwnk", squares, rows).flatten(0, 2)
        of_columns = torch.einsum("bhwnc,wkc->bhwnk", squares, columns).flatten(0, 2)
        places = torch.eye(side)
        places = torch.cat((places.repeat_interleave(side, dim=0), places.repeat(side, 1)), dim=1)
        places = places.repeat(len(squares), 1)[:, None].expand(-1, self.num_heads, -1)
        parts = (query * dim**-0.5, of_rows, of_columns), (key, places)
        length = -(-(dim + 2 * side) // PADDED) * PADDED
        query, key = (_padded(torch.cat(some, dim=2), length) for some in parts)
        values = torch.empty_like(key)  # the kernel takes both in one shape
        values[..., :dim] = value
        return attend(query, key, values, [side**2] * len(squares), 1.0, self.in_bf16, dim)

    def _by_biases(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Attend like ``_by_longer_keys``, for products in float32, of which there would be three times as many."""
        side = len(rows)
        shape = -1, side**2, *query.shape[1:]
        query, key, value = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        lines = max(MAX_SCORES // (len(query) * self.num_heads * side**3), 1)
        parts = [
            F.scaled_dot_product_attention(part, key, value, attn_mask=self._bias(part, of_rows, columns))
            for part, of_rows in zip(torch.split(query, lines * side, 2), torch.split(rows, lines), strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _bias(query: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return what is added to the scores of whole lines of queries: [squares, heads, queries, keys]. The vectors
        are ``rows`` [lines, side, head_dim] and ``columns`` [side, side, head_dim]."""
        lines = query.reshape(*query.shape[:2], len(rows), len(columns), -1)
        of_rows = torch.einsum("bnhwc,hkc->bnhwk", lines, rows)
        of_columns = torch.einsum("bnhwc,wkc->bnhwk", lines, columns)
        return (of_rows[..., :, None] + of_columns[..., None, :]).flatten(4).flatten(2, 3)


def _padded(heads: Tensor, length: int) -> Tensor:
    """Pad the values of heads with zeros."""
    return F.pad(heads, (0, length - heads.shape[2]))


class SamLayer(nn.Module):
    """One layer; ``window`` is the side of the windows that it attends within, None for the whole image."""

    def __init__(self, layer: TowerLayer, bias: Tensor, attention: RelativeAttention, window: int | None) -> None:
        """``layer`` has everything but ``attention``; ``bias`` is that of queries, keys and values."""
        super().__init__()
        self.layer = layer
        self.bias = frozen(bias)
        self.attention = attention
        self.window = window

    def forward(self, hidden: Tensor) -> Tensor:
        """[images, side, side, hidden] → the same shape."""
        [qkv] = self.layer.attention.inputs
        projected = qkv(self.layer.attention_norm(hidden))
        attended = self.attention(projected) if self.window is None else self._in_windows(projected, self.window)
        return self.layer.finish(hidden.flatten(0, 2), attended.flatten(0, 2)).view_as(hidden)

    def _in_windows(self, projected: Tensor, window: int) -> Tensor:
        """Zeros fill the last windows before they are projected, and are attended to, as in the reference."""
        count, side, _, width = projected.shape
        across = -(-side // window)
        padded = self.bias.repeat(count, across * window, across * window, 1)
        padded[:, :side, :side] = projected
        windows = padded.view(count, across, window, across, window, width).transpose(2, 3)
        attended: Tensor = self.attention(windows.reshape(-1, window, window, width))
        whole = attended.view(count, across, across, window, window, -1).transpose(2, 3)
        return whole.reshape(count, across * window, across * window, -1)[:, :side, :side]


class Convolution(nn.Module):
    """A convolution of square kernels without a bias, as a product."""

    def __init__(self, linear: Linear, size: int, stride: int = 1) -> None:
        """``linear`` takes a place's ``size`` rows of ``size`` places with all their channels. Zeros surround an
        image."""
        super().__init__()
        self.linear = linear
        self.size = size
        self.stride = stride

    def forward(self, image: Tensor) -> Tensor:
        """[images, side, side, channels] → [images, side / stride, side / stride, outputs]."""
        if self.size > 1:
            margin = self.size // 2
            padded = F.pad(image, (0, 0, margin, margin, margin, margin))
            squares = padded.unfold(1, self.size, self.stride).unfold(2, self.size, self.stride)
            image = squares.permute(0, 1, 2, 4, 5, 3).flatten(3)
        made: Tensor = self.linear(image)
        return made


class Sam(nn.Module):
    """Features of images of several sizes."""

    def __init__(
        self,
        projection: Linear,
        positions: Tensor,
        layers: Sequence[SamLayer],
        norms: tuple[LayerNorm, LayerNorm],
        convolutions: Sequence[Convolution],
    ) -> None:
        """``positions`` [side, side, hidden] are interpolated for images of another side."""
        super().__init__()
        self.projection = projection
        self.positions = frozen(positions)
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(norms)
        self.convolutions = nn.ModuleList(convolutions)
        self._resized: dict[int, Tensor] = {}
        """Positions of the latest sides."""

    def forward(self, patches: Tensor, side: int) -> Tensor:
        """Return the features [images, side / 4 * side / 4, channels] of ``patches`` [images * side², values]."""
        hidden: Tensor = self.projection(patches).unflatten(0, (-1, side, side)) + self._positions(side)
        for layer in self.layers:
            hidden = layer(hidden)
        for norm, convolution in zip_longest(self.norms, self.convolutions):
            hidden = convolution(hidden)
            hidden = hidden if norm is None else norm(hidden)
        return hidden.flatten(1, 2)

    def _positions(self, side: int) -> Tensor:
        """Return the positions [side, side, hidden] of an image."""
        if side not in self._resized:
            if len(self._resized) == MAX_SIDES:
                del self._resized[next(iter(self._resized))]
            self._resized[side] = resized_table(self.positions, side)
        return self._resized[side]


NECK_EPS = 1e-6
"""Not in the config: as in the reference."""


def load_sam(reader: TowerWeights, sam: SamConfig, tower: str) -> Sam:
    """Load the tower of this name. Raises CheckpointError as ``TowerWeights`` does."""
    hidden, neck = sam.hidden_size, sam.neck_channels
    first, second = sam.channels
    return Sam(
        reader.patch_projection(f"{tower}.patch_embed.proj", hidden, sam.patch_size, bias=True),
        reader.parameter(f"{tower}.pos_embed", 1, sam.side, sam.side, hidden)[0],
        [_layer(reader, sam, f"{tower}.blocks.{number}", number) for number in range(sam.num_layers)],
        (
            reader.layer_norm(f"{tower}.neck.1", neck, NECK_EPS),
            reader.layer_norm(f"{tower}.neck.3", neck, NECK_EPS),
        ),
        (
            Convolution(reader.convolution(f"{tower}.neck.0", neck, hidden, 1), 1),
            Convolution(reader.convolution(f"{tower}.neck.2", neck, neck, 3), 3),
            Convolution(reader.convolution(f"{tower}.net_2", first, neck, 3), 3, 2),
            Convolution(reader.convolution(f"{tower}.net_3", second, first, 3), 3, 2),
        ),
    )


def _layer(reader: TowerWeights, sam: SamConfig, name: str, number: int) -> SamLayer:
    hidden, inner, is_global = sam.hidden_size, sam.intermediate_size, number in sam.global_layers
    made_for = sam.side if is_global else sam.window_size
    rows, columns = (
        reader.parameter(f"{name}.attn.rel_pos_{axis}", 2 * made_for - 1, hidden // sam.num_heads) for axis in "hw"
    )
    in_bf16 = reader.weights.bf16_attention
    attention = TowerAttention(
        [reader.linear([f"{name}.attn.qkv"], 3 * hidden, hidden)],
        reader.linear([f"{name}.attn.proj"], hidden, hidden),
        sam.num_heads,
        (hidden // sam.num_heads) ** -0.5,
        in_bf16,
    )
    mlp = MLP(
        reader.linear([f"{name}.mlp.lin1"], inner, hidden),
        Activation.GELU,
        reader.linear([f"{name}.mlp.lin2"], hidden, inner),
    )
    before, after = (reader.layer_norm(f"{name}.norm{place}", hidden, sam.eps) for place in (1, 2))
    return SamLayer(
        TowerLayer(before, attention, after, mlp),
        reader.parameter(f"{name}.attn.qkv.bias", 3 * hidden),
        RelativeAttention(sam.num_heads, (rows, columns), in_bf16),
        None if is_global else sam.window_size,
    )
