"""What transformers' towers derive from the grids of their inputs: positions, and where attention's segments begin.

transformers takes each of them as an argument, too (``transformers.vision_utils``). Made beforehand, they are made once
for all inputs with equal grids, and the tower needn't wait for a GPU to read them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from triptych.layers.pinned import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GridTable = Callable[["PreTrainedModel", Tensor], Mapping[str, Tensor]]
"""Takes a tower and int64 grids [inputs, 3] on the CPU. Returns arguments of the tower's ``forward`` by name."""


def positions(tower: "PreTrainedModel", grids: Tensor) -> Mapping[str, Tensor]:
    """Return the rows and columns of patches in their image, int64 [patches, 2], and the boundaries of frames, int32
    [frames + 1]."""
    from transformers import vision_utils

    return {
        "position_ids": vision_utils.get_vision_position_ids(grids, tower.config.spatial_merge_size),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
    }


def windows(tower: "PreTrainedModel", grids: Tensor) -> Mapping[str, Tensor]:
    """Return the order of merged patches by window, int64 [rows], and the boundaries of windows in patches, int32
    [windows + 1]."""
    from transformers import vision_utils

    config = tower.config
    index, boundaries = vision_utils.get_vision_window_index(
        grids, config.spatial_merge_size, config.window_size, config.patch_size
    )
    return {"window_index": index, "cu_window_seqlens": boundaries}


def interpolation(tower: Any, grids: Tensor) -> Mapping[str, Tensor]:
    """Return which position embeddings each patch's is made of, int64 [patches, 4], and their weights, float32."""
    from transformers import vision_utils

    index, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.config.spatial_merge_size,
    )
    return {"interp_indices": index, "interp_weights": weights}


def grid_tables(tower: "PreTrainedModel", grids: Tensor, kinds: Sequence[GridTable]) -> dict[str, Tensor]:
    """Return the arguments of all ``kinds`` on the tower's device; boundaries stay on the CPU, where our attention
    reads them."""
    made = {name: table for kind in kinds for name, table in kind(tower, grids).items()}
    moved = [name for name in made if not name.startswith("cu_")]
    return made | dict(zip(moved, to_device([made[name] for name in moved], tower.device), strict=True))
