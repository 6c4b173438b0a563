"""Pads decode steps to a given number of rows, in host memory."""

from dataclasses import replace

import torch
from torch import Tensor

from triptych.layers.attention.base import AttentionBatch
from triptych.layers.decoder import ForwardBatch


def only_decodes(batch: ForwardBatch) -> bool:
    """Whether every request has one new token, and none is a media token."""
    return not len(batch.media_index) and all(query_len == 1 for query_len in batch.attention[0].query_lens)


def padded(batch: ForwardBatch, num_rows: int, scratch_page: int, page_size: int) -> ForwardBatch:
    """Pad a decode step to ``num_rows`` rows. A padding row is a request of one token, whose K and V go to the first
    slot of the scratch page. Rows are independent, so other results don't change; nor does ``logits_index``."""
    rows = num_rows - len(batch.tokens)
    scratch = torch.tensor([scratch_page], dtype=torch.int64)
    return replace(
        batch,
        tokens=_extended(batch.tokens, rows, 0),
        positions=_extended(batch.positions, rows, 0),
        attention=[
            AttentionBatch(
                query_lens=attention.query_lens + [1] * rows,
                kv_lens=attention.kv_lens + [1] * rows,
                page_tables=attention.page_tables + [scratch] * rows,
                slots=_extended(attention.slots, rows, scratch_page * page_size),
            )
            for attention in batch.attention
        ],
    )


def _extended(tensor: Tensor, count: int, value: int) -> Tensor:
    return torch.cat((tensor, tensor.new_full((*tensor.shape[:-1], count), value)), dim=-1)
