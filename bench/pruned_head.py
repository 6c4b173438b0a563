"""Time of the pruned LM head, which computes only the largest logits, compared with the complete head.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.pruned_head /tmp/mid --out bench/results/pruned-head-mid.json

Hidden states are the decoder's for a prompt of random tokens. The result also has the median number of logits that are
computed per token, all of each panel with one that may be among the largest: it depends on the weights.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.measuring import like_an_instance, medians_in_turns, report
from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.attention.base import AttentionBatch, KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.decoder import Decoder, ForwardBatch
from triptych.layers.linear import WEIGHT_FORMATS, LMHead
from triptych.measure.machine import machine
from triptych.models.registry import family_of, resolve

CPU = torch.device("cpu")
TOKENS = (1, 2, 4, 8, 16, 32)
LARGEST = (1, 20)
PAGE_SIZE = 16
ROUNDS = 25


def hidden_states(decoder: Decoder, count: int) -> Tensor:
    """Return the head's input for ``count`` consecutive tokens: [count, hidden]."""
    config, tokens = decoder.config, torch.randint(decoder.config.vocab_size, (count,))
    pages = -(-count // PAGE_SIZE)
    batch = ForwardBatch(
        tokens=tokens,
        positions=torch.arange(count, dtype=torch.float64).expand(3, -1),
        media_index=torch.empty(0, dtype=torch.int64),
        media_embeddings=torch.empty(0, config.hidden_size * (1 + config.num_deepstack_layers)),
        logits_index=torch.arange(count),
        attention=[AttentionBatch([count], [count], [torch.arange(pages)], torch.arange(count), generated=[False])],
    )
    given: list[Tensor] = []
    hook = decoder.head.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    decoder(batch, KVTensors.allocate(config.cache_specs(cache_format(torch.float32)), [pages], PAGE_SIZE, CPU))
    hook.remove()
    return given[0]


def head_ms(head: LMHead, hidden: Tensor) -> dict[str, dict[str, float]]:
    """Return milliseconds by method and number of tokens."""
    found: dict[str, dict[str, float]] = {}
    for count in TOKENS:
        some = hidden[:count]
        ways = {f"{largest} largest": partial(head, some, [largest] * count) for largest in LARGEST}
        for name, seconds in medians_in_turns({"all": partial(head, some)} | ways, ROUNDS).items():
            found.setdefault(name, {})[str(count)] = round(1e3 * seconds, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", choices=["float16", "float32"], default=["float16", "float32"])
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    like_an_instance(options.threads)
    torch.manual_seed(0)
    config = load_config(options.model)
    adapter = resolve(family_of(config).adapter)(config)
    found: dict[str, Any] = {
        "machine": machine(),
        "options": {"model": str(options.model), "threads": options.threads},
        "vocabulary": adapter.decoder_config.vocab_size,
        "hidden": adapter.decoder_config.hidden_size,
    }
    with torch.inference_mode():
        for name in options.formats:
            decoder = adapter.load_decoder(Checkpoint(options.model), WEIGHT_FORMATS[name], CPU)
            if decoder.head.pruned_head is None:
                parser.error("the pruned head needs a C compiler and a processor with VNNI or AVX2")
            hidden = hidden_states(decoder, max(TOKENS))
            computed = {}
            for largest in LARGEST:
                decoder.head(hidden, [largest] * len(hidden))
                computed[f"{largest} largest"] = statistics.median(
                    panels * decoder.head.pruned_head.panel_outputs or len(decoder.embedding)
                    for panels in decoder.head.pruned_head.num_panels
                )
            found[name] = {"head_ms": head_ms(decoder.head, hidden), "computed_logits": computed}
    report(found, options.out)


if __name__ == "__main__":
    main()
