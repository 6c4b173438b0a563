"""Ranks receive the step that rank 0 sends."""

import pytest
import torch
from torch import Tensor

from triptych.engine.step_broadcast import receive_step, send_step
from triptych.layers.attention.base import AttentionBatch
from triptych.layers.decoder import ForwardBatch
from triptych.layers.parallel import SingleRank
from triptych.layers.token_choice import TokenChoice

WIDTH = 6


class Recorded(SingleRank):
    """Records what is sent, and then receives it."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.sending = True

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.sending:
            self.sent.append(tensor.clone())
            return tensor
        received = self.sent.pop(0)
        assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
        return received


@pytest.mark.parametrize("num_media", [0, 2])
@pytest.mark.parametrize("released", [[0], [0, 3]])
@pytest.mark.parametrize("loras", [None, [0, 0, 0, None], [None, None, None, 1]])
@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("generated", [None, [False, True]])
def test_a_step_arrives_as_it_was_sent(
    num_media: int,
    released: list[int],
    loras: list[int | None] | None,
    spans: bool,
    generated: list[bool] | None,
) -> None:
    """With one group of layers, and with another whose page tables begin later; with ends of keys, and without."""
    attention = [
        AttentionBatch(
            [3, 1],
            [9, 8 - pages],
            [torch.arange(5), torch.arange(pages, 4)],
            torch.arange(4) + pages,
            torch.tensor([9, 9, 9, 8]) - pages if spans else None,
            generated,
        )
        for pages in released
    ]
    batch = ForwardBatch(
        tokens=torch.arange(4),
        positions=torch.rand(3, 4, dtype=torch.float64),
        media_index=torch.arange(num_media),
        media_embeddings=torch.rand(num_media, WIDTH),
        logits_index=torch.tensor([2, 3]),
        attention=attention,
        choice=None if loras is None else TokenChoice(loras),
    )
    group = Recorded()
    send_step(batch, group, torch.float32)
    group.sending = False
    received = receive_step(group, WIDTH, torch.float32)
    assert not group.sent
    for name in ("tokens", "positions", "media_index", "media_embeddings", "logits_index"):
        assert torch.equal(getattr(received, name), getattr(batch, name))
    assert received.choice == batch.choice
    for mine, theirs in zip(received.attention, attention, strict=True):
        assert (mine.query_lens, mine.kv_lens) == (theirs.query_lens, theirs.kv_lens)
        assert [one.tolist() for one in mine.page_tables] == [one.tolist() for one in theirs.page_tables]
        assert torch.equal(mine.slots, theirs.slots)
        assert mine.generated == theirs.generated
        assert (mine.ends is None) == (theirs.ends is None)
        assert mine.ends is None or theirs.ends is None or torch.equal(mine.ends, theirs.ends)
