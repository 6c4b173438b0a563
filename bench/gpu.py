"""Performance of the decoder and vision tower on a GPU, relative to the GPU's limits::

    python -m bench.gpu                              # sizes like Qwen3-VL-2B's, random weights built on the GPU
    python -m bench.gpu --model 8b --json out.json
    TRITON_INTERPRET=1 python -m bench.gpu --model tiny --device cpu    # a dry run; its figures mean nothing

Decode is compared with the time to read weights, keys and values at the bandwidth of a copy, prefill with its matrix
products alone. Both limits are measured first. ``gpu`` is the time between two events on the GPU, which includes
waiting for a slower CPU. ``step`` is the time on the CPU from the scheduler's decision to the sampled tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_models import MODELS, RandomCheckpoint, draws, made_up
from tests.support.random_checkpoint import Sizes, model_config
from triptych.config import EngineConfig
from triptych.encode.runner import record_towers
from triptych.engine.buckets import decode_sizes, mixed_sizes
from triptych.engine.cache_rows import cache_rows
from triptych.engine.gpu_forward import GpuForward, on_device
from triptych.engine.gpu_runner import GpuRunner
from triptych.engine.kv_rows import KVRows, TokenRows
from triptych.engine.page_tables import PageTable
from triptych.engine.pinned_memory import PinnedSharedMemory
from triptych.engine.runner import MediaEmbeddings
from triptych.engine.scheduler import Chunk
from triptych.engine.step_graphs import GraphSizes, StepGraphs, record_graphs
from triptych.errors import StartError
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import bytes_per_token
from triptych.layers.decoder import Decoder, ForwardBatch
from triptych.layers.devices import find_device
from triptych.layers.linear import CUDA_FORMATS, PlainLinear
from triptych.layers.pinned import to_cpu, to_device
from triptych.layers.weights import DecoderKeys
from triptych.models.base import EncoderInput
from triptych.models.registry import family_of, resolve
from triptych.models.shared.encoder import recordable_calls

PAGE_SIZE = EngineConfig().page_size


class Bench:
    """One model on one device. Every method returns rows of figures."""

    def __init__(self, sizes: Sizes, dtype: str, device: torch.device, budget: int, repeats: int) -> None:
        torch.manual_seed(0)
        self.device, self.repeats, self.sizes = device, repeats, sizes
        self.dtype = getattr(torch, dtype)
        checkpoint = RandomCheckpoint(sizes, self.dtype, device)
        config = model_config(sizes)
        adapter = resolve(family_of(config).adapter)(config)
        backend = None
        if device.type == "cpu":
            from triptych.layers.attention.triton_backend import TritonAttention

            backend = TritonAttention(num_processors=4)
        weights = CUDA_FORMATS[dtype]
        keys = DecoderKeys("model.language_model.", "lm_head.weight")
        self.decoder = Decoder.load(adapter.decoder_config, checkpoint, keys, weights, device, backend=backend)
        self.tower = adapter.load_encoder(checkpoint, weights, device)
        self.budget = budget
        self.linears = [module for module in self.decoder.modules() if isinstance(module, PlainLinear)]

    # ── what the device can do ───────────────────────────────────────────────────────────────────────────────

    def copy_bandwidth(self, num_bytes: int) -> float:
        """Bytes read and written per second by a copy within the device's memory."""
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.on_gpu(lambda: target.copy_(source))

    def products(self, num_tokens: int) -> tuple[float, float]:
        """Seconds that a prefill's matrix products take by themselves, one kind after the other, and their FLOP."""
        seconds = flop = 0.0
        counts: dict[tuple[int, ...], int] = {}
        for linear in self.linears[:-1]:  # without the head, which sees one token
            counts[tuple(linear.weight.shape)] = counts.get(tuple(linear.weight.shape), 0) + 1
        for (out, width), count in counts.items():
            weight = torch.randn(out, width, dtype=self.dtype, device=self.device) * width**-0.5
            tokens = torch.randn(num_tokens, width, dtype=self.dtype, device=self.device)
            seconds += count * self.on_gpu(lambda t=tokens, w=weight: torch.nn.functional.linear(t, w))  # type: ignore[misc]
            flop += count * 2 * num_tokens * out * width
        return seconds, flop

    # ── the decoder ──────────────────────────────────────────────────────────────────────────────────────────

    def decode(self, batch: int, context: int, bandwidth: float) -> list[dict[str, Any]]:
        """Steps in which each of ``batch`` sequences reads ``context`` tokens, with and without graphs."""
        pages = -(-(context + 1) // PAGE_SIZE)
        cache = self._cache(batch * pages)
        sequences = [made_up(index, context + 1, range(index * pages, (index + 1) * pages)) for index in range(batch)]
        chunks = [Chunk(sequence, context, 1) for sequence in sequences]
        weights = sum(linear.weight.nbytes for linear in self.linears)
        history = batch * (context + 1) * bytes_per_token(self.decoder.config.cache_specs(cache_format(self.dtype)))
        floor = (weights + history) / bandwidth
        rows = []
        for graphs in (None, self._graphs(cache, batch, 1, context + 1)):
            runner = GpuRunner(GpuForward(self.decoder, self.device, graphs), cache, PAGE_SIZE, self.device)
            inputs = runner.batch(chunks, self._no_media())
            with torch.inference_mode():
                gpu = self.on_gpu(self._forward(inputs, cache, graphs))
            step = self.on_host(lambda r=runner: r.run(r.batch(chunks, self._no_media()), draws(sequences)))  # type: ignore[misc]
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "graphs": graphs is not None,
                    "floor_ms": 1e3 * floor,
                    "gpu_ms": 1e3 * gpu,
                    "step_ms": 1e3 * step,
                    "of_floor": floor / gpu,
                    "tokens_per_s": batch / step,
                }
            )
        return rows

    def prefill(self, num_tokens: int, past: int) -> dict[str, Any]:
        """One chunk of a prompt, of which ``past`` tokens are in the cache, with and without a graph."""
        pages = -(-(past + num_tokens) // PAGE_SIZE)
        cache = self._cache(pages)
        sequence = made_up(0, past + num_tokens, range(pages))
        runner = GpuRunner(GpuForward(self.decoder, self.device, None), cache, PAGE_SIZE, self.device)
        inputs = runner.batch([Chunk(sequence, past, num_tokens)], self._no_media())
        graphs = self._graphs(cache, 1, num_tokens, past + num_tokens)
        with torch.inference_mode():
            launched = self.on_gpu(self._forward(inputs, cache, None))
            seconds = self.on_gpu(self._forward(inputs, cache, graphs))
        products, flop = self.products(num_tokens)
        config = self.decoder.config
        pairs = num_tokens * past + num_tokens * (num_tokens + 1) / 2
        attention = 4 * pairs * sum(layer.mixer.output_size for layer in config.layers)
        return {
            "tokens": num_tokens,
            "past": past,
            "products_ms": 1e3 * products,
            "launched_ms": 1e3 * launched,
            "gpu_ms": 1e3 * seconds,
            "of_products": products / seconds,
            "products_tflops": flop / products / 1e12,
            "tflops": (flop + attention) / seconds / 1e12,
            "tokens_per_s": num_tokens / seconds,
        }

    def _forward(self, batch: ForwardBatch, cache: KVTensors, graphs: StepGraphs | None) -> Callable[[], object]:
        if graphs is not None:
            assert graphs.can_replay(batch)
            return lambda: graphs.replay(batch)
        return lambda: self.decoder(on_device(batch, self.device), cache)

    def _cache(self, num_pages: int) -> KVTensors:
        specs = self.decoder.config.cache_specs(cache_format(self.dtype))
        cache = KVTensors.allocate(specs, [num_pages + 1], PAGE_SIZE, self.device)
        for tensor in cache.tensors:
            tensor.normal_()
        return cache

    def _graphs(self, cache: KVTensors, batch: int, num_tokens: int, context: int) -> StepGraphs | None:
        if self.device.type == "cuda":
            return record_graphs(self.decoder, cache, batch, num_tokens, context)
        sizes = GraphSizes(decode_sizes(batch), mixed_sizes(num_tokens), batch, batch * context)
        with torch.inference_mode():
            return StepGraphs(self.decoder, cache, sizes, lambda step: step)

    def _no_media(self) -> MediaEmbeddings:
        width = self.decoder.config.hidden_size * (1 + self.decoder.config.num_deepstack_layers)
        return MediaEmbeddings(torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=self.dtype))

    # ── transfers ────────────────────────────────────────────────────────────────────────────────────────────

    def transfer(self, num_tokens: int, *, scattered: bool) -> dict[str, Any]:
        """A prompt's keys and values from the cache to host memory and back, as prefill and decode instances move them,
        beside one copy of as many bytes in pinned memory each way."""
        pages = -(-num_tokens // PAGE_SIZE)
        cache = self._cache(2 * pages)
        of_token = TokenRows(self.decoder.config.cache_specs(cache_format(self.dtype)))
        rows, wanted = cache_rows(cache, of_token), KVRows(of_token, 0, num_tokens)
        tables = [PageTable(pages=list(range(0, 2 * pages, 2) if scattered else range(pages)))]
        runs = [run for layer in range(of_token.num_layers) for run in wanted.of_layer(layer, 0, num_tokens)]
        found: list[tuple[int, np.ndarray]] = []

        def read() -> None:
            found[:] = rows.read(runs, tables, rows.event())
            done = rows.read_event()
            while not done.query():
                time.sleep(1e-4)

        def write() -> None:
            for run, parts in zip(runs, sources, strict=True):
                rows.write(run, tables, parts)
            rows.finish_writes()

        read_s = self.on_host(read)
        sources = [part for _, part in found]
        num_bytes = sum(part.nbytes for part in sources)
        figures = {"tokens": num_tokens, "scattered": scattered, "mb": num_bytes / 1e6, "read_ms": 1e3 * read_s}
        figures["write_ms"] = 1e3 * self.on_host(write)
        if self.device.type == "cuda":
            figures["write_from_pageable_ms"], buffer = figures["write_ms"], PinnedSharedMemory(num_bytes)
            starts = accumulate((part.nbytes for part in sources), initial=0)
            places = zip(starts, sources, strict=False)
            shared = [buffer.bytes[start : start + part.nbytes].reshape(part.shape) for start, part in places]
            for target, part in zip(shared, sources, strict=True):
                target[:] = part
            sources = shared
            figures["write_ms"] = 1e3 * self.on_host(write)
            buffer.close()
            pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            from_gpu = self.on_gpu(lambda: pinned.copy_(on_gpu, non_blocking=True))
            to_gpu = self.on_gpu(lambda: on_gpu.copy_(pinned, non_blocking=True))
            figures |= {"copy_from_gpu_ms": 1e3 * from_gpu, "copy_to_gpu_ms": 1e3 * to_gpu}
            figures |= {"read_of_copy": from_gpu / read_s, "write_of_copy": 1e3 * to_gpu / figures["write_ms"]}
        return figures

    # ── the tower ────────────────────────────────────────────────────────────────────────────────────────────

    def encode(self, images: int, side: int) -> dict[str, Any]:
        """``images`` of ``side`` × ``side`` pixels at once: from patches in host memory to rows in host memory."""
        grid = side // self.sizes.patch
        values = 3 * 2 * self.sizes.patch**2
        random = np.random.default_rng(0)
        inputs = [
            EncoderInput(random.standard_normal((grid * grid, values), dtype=np.float32), (1, grid, grid), str(index))
            for index in range(images)
        ]
        patches = torch.cat([torch.from_numpy(item.patches) for item in inputs])

        def to_gpu() -> None:
            to_device([patches], self.device)
            self._wait()

        upload = self.on_host(to_gpu)

        def encode() -> None:
            to_cpu(self.tower.encode(inputs))

        launched = self.on_host(encode)
        if self.device.type == "cuda":
            record_towers(self.tower, self.device)
        seconds = self.on_host(encode)
        for calls in recordable_calls(self.tower):
            calls.record = None
        num_patches = images * grid * grid
        return {
            "images": images,
            "side": side,
            "patches": num_patches,
            "launched_ms": 1e3 * launched,
            "ms": 1e3 * seconds,
            "upload_ms": 1e3 * upload,
            "patches_per_s": num_patches / seconds,
            "images_per_s": images / seconds,
        }

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def on_gpu(self, work: Callable[[], object]) -> float:
        """Median seconds between an event before and one after the work on the device; after three warm-up runs."""
        if self.device.type == "cpu":
            return self.on_host(work)
        for _ in range(3):
            work()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for began, ended in pairs:
            began.record()
            work()
            ended.record()
        self._wait()
        return statistics.median(began.elapsed_time(ended) for began, ended in pairs) / 1e3

    def on_host(self, work: Callable[[], object]) -> float:
        """Median seconds that the work, which must wait for its results, takes; after three warm-up runs."""
        seconds = []
        for _ in range(3 + self.repeats):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[3:])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows of figures as a table."""
    names = list(rows[0])
    cells = [[f"{v:,.3g}" if isinstance(v, float) and v < 1000 else f"{v:,.0f}" if isinstance(v, float) else str(v)
              for v in row.values()] for row in rows]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    print(f"\n{title}")
    for line in (names, *cells):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure everything, and print each table when it is ready."""
    large = device.type == "cuda"
    bench = Bench(MODELS[arguments.model], arguments.dtype, device, 2048, arguments.repeats if large else 1)
    bandwidth = bench.copy_bandwidth(2**31 if large else 2**24)
    name = torch.cuda.get_device_name(device) if large else "CPU: a dry run"
    facts = {
        "device": name,
        "torch": torch.__version__,
        "model": arguments.model,
        "dtype": arguments.dtype,
        "copy_gb_per_s": bandwidth / 1e9,
        "weights_gb": sum(linear.weight.nbytes for linear in bench.linears) / 1e9,
    }
    show("device and model", [facts])
    results: dict[str, Any] = {"facts": facts}
    contexts, chunks = ((1024, 8192), ((512, 0), (2048, 0), (2048, 8192))) if large else ((20,), ((16, 0), (16, 30)))
    batches, images = ((1, 8, 32), ((1, 512), (1, 1024), (8, 512))) if large else ((1, 3), ((1, 64), (2, 64)))
    results["decode"] = [
        row for context in contexts for batch in batches for row in bench.decode(batch, context, bandwidth)
    ]
    show("decode: of_floor is 1 if only reading weights, keys and values takes time", results["decode"])
    results["prefill"] = [bench.prefill(*chunk) for chunk in chunks]
    show("prefill: of_products is 1 if only matrix products take time", results["prefill"])
    lengths = (512, 2048) if large else (16,)
    results["transfer"] = [bench.transfer(length, scattered=one) for length in lengths for one in (False, True)]
    show(
        "keys and values to host memory and back: …_of_copy is 1 for one pinned copy",
        results["transfer"],
    )
    results["tower"] = [bench.encode(*image) for image in images]
    show("vision tower", results["tower"])
    return results


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="2b")
    parser.add_argument("--dtype", choices=CUDA_FORMATS, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    try:
        device = find_device(arguments.device)
    except StartError as error:
        parser.error(str(error))
    if device.type == "cpu":
        arguments.dtype = "float32"  # the interpreter can't multiply bf16
    with torch.inference_mode():
        results = measure(arguments, device)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
