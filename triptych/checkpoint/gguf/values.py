"""Reads tensors of GGUF files as PyTorch's."""

from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from triptych.checkpoint.gguf.index import Entry

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of values that are as in PyTorch."""
AT_ONCE = 2**22
"""Bytes that are converted at a time."""


def read_tensor(path: Path, entry: Entry) -> Tensor:
    """Return a tensor: floats that nothing changes as they are, memory-mapped; all others in float32. ``path`` is that
    of the file, or of one that the others are beside. Raises OSError for a file that can't be read."""
    if entry.parts:
        parts = [read_tensor(path.with_name(one.file), one) for one in entry.parts]
        same = {part.dtype for part in parts}
        return torch.cat(parts if len(same) == 1 else [part.float() for part in parts], entry.axis).view(entry.shape)
    rows = read_rows(path, entry)
    if (kind := FLOATS.get(entry.kind)) is not None:
        aligned = rows if rows.storage_offset() % kind.itemsize == 0 else rows.clone()
        found = aligned.view(kind).view(entry.shape)
    else:
        found = _dequantized(rows, entry).view(entry.shape)
    if entry.rotated and found.dim() == 1:
        found = _in_halves(found.unsqueeze(1), entry.rotated).view(entry.shape)
    found = found.transpose(-1, -2) if entry.transposed else found
    return found + entry.shift if entry.shift else found


def read_rows(path: Path, entry: Entry) -> Tensor:
    """Return the bytes of a tensor of one part, uint8 [rows, bytes of one]: memory-mapped, unless rows change places;
    a vector is one row, in the file's order. Raises OSError for a file that can't be read."""
    raw = torch.from_file(str(path), False, path.stat().st_size, dtype=torch.uint8)
    rows = raw[entry.offset : entry.offset + entry.num_bytes].view(-1, entry.row_bytes)
    return _in_halves(rows, entry.rotated) if entry.rotated and len(entry.shape) > 1 else rows


def _dequantized(rows: Tensor, entry: Entry) -> Tensor:
    made = torch.empty(len(rows), entry.shape[-1])
    together = max(1, AT_ONCE // entry.row_bytes)
    for first in range(0, len(rows), together):
        some = rows[first : first + together].numpy()
        made[first : first + together] = torch.from_numpy(dequantize(some, GGMLQuantizationType[entry.kind]))
    return made


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Return rows in transformers' order: within a head, those of a rotated pair are half a head apart."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
