"""Where the patches of an image are."""

import torch
from torch import Tensor


def patch_places(rows: int, columns: int, merge: int) -> Tensor:
    """Return row and column of each patch, int64 [patches, 2], in the order of ``PatchPreprocessor``: those of a square
    of ``merge`` by ``merge`` are consecutive."""
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    return places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
