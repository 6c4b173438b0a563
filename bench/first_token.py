"""Where the time to the first token goes: one request at a time, from the socket to the first token, and inside
preprocessing, encode and prefill.

    python -m bench.make_checkpoint /tmp/mid --preset mid
    python -m bench.first_token /tmp/mid --out bench/results/first-token-mid.json

A request has one picture of 448 × 448 pixels and 128 characters of text, each its own, so that no cache helps. Services
are asked through HTTP. Their timelines say which stage worked when: an instant in which several did counts for the one
that comes first in ``STAGES``, and an instant in which none did is "between stages". The stages' parts are measured in
this process, with the same code and threads: products and attention by themselves, on the same shapes, and the rest of
the layers as what remains. Where one call runs a decoder's layers, they are measured one by one, and a row of its own
says what the call changes. Prints tables in Markdown.
"""

import argparse
import asyncio
import base64
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor, nn

from bench.measuring import like_an_instance, median_seconds, report
from bench.serve import Load, Sample, ask, random_jpeg, request_body
from triptych.checkpoint.config_files import load_preprocessor_config, load_video_config
from triptych.checkpoint.reader import Checkpoint
from triptych.cluster.service import Service
from triptych.config import EngineConfig, FrontendConfig, ServeConfig
from triptych.layers.attention.base import AttentionBatch, KVTensors
from triptych.layers.attention.compiled import paged_attention
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.blocks import DecoderLayer
from triptych.layers.compiled_layer import compiled
from triptych.layers.decoder import ForwardBatch
from triptych.layers.linear import LMHead
from triptych.layers.mixers import Attention
from triptych.layers.parallel import SINGLE_RANK
from triptych.measure.machine import machine
from triptych.models.base import EncoderInput
from triptych.models.registry import resolve
from triptych.models.shared.grid_tower import GridTower
from triptych.models.shared.images import decode_image
from triptych.prompt.probe import probe_image
from triptych.server.model_bundle import ModelBundle
from triptych.topology import Topology

MODEL = "m"
STAGES = ("encode", "preprocess", "prefill", "transfer", "fetch", "plan", "queue")
"""The earlier one of two stages at work gets the time: long text before a picture is prefilled beside preprocessing."""
BETWEEN = "between stages"
CLIENT = "client, HTTP, parsing, first chunk of the answer"
SPECIAL_TOKENS = 16
"""Tokens of a prompt besides its rows and characters."""

IN_ONE_CALL = "layers in one call instead of one by one"
LEAST_SHARE = -0.05
"""Of the whole: a part below it is no noise but an error of measurement."""

Table = dict[str, float]
"""Milliseconds by part."""


# ── the whole request ────────────────────────────────────────────────────────────────────────────────────────────


async def served(folder: Path, topology: str, engine: EngineConfig, requests: int) -> dict[str, Any]:
    """Return a service's times: of the first request after its start, of the second, and medians over later ones."""
    config = ServeConfig(model=folder, engine=engine, frontend=FrontendConfig.of(port=0, served_model_name=MODEL))
    async with Service(config, Topology.parse(topology), show=lambda _: None) as service:
        await service.wait_until_ready()
        async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None) as client:
            samples = [await ask(client, request_body(MODEL, Load(), seed)) for seed in range(2 + requests)]
    if errors := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"{topology}: {errors[0]}")
    first, second, *others = samples
    parts = [by_stage(sample) for sample in others]
    return {
        "first_ms": round(1e3 * first.ttft, 1),
        "second_ms": round(1e3 * second.ttft, 1),
        "prompt_tokens": others[0].prompt_tokens,
        "ttft_ms": {
            "median": round(1e3 * statistics.median(sample.ttft for sample in others), 1),
            "least": round(1e3 * min(sample.ttft for sample in others), 1),
            "most": round(1e3 * max(sample.ttft for sample in others), 1),
        },
        "parts_ms": {part: round(statistics.median(one[part] for one in parts), 2) for part in parts[0]},
    }


def by_stage(sample: Sample) -> Table:
    """Divide one request's time to first token among stages, in milliseconds."""
    intervals = [one for one in sample.timeline if one["stage"] in STAGES]
    [end] = [one["start_ms"] for one in sample.timeline if one["stage"] == "decode"]
    times = sorted({0.0, end, *(min(end, one[key]) for one in intervals for key in ("start_ms", "end_ms"))})
    found = dict.fromkeys((*STAGES, BETWEEN), 0.0)
    for start, stop in pairwise(times):
        active = {one["stage"] for one in intervals if one["start_ms"] <= start and stop <= one["end_ms"]}
        found[next((stage for stage in STAGES if stage in active), BETWEEN)] += stop - start
    return found | {CLIENT: 1e3 * sample.ttft - end}


# ── inside the stages ────────────────────────────────────────────────────────────────────────────────────────────


class Stopwatch:
    """Adds up the time that modules take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def on(self, modules: dict[str, list[nn.Module]]) -> Iterator[None]:
        """Measure calls of these modules, by name; calls within others count for both."""
        began: list[float] = []
        handles = []
        for name, some in modules.items():
            for module in some:
                handles.append(module.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())))
                handles.append(module.register_forward_hook(partial(self._ended, name, began)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ended(self, name: str, began: list[float], *_: Any) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began.pop()


def measured(work: Callable[[], object], modules: dict[str, list[nn.Module]], rounds: int) -> Table:
    """Return the time of ``work`` in its median round, as "all", and those of modules in that round, in milliseconds.
    Raises SystemExit unless ``work`` calls each of the modules once."""
    found: list[Table] = []
    for _ in range(1 + rounds):
        watch, began = Stopwatch(), time.perf_counter()
        with watch.on(modules):
            work()
        found.append(watch.seconds | {"all": time.perf_counter() - began})
        for name, some in modules.items():
            if (calls := watch.calls.get(name, 0)) != len(some):
                raise SystemExit(f"{name}: {calls} calls of {len(some)} modules, so their time can't be told")
    median = sorted(found[1:], key=lambda one: one["all"])[rounds // 2]
    return {name: 1e3 * seconds for name, seconds in median.items()}


def products_ms(linears: list[nn.Module], tokens: int, rounds: int) -> float:
    """Return what a layer's products take by themselves, in milliseconds."""
    total = 0.0
    for linear in linears:
        inputs = torch.randn(tokens, linear.product.inputs)  # type: ignore[union-attr, arg-type]
        total += median_seconds(partial(linear, inputs), rounds)
    return 1e3 * total


def in_encode(model: ModelBundle, part: EncoderInput, rounds: int) -> tuple[Table, Tensor]:
    """Return the parts of encoding one picture, and its rows."""
    tower = model.load_encoder()
    assert isinstance(tower, GridTower)
    layers: list[Any] = list(tower.layers)
    mergers = [tower.merger, *tower.deepstack.values()]
    found = measured(
        lambda: tower.encode([part]),
        {"layers": list(layers), "patch projection": [tower.patches], "mergers": mergers},
        rounds,
    )
    layer, tokens = layers[0], len(part.patches)
    mlp = [one for one in layer.mlp.children() if hasattr(one, "product")]
    products = products_ms([layer.attention.inputs[0], layer.attention.output, *mlp], tokens, rounds)
    heads, output = layer.attention.num_heads, compiled(layer.attention.output)
    assert output is not None
    query, key, value = torch.randn(tokens, 3, heads, output.inputs // heads).unbind(1)
    kernel = paged_attention(layer.attention.in_bf16)
    assert kernel is not None
    attention = 1e3 * median_seconds(lambda: kernel.over_segments(query, key, value, [tokens]), rounds)
    shares = {"products of layers": products * len(layers), "attention of layers": attention * len(layers)}
    return _divided(found, shares), tower.encode([part])[0]


def in_prefill(model: ModelBundle, rows: Tensor, text: int, rounds: int) -> Table:
    """Return the parts of prefilling a picture's rows and ``text`` other tokens."""
    decoder = model.load_decoder(SINGLE_RANK)
    tokens, config = len(rows) + text, decoder.config
    pages = -(-tokens // model.page_size)
    cache = KVTensors.allocate(config.cache_specs(cache_format(model.kv_dtype)), [pages], model.page_size, model.device)
    attention = AttentionBatch([tokens], [tokens], [torch.arange(pages)], torch.arange(tokens), generated=[False])
    layers = [one for one in decoder.layers if isinstance(one, DecoderLayer)]
    head: list[nn.Module] = [one for one in decoder.modules() if isinstance(one, LMHead)]
    batch = ForwardBatch(
        tokens=torch.arange(tokens),
        positions=torch.arange(tokens, dtype=torch.float64).expand(3, -1),
        media_index=torch.arange(len(rows)),
        media_embeddings=rows,
        logits_index=torch.tensor([tokens - 1]),
        attention=[attention],
        num_largest=[1],
    )
    in_one_call = decoder.run_layers is not None and decoder.run_layers.takes(cache)
    [served] = measured(lambda: decoder(batch, cache), {}, rounds).values()
    decoder.run_layers = None  # so that each layer is called
    found = measured(lambda: decoder(batch, cache), {"layers": list(layers), "head": head}, rounds)
    layer, mixer = layers[0], layers[0].mixer
    assert isinstance(mixer, Attention)
    products = products_ms([mixer.qkv, mixer.output, *layer.mlp.children()], tokens, rounds)
    # the last layer computes little after attention, and its first product as the others do
    first = products_ms([mixer.qkv], tokens, rounds)
    heads, kv_heads, _ = mixer.head_counts
    query, key, value = torch.randn(tokens, heads + 2 * kv_heads, mixer.head_dim).split((heads, kv_heads, kv_heads), 1)
    keys, values = cache.layers[0]
    own = partial(mixer.backend, query, key, value, keys, values, attention)
    alone = 1e3 * median_seconds(own, rounds)
    shares = {
        "products of layers": products * (len(layers) - 1) + first,
        "attention of layers": alone * len(layers),
    }
    parts = _divided(found, shares)
    if not in_one_call:
        return parts
    one_by_one = parts.pop("all")
    return parts | {IN_ONE_CALL: round(served - one_by_one, 2), "all": round(served, 2)}


def _divided(found: Table, shares: Table) -> Table:
    """Replace "layers" by its parts, and "all" by what the others leave of it."""
    layers, whole = found.pop("layers"), found.pop("all")
    rest = {"norms, rotation, activations and sums of layers": layers - sum(shares.values())}
    others = {"the rest": whole - layers - sum(found.values())}
    return {name: round(ms, 2) for name, ms in (shares | rest | found | others | {"all": whole}).items()}


def check(parts: Table) -> None:
    """Raise SystemExit if a part is clearly negative."""
    for name, ms in parts.items():
        if name != IN_ONE_CALL and ms < LEAST_SHARE * parts["all"]:
            raise SystemExit(f"{name}: {ms} of {parts['all']} ms; other work may disturb the measurement")


def in_preprocess(model: ModelBundle, rounds: int) -> tuple[Table, EncoderInput]:
    """Return the parts of preprocessing one picture, and the tower's input."""
    data = base64.b64decode(random_jpeg(Load().width, Load().height, 0).partition(",")[2])
    folder = model.checkpoint.folder
    files = load_preprocessor_config(folder), load_video_config(folder)
    preprocessor = resolve(model.family.preprocessor or "")(model.config, *files)
    header = probe_image(data)
    plan = model.planner.plan(header)
    [part] = preprocessor(data, plan)
    decode = 1e3 * median_seconds(lambda: decode_image(data, header.format, (header.width, header.height)), rounds)
    whole = 1e3 * median_seconds(lambda: list(preprocessor(data, plan)), rounds)
    found = {"decode the JPEG": decode, "resize, cut and normalise": whole - decode, "all": whole}
    return {name: round(ms, 2) for name, ms in found.items()}, part


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────


def markdown(found: dict[str, Any]) -> str:
    """Return the tables of the report."""
    topologies = found["served"]
    rows = [["time to first token", *(one["ttft_ms"]["median"] for one in topologies.values())]]
    for part in next(iter(topologies.values()))["parts_ms"]:
        rows.append([part, *(one["parts_ms"][part] for one in topologies.values())])
    for name, key in (("first request after the start", "first_ms"), ("second request", "second_ms")):
        rows.append([name, *(one[key] for one in topologies.values())])
    tables = [_table(["part (ms)", *(f"`{topology}`" for topology in topologies)], rows)]
    for stage in ("preprocess", "encode", "prefill"):
        parts = found[stage]
        shares = [[part, ms, f"{ms / parts['all']:.0%}"] for part, ms in parts.items()]
        tables.append(_table([f"{stage} (ms)", "median", "share"], shares))
    return "\n\n".join(tables)


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint folder of a family with pictures")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=15, help="repetitions inside the stages")
    parser.add_argument("--topologies", nargs="+", default=["1EPD", "1E1PD"])
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    options = parser.parse_args()
    engine = EngineConfig(threads=options.threads)
    found: dict[str, Any] = {"machine": machine(), "options": {"threads": options.threads}}
    found["served"] = {
        topology: asyncio.run(served(options.model, topology, engine, options.requests))
        for topology in options.topologies
    }
    like_an_instance(options.threads)
    model = ModelBundle(Checkpoint(options.model), engine)
    found["format"] = model.weights.linear_dtype
    with torch.inference_mode():
        found["preprocess"], part = in_preprocess(model, options.rounds)
        found["encode"], rows = in_encode(model, part, options.rounds)
        text = Load().text_length + SPECIAL_TOKENS
        found["prefill"] = in_prefill(model, rows, text, options.rounds)
    for stage in ("preprocess", "encode", "prefill"):
        check(found[stage])
    report(found, options.out)
    print(f"\n{markdown(found)}")


if __name__ == "__main__":
    main()
