"""Broadcasts steps from rank 0 to the other ranks of its group as tensors, without pickle."""

import torch
from torch import Tensor

from triptych.layers.attention.base import AttentionBatch
from triptych.layers.decoder import ForwardBatch
from triptych.layers.parallel import Group

_HEADER = 5
"""Counts of tokens, media rows, logits and requests, and the total length of the page tables."""


def send_step(batch: ForwardBatch, group: Group, row_dtype: torch.dtype) -> None:
    """Broadcast a step. Called on rank 0: three broadcasts, or two if the step has no media rows; those are sent in
    ``row_dtype``."""
    attention = batch.attention
    tables = attention.page_tables
    table_lens = [len(table) for table in tables]
    counts = [len(batch.tokens), len(batch.media_index), len(batch.logits_index), len(tables), sum(table_lens)]
    group.broadcast(torch.tensor(counts))
    lens = torch.tensor([*attention.query_lens, *attention.kv_lens, *table_lens])
    positions = batch.positions.flatten().view(torch.int64)  # the same bits
    integers = (batch.tokens, positions, batch.media_index, batch.logits_index, lens, attention.slots, *tables)
    group.broadcast(torch.cat(integers).cpu())
    if len(batch.media_embeddings):
        group.broadcast(batch.media_embeddings.to("cpu", row_dtype).contiguous())


def receive_step(group: Group, embedding_width: int, row_dtype: torch.dtype) -> ForwardBatch:
    """Return the step that rank 0 broadcasts, on the CPU. Called on the other ranks; blocks until there is one.
    ``embedding_width`` and ``row_dtype`` describe media rows."""
    tokens, media, logits, requests, pages = _receive(group, _HEADER).tolist()
    sizes = [tokens, 3 * tokens, media, logits, *[requests] * 3, tokens, pages]
    integers = torch.split(_receive(group, sum(sizes)), sizes)
    token_ids, positions, media_index, logits_index, query_lens, kv_lens, table_lens, slots, tables = integers
    rows = torch.empty(media, embedding_width, dtype=row_dtype)
    return ForwardBatch(
        tokens=token_ids,
        positions=positions.view(torch.float64).view(3, tokens),
        media_index=media_index,
        media_embeddings=group.broadcast(rows) if media else rows,
        logits_index=logits_index,
        attention=AttentionBatch(
            query_lens=query_lens.tolist(),
            kv_lens=kv_lens.tolist(),
            page_tables=list(torch.split(tables, table_lens.tolist())),
            slots=slots,
        ),
    )


def _receive(group: Group, length: int) -> Tensor:
    return group.broadcast(torch.empty(length, dtype=torch.int64))
