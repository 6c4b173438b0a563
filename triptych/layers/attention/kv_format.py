"""How the KV cache stores one token's key, or value, in one head.

It is ``head_dim`` elements of the cache's dtype. In int8 it has a scale of its own: the values are divided by their
largest magnitude / 127 and rounded, and the four bytes of that scale, float32, follow them. Scales beside the values
keep a page, a token's row and a rank's heads what they are in other dtypes, only with longer heads.
``kernels/cpu/kv_cache.h`` stores the same, to the bit.
"""

import torch
from torch import Tensor

from triptych.layers.cache_spec import CacheFormat
from triptych.layers.rounding import saturating_cast

SCALE_BYTES = 4
LARGEST = 127
SMALLEST_MAXIMUM = 1e-30
"""Lower bound of a head's largest magnitude: 127 divided by it is finite."""


def cache_format(dtype: torch.dtype) -> CacheFormat:
    """Return how a cache of this dtype stores a head's key, or its value."""
    scale_bytes = SCALE_BYTES if dtype == torch.int8 else 0
    return CacheFormat(str(dtype).removeprefix("torch."), dtype.itemsize, scale_bytes)


def dtype_of(stored: CacheFormat) -> torch.dtype:
    """Return the dtype of a format's elements."""
    dtype = getattr(torch, stored.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def stored_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements of ``dtype`` that a head's key takes."""
    return cache_format(dtype).stored_dim(head_dim)


def to_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values [..., head_dim] to what is stored, [..., stored_dim] in ``dtype``.

    Values beyond float16's range become its largest, and NaN stays NaN. In int8, a head with a value that isn't finite
    becomes NaN as a whole.
    """
    if dtype != torch.int8:
        return saturating_cast(values, dtype)
    values = values.float()
    largest = values.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_MAXIMUM)
    finite = largest.isfinite()
    scales = torch.where(finite, largest / LARGEST, torch.nan)
    whole = torch.where(finite, (values * (LARGEST / largest)).round(), 0).to(torch.int8)
    return torch.cat((whole, scales.view(torch.int8)), dim=-1)


def from_stored(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert what is stored [..., stored_dim] to keys or values [..., head_dim] in ``dtype``."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    whole, scales = stored.split((stored.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    return (whole.float() * scales.contiguous().view(torch.float32)).to(dtype)
