"""Positions of patches as shares of an image's sides: the towers of Idefics3, Phi-4-multimodal and MiniCPM-V."""

import torch
from torch import Tensor


def places(side: int, rows: int | None = None, columns: int | None = None) -> Tensor:
    """Return the rows of the table of positions that the patches of a tile have: int64 [side²].

    The first ``rows`` by ``columns`` patches show something, by default all; others have the first row of the table. A
    patch's place is a share of what is shown, and shares are put into as many buckets as a side has patches.
    """
    down, across = (_buckets(side, side if shown is None else shown) for shown in (rows, columns))
    found = down[:, None] * side + across
    found[side if rows is None else rows :] = 0
    found[:, side if columns is None else columns :] = 0
    return found.flatten()


def _buckets(side: int, shown: int) -> Tensor:
    shares = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(shown))
    return in_buckets(torch.clamp(shares, max=1.0 - 1e-6), side)


def in_buckets(shares: Tensor, side: int) -> Tensor:
    """Return which of ``side`` equal buckets each share, from 0 to 1, is in: int64. Rounding puts some into the one
    before, as in the references."""
    return torch.bucketize(shares, torch.arange(1 / side, 1.0, 1 / side), right=True)
