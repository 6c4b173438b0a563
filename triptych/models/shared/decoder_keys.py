"""Finds the names of a decoder's tensors in a checkpoint."""

from dataclasses import replace

from triptych.checkpoint.quantization import PACKED
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.specs import MoESpec
from triptych.layers.weights import DecoderKeys, ExpertLayout


def detect_decoder_keys(config: DecoderConfig, checkpoint: Checkpoint, prefix: str, head: str) -> DecoderKeys:
    """Return the names of a decoder's tensors, with the layout of the experts' weights found in the checkpoint.

    Stacked weights come in two orders, which the shape of at least one of the two tensors distinguishes.
    ``gate_up_proj`` is square, hence ambiguous, only if hidden = 2 * intermediate; ``down_proj`` only if hidden =
    intermediate.
    """
    keys = DecoderKeys(prefix, head, names=config.names)
    mixtures = [(index, layer.ffn) for index, layer in enumerate(config.layers) if isinstance(layer.ffn, MoESpec)]
    if not mixtures:
        return keys
    layer, moe = mixtures[0]
    experts = f"layers.{layer}.mlp.experts"
    if any(keys.key(f"{experts}.0.down_proj.{kind}") in checkpoint.tensors for kind in ("weight", PACKED)):
        return replace(keys, experts=ExpertLayout.SEPARATE)
    hidden, intermediate = config.hidden_size, moe.intermediate_size
    if hidden != intermediate:
        name, transposed = f"{experts}.down_proj", (intermediate, hidden)
    else:
        name, transposed = f"{experts}.gate_up_proj", (hidden, 2 * intermediate)
    is_transposed = checkpoint.info(keys.key(name)).shape[1:] == transposed
    return replace(keys, experts=ExpertLayout.TRANSPOSED if is_transposed else ExpertLayout.STACKED)
