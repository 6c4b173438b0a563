"""A vision transformer of our own layers for images of any grid of patches, which merges each square of patches into an
embedding. Attention may be within windows, and features may be taken after several layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, RMSNorm, frozen
from triptych.layers.mlp import GatedMLP
from triptych.layers.pinned import concatenated, to_device
from triptych.layers.pointwise import Activation
from triptych.layers.shaped_calls import Call, ShapedCalls
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.shared.places import patch_places

Grid = tuple[int, int, int]
Rotate = Callable[[Tensor], Tensor]
"""Takes places of patches, int64 [patches, 2]. Returns the angles of a head's values, float32 [patches, head_dim]."""


@dataclass(frozen=True)
class Windows:
    """Which patches attend to each other."""

    side: int
    """Embeddings per side of a window."""
    whole: frozenset[int]
    """Numbers of the layers that attend to whole frames, from 0."""


class PositionTable(nn.Module):
    """Learned positions of a square of patches, resampled to an image's."""

    def __init__(self, table: Tensor, *, bicubic: bool) -> None:
        """``table`` is [side, side, hidden]. It is resampled bilinearly between its corners, or bicubically between its
        edges."""
        super().__init__()
        self.table = frozen(table)
        self.mode, self.align_corners = ("bicubic", False) if bicubic else ("bilinear", True)

    def shares(self, size: int) -> Tensor:
        """Return the share of each place of the table's side in each of ``size`` places: float32 [size, side]."""
        side = len(self.table)
        each = torch.eye(side).view(1, side, side, 1)
        return interpolate(each, (size, 1), mode=self.mode, align_corners=self.align_corners)[0, :, :, 0].T.contiguous()

    def forward(self, down: Tensor, across: Tensor) -> Tensor:
        """Return float32 [rows, columns, hidden] for the ``shares`` of an image's rows and columns."""
        table = self.table.float()
        return across @ (down @ table.flatten(1)).view(len(down), *table.shape[1:])


class Merger(nn.Module):
    """Makes embeddings of squares of patches by a norm and an MLP."""

    def __init__(self, norm: LayerNorm | RMSNorm, mlp: MLP, *, of_squares: bool) -> None:
        """The norm is that of a patch or, ``of_squares``, of a square's concatenated patches."""
        super().__init__()
        self.norm = norm
        self.mlp = mlp
        self.of_squares = of_squares

    def forward(self, squares: Tensor) -> Tensor:
        """``squares`` [rows, patches of a square, hidden] → embeddings [rows, embedding width]."""
        wide = squares.flatten(1)
        output: Tensor = self.mlp(self.norm(wide if self.of_squares else squares.flatten(0, 1)).view_as(wide))
        return output


class GatedMerger(nn.Module):
    """Makes embeddings of squares of patches by a norm, two products, another norm, and a gated MLP."""

    def __init__(self, norm: RMSNorm, products: tuple[Linear, Linear], product_norm: LayerNorm, mlp: GatedMLP) -> None:
        """The first product takes a square's concatenated patches."""
        super().__init__()
        self.norm = norm
        self.products = nn.ModuleList(products)
        self.product_norm = product_norm
        self.mlp = mlp

    def forward(self, squares: Tensor) -> Tensor:
        """[rows, patches of a square, hidden] → [rows, embedding width]."""
        merged = self.norm(squares.flatten(0, 1)).view(len(squares), -1)
        for product in self.products:
            merged = product(merged)
        output: Tensor = self.mlp(Activation.GELU(self.product_norm(merged)))
        return output


class GridTower(nn.Module):
    """``Encoder`` of images of any size and of videos' temporal patches, whose patches attend to those of their frame.

    A row holds the embedding, then the deepstack features.
    """

    def __init__(
        self,
        patches: Linear,
        layers: Sequence[TowerLayer],
        merger: nn.Module,
        *,
        merge_size: int,
        rotate: Rotate,
        deepstack: Mapping[int, nn.Module] = MappingProxyType({}),
        first_norm: RMSNorm | None = None,
        positions: PositionTable | None = None,
        windows: Windows | None = None,
        embedding_width: int,
    ) -> None:
        """``merger`` makes embeddings of the last states, and ``deepstack`` features of those after layers, numbered
        from 0; both take squares of patches whose side is ``merge_size``. ``first_norm`` normalises the projected
        patches, and ``positions`` are added to them."""
        super().__init__()
        self.patches = patches
        self.layers = nn.ModuleList(layers)
        self.merger = merger
        self.deepstack = nn.ModuleDict({str(number): one for number, one in deepstack.items()})
        self.merge_size = merge_size
        self.rotate = rotate
        self.first_norm = first_norm
        self.positions = positions
        self.windows = windows
        self.embedding_width = embedding_width
        weight = layers[0].attention_norm.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.calls = ShapedCalls[tuple[Grid, ...]](self._for_grids)
        """Calls for inputs of these grids."""

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        for item in inputs:
            if len(item.patches) != prod(item.grid) or any(side % self.merge_size for side in item.grid[1:]):
                raise PlanMismatch(f"{len(item.patches)} patches don't fill a grid of {item.grid}")
        patches = concatenated([torch.from_numpy(item.patches) for item in inputs], self.dtype, self.device)
        [rows] = self.calls(tuple(item.grid for item in inputs), patches)
        return list(torch.split(rows, [prod(item.grid) // self.merge_size**2 for item in inputs]))

    def _for_grids(self, grids: tuple[Grid, ...]) -> Call:
        """Return the call for these grids, with all that follows from them."""
        merge = self.merge_size
        frames = torch.tensor([0, *accumulate(rows * columns for times, rows, columns in grids for _ in range(times))])
        places = torch.cat([patch_places(*grid[1:], merge).repeat(grid[0], 1) for grid in grids])
        boundaries, moved = [frames] * len(self.layers), list[Tensor]()
        if self.windows is not None:
            order, windows = window_order(grids, merge, self.windows.side)
            boundaries = [frames if number in self.windows.whole else windows for number in range(len(self.layers))]
            by_patch = (order[:, None] * merge**2 + torch.arange(merge**2)).flatten()
            places, moved = places[by_patch], [by_patch, order.argsort()]
        angles, table = self.rotate(places), self.positions
        shares = [table.shares(side) for grid in grids for side in grid[1:]] if table is not None else []
        cos, sin, *rest = to_device([angles.cos(), angles.sin(), *shares, *moved], self.device)
        shares, moved = rest[: len(shares)], rest[len(shares) :]

        def rows_of(patches: Tensor) -> list[Tensor]:
            hidden = self.patches(patches)
            if self.first_norm is not None:
                hidden = self.first_norm(hidden)
            if table is not None:
                hidden = hidden + self._positions_of(grids, table, shares).to(hidden.dtype)
            if moved:
                hidden = hidden[moved[0]]
            features = []
            for number, (layer, segments) in enumerate(zip(self.layers, boundaries, strict=True)):
                hidden = layer(hidden, segments, (cos, sin))
                if str(number) in self.deepstack:
                    features.append(self.deepstack[str(number)](hidden.unflatten(0, (-1, merge**2))))
            rows = torch.cat((self.merger(hidden.unflatten(0, (-1, merge**2))), *features), dim=1)
            return [rows[moved[1]] if moved else rows]

        return rows_of

    def _positions_of(self, grids: Sequence[Grid], table: PositionTable, shares: Sequence[Tensor]) -> Tensor:
        """Return the positions of all patches, float32 [patches, hidden]."""
        found = []
        for (times, *_), down, across in zip(grids, shares[::2], shares[1::2], strict=True):
            squares = table(down, across).unflatten(1, (-1, self.merge_size)).unflatten(0, (-1, self.merge_size))
            found.append(squares.transpose(1, 2).flatten(0, 3).repeat(times, 1))
        return torch.cat(found)


def axial(places: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return the angles of patches at ``places``, as ``Rotate`` does: of the frequencies θ^(-4i/d) by a patch's row,
    then by its column, for both halves of a head."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 4, dtype=torch.float) / head_dim)
    return (places[:, :, None] * frequencies).flatten(1).repeat(1, 2)


def window_order(grids: Sequence[Grid], merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the squares of ``merge`` by ``merge`` patches, int64 [squares], window by window, and the
    windows' boundaries in patches, int64 [windows + 1]. A window has ``side`` by ``side`` squares, fewer at an edge."""
    found, count = [], 0
    for times, *sides in grids:
        down, across = (torch.arange(size // merge) // side for size in sides)
        in_frame = (down[:, None] * (int(across[-1]) + 1) + across).flatten()
        in_all = in_frame + torch.arange(times)[:, None] * (int(in_frame[-1]) + 1)
        found.append(in_all.flatten() + count)
        count += times * (int(in_frame[-1]) + 1)
    numbers = torch.cat(found)
    lengths = numbers.bincount() * merge**2
    return numbers.argsort(stable=True), torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
