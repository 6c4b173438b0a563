"""What a service was started with, in a few lines: what was chosen, and by which flags it changes."""

from collections.abc import Iterator

from triptych.checkpoint.config_files import load_config
from triptych.checkpoint.safetensors_header import weight_files
from triptych.config import ServeConfig
from triptych.control_groups import usable_cores
from triptych.models.registry import family_of, model_type_of
from triptych.topology import Topology


def choices(config: ServeConfig, topology: Topology) -> Iterator[str]:
    """Yield five lines: model, processes, weights, memory and limits, access."""
    engine, frontend = config.engine, config.frontend
    checkpoint = load_config(config.model)
    weights = sum(file.stat().st_size for file in weight_files(config.model))
    takes = ", ".join(family_of(checkpoint).modalities)
    name = frontend.http.served_model_name
    yield f"model: {name}, {model_type_of(checkpoint)}, takes {takes}, {size(weights)} of weights"
    specs = config.instances(topology, "")
    threads = sorted({spec.engine.threads for spec in specs})
    processes = sum(engine.tensor_parallel_size.of(spec.role) for spec in specs)
    yield (
        f"processes: {topology} is {processes}, with {' or '.join(map(str, threads))} threads each on {usable_cores()} "
        "cores (--topology, --tensor-parallel-size, --threads)"
    )
    yield (
        f"compute: device {engine.device}, dtype {engine.dtype}, quantization {engine.quantization}, of towers "
        f"{engine.encoder_quantization} (--device, --dtype, --quantization, --encoder-quantization)"
    )
    cache = f"{engine.kv_cache_tokens} tokens" if engine.kv_cache_tokens else f"{engine.kv_cache_memory}"
    of = " of free memory" if engine.kv_cache_memory.share and not engine.kv_cache_tokens else ""
    yield (
        f"load: {engine.max_num_seqs} requests and {engine.max_num_batched_tokens} tokens a step in each language "
        f"instance, KV caches of {cache}{of}, {frontend.admission.max_queue} requests in flight (--max-num-seqs, "
        "--max-num-batched-tokens, --kv-cache-memory, --max-queue)"
    )
    keys = len(frontend.auth.api_keys())
    hosts = ", ".join(frontend.fetch.allowed_media_domains) or "nowhere"
    yield (
        f"access: {f'{keys} API keys' if keys else 'without an API key'}, media in requests or from {hosts} "
        "(--api-key-file, --allowed-media-domains)"
    )


def size(num_bytes: int) -> str:
    """Return an amount of memory in a unit that leaves few digits."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= one:
            return f"{num_bytes / one:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
