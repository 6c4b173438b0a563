"""Applies a grammar's bitmask to logits in PyTorch, on any device."""

import numpy as np
import torch
from torch import Tensor


def bitmask_tensor(mask: bytes) -> Tensor:
    """Return a bitmask as an int32 tensor [words] in host memory."""
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)


def allows(mask: bytes, token: int) -> bool:
    """Return whether the bitmask allows a token."""
    return bool(mask[token // 8] >> token % 8 & 1)


def single_token_mask(token: int, vocabulary: int) -> Tensor:
    """Return the bitmask that allows one token."""
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    words[token // 32] = 1 << token % 32
    return torch.from_numpy(words.view(np.int32))


def constrain(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits [vocabulary] of all tokens that the bitmask excludes to minus infinity, in place. ``bitmask`` is
    int32 [words] on the same device."""
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask[:, None] >> places & 1).flatten()[: logits.shape[0]]
    logits.masked_fill_(allowed == 0, float("-inf"))
