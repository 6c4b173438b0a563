"""SAM's vision transformer (arXiv:2304.02643), and the convolutions that leave a 16th of its features.

The reference is ``DeepseekOcr2SamVisionEncoder`` in transformers. Most layers attend within windows. Attention has
relative positions: each query's products with one vector per difference of rows, and per difference of columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP
from triptych.models.deepseek_ocr.config import SamConfig
from triptych.models.shared.tower_weights import TowerWeights

MAX_SCORES = 2**24
"""Of a part of the queries, computed together. Bounds the memory for biases, of which an image of 1024 by 1024 pixels
has 200 million."""


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

    def __init__(self, qkv: Linear, output: Linear, num_heads: int, tables: tuple[Tensor, Tensor]) -> None:
        """``tables`` [differences, head_dim] are those of rows and of columns."""
        super().__init__()
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads
        self.tables = nn.ParameterList(frozen(table) for table in tables)

    def forward(self, hidden: Tensor) -> Tensor:
        """[squares, side, side, hidden] → the same shape."""
        count, side, _, width = hidden.shape
        projected = self.qkv(hidden.reshape(-1, width)).view(count, side**2, 3, self.num_heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        lines = max(MAX_SCORES // (count * self.num_heads * side**3), 1)
        rows, columns = (relative_vectors(table, side) for table in self.tables)
        parts = [
            F.scaled_dot_product_attention(part, key, value, attn_mask=self._bias(part, of_rows, columns))
            for part, of_rows in zip(torch.split(query, lines * side, 2), torch.split(rows, lines), strict=True)
        ]
        attended = torch.cat(parts, dim=2).transpose(1, 2).reshape(-1, width)
        output: Tensor = self.output(attended)
        return output.view_as(hidden)

    @staticmethod
    def _bias(query: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return what is added to the scores of whole lines of queries: [squares, heads, queries, keys]. The vectors
        are ``rows`` [lines, side, head_dim] and ``columns`` [side, side, head_dim]."""
        lines = query.view(*query.shape[:2], len(rows), len(columns), -1)
        of_rows = torch.einsum("bnhwc,hkc->bnhwk", lines, rows)
        of_columns = torch.einsum("bnhwc,wkc->bnhwk", lines, columns)
        return (of_rows[..., :, None] + of_columns[..., None, :]).flatten(4).flatten(2, 3)


class SamLayer(nn.Module):
    """One layer; ``window`` is the side of the windows that it attends within, None for the whole image."""

    def __init__(
        self, norms: tuple[LayerNorm, LayerNorm], attention: RelativeAttention, mlp: MLP, window: int | None
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp
        self.window = window

    def forward(self, hidden: Tensor) -> Tensor:
        """[images, side, side, hidden] → the same shape."""
        normed = self.attention_norm(hidden)
        attended = self.attention(normed) if self.window is None else self._in_windows(normed, self.window)
        hidden = hidden + attended
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden).flatten(0, 2)).view_as(hidden)
        return output

    def _in_windows(self, normed: Tensor, window: int) -> Tensor:
        """Zeros fill the last windows, and are attended to, as in the reference."""
        count, side, _, width = normed.shape
        across = -(-side // window)
        missing = across * window - side
        padded = F.pad(normed, (0, 0, 0, missing, 0, missing))
        windows = padded.view(count, across, window, across, window, width).transpose(2, 3)
        attended: Tensor = self.attention(windows.reshape(-1, window, window, width))
        whole = attended.view(count, across, across, window, window, width).transpose(2, 3)
        return whole.reshape(count, across * window, across * window, width)[:, :side, :side]


class Sam(nn.Module):
    """Features of images of several sizes."""

    def __init__(
        self,
        projection: Linear,
        positions: Tensor,
        layers: Sequence[SamLayer],
        norms: tuple[LayerNorm, LayerNorm],
        convolutions: Sequence[Tensor],
    ) -> None:
        """``positions`` [side, side, hidden] are interpolated for images of another side. ``convolutions`` are the
        weights of the four."""
        super().__init__()
        self.projection = projection
        self.positions = frozen(positions)
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(norms)
        self.convolutions = nn.ParameterList(frozen(weight) for weight in convolutions)

    def forward(self, patches: Tensor, side: int) -> Tensor:
        """Return the features [images, side / 4 * side / 4, channels] of ``patches`` [images * side², values]."""
        hidden: Tensor = self.projection(patches).unflatten(0, (-1, side, side)) + resized_table(self.positions, side)
        for layer in self.layers:
            hidden = layer(hidden)
        first, second, third, fourth = self.convolutions
        hidden = self._normed(F.conv2d(hidden.permute(0, 3, 1, 2), first), 0)
        hidden = self._normed(F.conv2d(hidden, second, padding=1), 1)
        hidden = F.conv2d(hidden, third, stride=2, padding=1)
        features: Tensor = F.conv2d(hidden, fourth, stride=2, padding=1)
        return features.flatten(2).transpose(1, 2)

    def _normed(self, image: Tensor, number: int) -> Tensor:
        """Normalise the channels of each place."""
        normed: Tensor = self.norms[number](image.permute(0, 2, 3, 1).contiguous())
        return normed.permute(0, 3, 1, 2)


NECK_EPS = 1e-6
"""Not in the config: as in the reference."""


def load_sam(reader: TowerWeights, sam: SamConfig, tower: str) -> Sam:
    """Load the tower of this name. Raises CheckpointError as ``TowerWeights`` does."""
    hidden, neck = sam.hidden_size, sam.neck_channels
    shapes = ((neck, hidden, 1), (neck, neck, 3), (sam.channels[0], neck, 3), (sam.channels[1], sam.channels[0], 3))
    names = ("neck.0", "neck.2", "net_2", "net_3")
    return Sam(
        reader.patch_projection(f"{tower}.patch_embed.proj", hidden, sam.patch_size, bias=True),
        reader.parameter(f"{tower}.pos_embed", 1, sam.side, sam.side, hidden)[0],
        [_layer(reader, sam, f"{tower}.blocks.{number}", number) for number in range(sam.num_layers)],
        (
            reader.layer_norm(f"{tower}.neck.1", neck, NECK_EPS),
            reader.layer_norm(f"{tower}.neck.3", neck, NECK_EPS),
        ),
        [
            reader.parameter(f"{tower}.{name}.weight", outputs, inputs, size, size)
            for name, (outputs, inputs, size) in zip(names, shapes, strict=True)
        ],
    )


def _layer(reader: TowerWeights, sam: SamConfig, name: str, number: int) -> SamLayer:
    hidden, inner, is_global = sam.hidden_size, sam.intermediate_size, number in sam.global_layers
    made_for = sam.side if is_global else sam.window_size
    rows, columns = (
        reader.parameter(f"{name}.attn.rel_pos_{axis}", 2 * made_for - 1, hidden // sam.num_heads) for axis in "hw"
    )
    attention = RelativeAttention(
        reader.linear([f"{name}.attn.qkv"], 3 * hidden, hidden),
        reader.linear([f"{name}.attn.proj"], hidden, hidden),
        sam.num_heads,
        (rows, columns),
    )
    mlp = MLP(
        reader.linear([f"{name}.mlp.lin1"], inner, hidden),
        Activation.GELU,
        reader.linear([f"{name}.mlp.lin2"], hidden, inner),
    )
    first, second = (reader.layer_norm(f"{name}.norm{place}", hidden, sam.eps) for place in (1, 2))
    return SamLayer((first, second), attention, mlp, None if is_global else sam.window_size)
