"""Broadcasts steps from rank 0 to the other ranks of its group as tensors, without pickle."""

import torch
from torch import Tensor

from triptych.layers.attention.base import AttentionBatch
from triptych.layers.decoder import ForwardBatch
from triptych.layers.delta_rule.base import DeltaBatch
from triptych.layers.parallel import Group
from triptych.layers.state_tensors import StateBatch
from triptych.layers.token_choice import TokenChoice

_HEADER = 10
"""Counts of tokens, media rows, logits, requests and groups of layers, the total length of the page tables, and whether
there are states, tokens with other weights, ends of keys, and flags of generated tokens."""
_OWN = -1


def send_step(batch: ForwardBatch, group: Group, row_dtype: torch.dtype) -> None:
    """Broadcast a step. Called on rank 0: three broadcasts, or two if the step has no media rows; those are sent in
    ``row_dtype``."""
    attention = batch.attention
    query_lens = attention[0].query_lens
    tables = [table for one in attention for table in one.page_tables]
    kv_lens, table_lens = [length for one in attention for length in one.kv_lens], [len(table) for table in tables]
    sizes = [len(batch.tokens), len(batch.media_index), len(batch.logits_index), len(query_lens), len(attention)]
    has_states, has_choice = batch.state is not None, batch.choice is not None
    ends = [one.ends for one in attention if one.ends is not None]
    generated = attention[0].generated
    has = [has_states, has_choice, len(ends) > 0, generated is not None]
    group.broadcast(torch.tensor([*sizes, sum(table_lens), *has]))
    states = [] if batch.state is None else [*batch.state.delta.slots, *batch.state.starts]
    numbers = [] if batch.choice is None else batch.choice.numbers
    choice = [_OWN if number is None else number for number in numbers]
    lens = torch.tensor([*query_lens, *kv_lens, *table_lens, *states, *choice, *(generated or [])])
    positions = batch.positions.flatten().view(torch.int64)  # the same bits
    slots = [one.slots for one in attention]
    integers = (batch.tokens, positions, batch.media_index, batch.logits_index, lens, *slots, *ends, *tables)
    group.broadcast(torch.cat(integers).cpu())
    if len(batch.media_embeddings):
        group.broadcast(batch.media_embeddings.to("cpu", row_dtype).contiguous())


def receive_step(group: Group, embedding_width: int, row_dtype: torch.dtype) -> ForwardBatch:
    """Return the step that rank 0 broadcasts, on the CPU. Called on the other ranks; blocks until there is one.
    ``embedding_width`` and ``row_dtype`` describe media rows."""
    header = _receive(group, _HEADER).tolist()
    tokens, media, logits, requests, num_groups, pages, has_state, has_choice, has_ends, has_generated = header
    lens, by_group = num_groups * requests, num_groups * tokens
    states = requests * has_state
    lists = [requests, lens, lens, states, states, has_choice * tokens, has_generated * requests]
    sizes = [tokens, 3 * tokens, media, logits, *lists, by_group, has_ends * by_group, pages]
    integers = torch.split(_receive(group, sum(sizes)), sizes)
    token_ids, positions, media_index, logits_index, query_lens, kv_lens, table_lens, *rest = integers
    state_slots, starts, choice, generated, slots, ends, tables = rest
    page_tables = torch.split(tables, table_lens.tolist())
    rows = torch.empty(media, embedding_width, dtype=row_dtype)
    return ForwardBatch(
        tokens=token_ids,
        positions=positions.view(torch.float64).view(3, tokens),
        media_index=media_index,
        media_embeddings=group.broadcast(rows) if media else rows,
        logits_index=logits_index,
        attention=[
            AttentionBatch(
                query_lens=query_lens.tolist(),
                kv_lens=kv_lens[one * requests : (one + 1) * requests].tolist(),
                page_tables=list(page_tables[one * requests : (one + 1) * requests]),
                slots=slots[one * tokens : (one + 1) * tokens],
                ends=ends[one * tokens : (one + 1) * tokens] if has_ends else None,
                generated=list(map(bool, generated.tolist())) if has_generated else None,
            )
            for one in range(num_groups)
        ],
        state=_states(query_lens, state_slots, starts) if has_state else None,
        choice=TokenChoice([None if number == _OWN else number for number in choice.tolist()]) if has_choice else None,
    )


def _states(query_lens: Tensor, slots: Tensor, starts: Tensor) -> StateBatch:
    """Return a step without snapshots: rank 0 copies them, in the memory of all ranks."""
    delta = DeltaBatch(query_lens.tolist(), slots.tolist(), (starts == 0).tolist())
    return StateBatch(delta, starts.tolist(), [], [])


def _receive(group: Group, length: int) -> Tensor:
    return group.broadcast(torch.empty(length, dtype=torch.int64))
