"""How the KV cache of a request grows with its context: pages and bytes that it holds, by group of layers, beside what
it would hold if pages behind sliding windows weren't freed.

    python -m bench.context_memory --out bench/results/context-memory.json --markdown context-memory.md

The models are those of ``bench/backbone_checkpoints.py``, without weights: pages are what the engine's own bookkeeping
hands out while a prompt is computed in steps, right after a step got its pages. So figures don't depend on the machine.
"""

import argparse
from pathlib import Path
from typing import Any

from bench.backbone_checkpoints import config_of
from bench.measuring import report
from bench.peer_report import header
from triptych.config import EngineConfig
from triptych.engine.cache_manager import CacheManager
from triptych.engine.kv_cache import PagePool
from triptych.errors import CheckpointError
from triptych.layers.cache_spec import CacheFormat, cache_bytes, layers_of
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.state_spec import state_bytes
from triptych.models.registry import family_of, resolve

MODELS = ("qwen3", "gemma3", "qwen3.5")
LENGTHS = tuple(1024 * 2**power for power in range(8))
FORMAT = CacheFormat("float16", 2)
MIB = 2**20


def growth(decoder: DecoderConfig, engine: EngineConfig) -> list[dict[str, Any]]:
    """What a request holds at each of ``LENGTHS``."""
    specs, groups = decoder.cache_specs(FORMAT), decoder.cache_groups
    of_state = state_bytes(decoder.state_specs(FORMAT)) if decoder.has_state else 0
    pools = [PagePool(LENGTHS[-1] // engine.page_size, engine.page_size) for _ in groups.windows]
    manager, found = CacheManager(pools, groups.windows), []
    tables = manager.new_tables()
    for end in range(engine.max_num_batched_tokens, LENGTHS[-1] + 1, engine.max_num_batched_tokens):
        manager.allocate(tables, manager.missing(tables, end))
        if end in LENGTHS:
            held, all_pages = [len(table.pages) for table in tables], [manager.pages_for(end)] * len(tables)
            found.append(
                {
                    "tokens": end,
                    "pages": {layers_of(window): pages for window, pages in zip(groups.windows, held, strict=True)},
                    "bytes": of_state + cache_bytes(specs, held, engine.page_size),
                    "pages_without_freeing": all_pages[0],
                    "bytes_without_freeing": of_state + cache_bytes(specs, all_pages, engine.page_size),
                }
            )
        manager.trim(tables, end)
    return found


def measured(left_out: list[str]) -> dict[str, Any]:
    """By model. Says in ``left_out`` which aren't served."""
    engine, found = EngineConfig(), {}
    for name in MODELS:
        config = config_of(name)
        try:
            decoder: DecoderConfig = resolve(family_of(config).adapter)(config).decoder_config
        except CheckpointError as error:
            left_out.append(f"{name}: {error}")
            continue
        groups = decoder.cache_groups
        layers = {layers_of(window): groups.of_layer.count(group) for group, window in enumerate(groups.windows)}
        found[name] = {"layers": layers, "growth": growth(decoder, engine)}
    return found


def markdown(found: dict[str, Any]) -> str:
    """Return a table of bytes by model, and one of pages for models with windows."""
    models = found["models"]
    lines = [*header(["tokens", *(f"{name} (MiB)" for name in models)])]
    for points in zip(*(model["growth"] for model in models.values()), strict=True):
        cells = [f"{points[0]['tokens']:,}", *(f"{point['bytes'] / MIB:,.1f}" for point in points)]
        lines.append(f"| {' | '.join(cells)} |")
    for name, model in models.items():
        if len(model["layers"]) == 1:
            continue
        groups = [f"pages of {count} layers, {layers}" for layers, count in model["layers"].items()]
        lines += ["", name, ""]
        lines += header(["tokens", *groups, "MiB", "pages without freeing", "MiB without freeing", "ratio"])
        for point in model["growth"]:
            held, whole = point["bytes"], point["bytes_without_freeing"]
            cells = [f"{point['tokens']:,}", *(f"{pages:,}" for pages in point["pages"].values())]
            cells += [f"{held / MIB:,.1f}", f"{point['pages_without_freeing']:,}", f"{whole / MIB:,.1f}"]
            lines.append(f"| {' | '.join([*cells, f'{held / whole:.2f}'])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    parser.add_argument("--markdown", type=Path, help="where to write the tables")
    options = parser.parse_args()
    left_out: list[str] = []
    engine = EngineConfig()
    found: dict[str, Any] = {
        "page_size": engine.page_size,
        "step_tokens": engine.max_num_batched_tokens,
        "format": FORMAT.dtype,
        "models": measured(left_out),
        "left_out": left_out,
    }
    report(found, options.out)
    if options.markdown:
        options.markdown.write_text(markdown(found))


if __name__ == "__main__":
    main()
