"""Positions of patches by their share of an image's side, as Idefics3's and Phi-4-multimodal's towers have them."""

import torch
from torch import Tensor


def places(side: int, rows: int | None = None, columns: int | None = None) -> Tensor:
    """Return the rows of the table of positions that the patches of a tile have: int64 [side²].

    The first ``rows`` by ``columns`` patches show something, by default all; others have the first row of the table. A
    patch's place is a share of what is shown, and shares are put into as many buckets as a side has patches. Rounding
    puts some of them into the one before, as in the reference.
    """
    down, across = (_buckets(side, side if shown is None else shown) for shown in (rows, columns))
    found = down[:, None] * side + across
    found[side if rows is None else rows :] = 0
    found[:, side if columns is None else columns :] = 0
    return found.flatten()


def _buckets(side: int, shown: int) -> Tensor:
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    shares = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(shown)), max=1.0 - 1e-6)
    return torch.bucketize(shares, boundaries, right=True)
