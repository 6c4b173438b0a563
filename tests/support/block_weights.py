"""Random weights in the blocks of GGUF files."""

import torch

from triptych.layers.block_weight import BlockType, BlockWeight


def random_blocks(kind: BlockType, outputs: int, inputs: int) -> BlockWeight:
    """Blocks of any bits, but for their halves, which are about 0.01 and of any sign."""
    raw = torch.randint(0, 256, (outputs, inputs // kind.inputs * kind.num_bytes), dtype=torch.uint8)
    blocks = raw.view(outputs, -1, kind.num_bytes)
    for place in [208] if kind == BlockType.Q6_K else [0, 2] if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]:
        blocks[..., place + 1] = blocks[..., place + 1] & 0x83 | 0x20
    return BlockWeight(raw, kind, inputs)
