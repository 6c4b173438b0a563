"""``triptych doctor``: checks, without loading it, whether this machine can serve a model with these settings."""

import argparse
import importlib.util
import os
import resource
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triptych.checkpoint.config_files import load_config, quantization_section
from triptych.checkpoint.safetensors_header import INDEX_FILE, SINGLE_FILE, TensorInfo, has_weights, read_folder
from triptych.cli import flags
from triptych.cli.choices import size
from triptych.cli.fitting import smaller
from triptych.clock import SystemClock
from triptych.config import AuthConfig, MediaFetchConfig, ObserveConfig, ServeConfig, TlsConfig, is_loopback
from triptych.control_groups import OWN_GROUPS
from triptych.errors import ConfigError, StartError, TriptychError
from triptych.layers.cache_spec import CacheGroups, ChunkWindow, bytes_per_token
from triptych.layers.decoder_config import DecoderConfig
from triptych.layers.state_spec import state_bytes
from triptych.layers.stored.lists import disagreements
from triptych.layers.stored.registry import StoredFormats, described_formats, read_formats
from triptych.listening import refusal
from triptych.messages.identity import ModelIdentity
from triptych.models.registry import family_of, identity_of, model_type_of, resolve
from triptych.observe.machine import available_bytes, check_cores
from triptych.prompt.hosts import AllowedHosts
from triptych.prompt.local_files import MediaFolder
from triptych.prompt.prompt import PromptBuilder
from triptych.server.worker_extra import check_installed
from triptych.topology import Role

if TYPE_CHECKING:  # these import torch
    from triptych.checkpoint.outline import Outline, StoredOutline
    from triptych.layers.encoder import ModelAdapter
    from triptych.layers.linear import WeightFormat

SHOWN_DIGITS = 12
SHOWN_TENSORS = 3
FEW_FILES = 4096
"""Limit on open files below which ``doctor`` warns: too low for thousands of clients."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    what: str
    """What was checked."""
    found: str
    wrong: str = ""
    """What keeps the service from starting, or empty."""
    is_absent: bool = False
    """Whether it is missing, and isn't needed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL [OPTIONS]"
    flags.add_model(parser)
    flags.add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    check_installed("doctor")
    config = flags.serve_config(arguments, needs_weights=False)
    checkpoint_config = load_config(config.model)
    family = family_of(checkpoint_config)
    adapter = resolve(family.adapter)(checkpoint_config)
    section = quantization_section(checkpoint_config)
    if stored := has_weights(config.model):
        tensors = read_folder(config.model)
        quantized = read_formats(section, tensors)
        stages, model = adapter.weight_bytes_by_stage(tensors), _identity(identity_of(config.model))
    else:
        quantized = described_formats(section)
        tensors, stages = _outline(config.model, adapter, has_towers=family.takes_media)
        model = "no weights are there; sizes follow from config.json, for weights that aren't quantized"
    console = Console()
    model_type = model_type_of(checkpoint_config)
    console.print(f"{arguments.model}: {model_type}, rows of {adapter.embedding_width} values", markup=False)
    console.print(model, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(stages, [role for role in Role if family.takes_media or not role.encodes]))
    in_memory, loaded = _quantized(config, adapter, section, quantized)
    checks = [
        _tried("tensors", lambda: _tensors(config.model, adapter, has_towers=family.takes_media))
        if stored
        else _no_weights(arguments.model, config.model),
        _tried("tensor parallelism", lambda: _ranks(config, adapter.decoder_config)),
        _tried("formats", lambda: _formats(config, tensors, quantized, has_towers=family.takes_media)),
        _tried("KV cache", lambda: _kv_cache(config, adapter.decoder_config, tensors)),
        *in_memory,
        *_checks(config, stages, checkpoint_config, loaded),
    ]
    shown = Table("", "what", "found")
    for check in checks:
        state = "[red]wrong[/]" if check.wrong else "[dim]no[/]" if check.is_absent else "[green]ok[/]"
        shown.add_row(state, check.what, escape(check.wrong or check.found))
    console.print(shown)
    wrong = [check.what for check in checks if check.wrong]
    if wrong:
        verdict = f"This machine can't serve it so: see {', '.join(wrong)} above."
    else:
        verdict = f"This machine can serve it: {shlex.join(['triptych', 'serve', *_without_keys(arguments.words)])}"
    console.print(verdict, style="bold", markup=False, highlight=False, soft_wrap=True)
    return 1 if wrong else 0


def _without_keys(words: list[str]) -> Iterator[str]:
    """Yield the words of a command line, with … for API keys: what a user sees of this is shown to others."""
    for before, word in zip(["", *words], words, strict=False):
        yield "--api-key=…" if word.startswith("--api-key=") else "…" if before == "--api-key" else word


def _no_weights(given: str, folder: Path) -> Check:
    if Path(given).is_dir():
        return Check("weights", "", f"neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    return Check("weights", f"not downloaded yet: {given} is on the Hugging Face Hub")


def _outline(
    folder: Path, adapter: "ModelAdapter", *, has_towers: bool
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Return the tensors that the stages would load from a folder that has a config alone, and their bytes."""
    from triptych.checkpoint.outline import Outline

    outlines = {}
    for stage in ("encoder", "decoder") if has_towers else ("decoder",):
        outlines[stage] = outline = Outline(folder)
        _load(adapter, stage, outline)
    tensors = {f"{stage} {key}": info for stage, one in outlines.items() for key, info in one.tensors.items()}
    num_bytes = {stage: sum(info.num_bytes for info in one.tensors.values()) for stage, one in outlines.items()}
    return tensors, {"encoder": 0} | num_bytes


def _load(
    adapter: "ModelAdapter", stage: str, outline: "Outline | StoredOutline", weights: "WeightFormat | None" = None
) -> None:
    import torch  # here, because the frontend's process imports this module, too

    from triptych.checkpoint.outline import META
    from triptych.layers.linear import PlainFormat

    load = adapter.load_encoder if stage == "encoder" else adapter.load_decoder
    load(outline, weights or PlainFormat(torch.float32), META)


def _loaded_bytes(config: ServeConfig, adapter: "ModelAdapter", quantized: StoredFormats | None) -> int:
    """Return what a quantized decoder's linear layers and LM head take in memory. Raises as ``_tensors`` does."""
    from triptych.checkpoint.outline import StoredOutline
    from triptych.layers.devices import find_device, weight_format
    from triptych.layers.stored.memory import MeasuringFormat

    outline = StoredOutline(config.model)
    measuring = MeasuringFormat(
        weight_format(config.engine, find_device(config.engine.device), outline.tensors, quantized)
    )
    _load(adapter, "decoder", outline, measuring)
    return round(measuring.num_bytes)


def _quantized(
    config: ServeConfig, adapter: "ModelAdapter", section: object, quantized: StoredFormats | None
) -> tuple[list[Check], int]:
    """Return how quantized weights are stored, kept and listed, and what the decoder's take in memory. Nothing is
    returned of weights that other checks find wrong."""
    if not has_weights(config.model):
        return [], 0
    if quantized is None:
        return _blocks(config, adapter)
    try:
        loaded = _loaded_bytes(config, adapter, quantized)
    except (TriptychError, OSError):
        return [], 0
    kept = " and ".join(quantized.kept_as)
    how = f"on CPUs kept in {kept} where kernels take them, else dequantized" if kept else "dequantized at load"
    found = f"{quantized.described}: {how}; the decoder's linear layers and LM head take {size(loaded)} in memory"
    other = disagreements(section, read_folder(config.model), quantized.markers)
    return [Check("quantized weights", f"{found}; {other}" if other else found)], loaded


def _blocks(config: ServeConfig, adapter: "ModelAdapter") -> tuple[list[Check], int]:
    """Return which types of a GGUF file's values stay as they are, and what the decoder's weights take in memory."""
    tensors = {key: info for key, info in read_folder(config.model).items() if info.entry is not None}
    if not tensors:
        return [], 0
    from triptych.layers.devices import block_types, find_device, weight_format

    try:
        loaded = _loaded_bytes(config, adapter, None)
        weights = weight_format(config.engine, find_device(config.engine.device), tensors)
    except (TriptychError, OSError):
        return [], 0
    kept = block_types(tensors) if weights.keeps_blocks else []
    others = sorted({info.dtype for info in tensors.values() if len(info.shape) > 1} - set(kept))
    stay = f"{' and '.join(kept)}, where linear layers have it, stays as it is; " if kept else ""
    rest = " and ".join([*others, *(["embeddings"] if kept else [])])
    found = f"{stay}{rest} are dequantized; the decoder's linear layers and LM head take {size(loaded)} in memory"
    return [Check("values of GGUF", found)], loaded


def _tensors(folder: Path, adapter: "ModelAdapter", *, has_towers: bool) -> str:
    """Return how many tensors the model reads, and some that it doesn't, such as buffers that it computes itself.

    Raises CheckpointError for a missing or misshapen tensor, and for one that the model has no place for.
    """
    from triptych.checkpoint.outline import StoredOutline

    outline = StoredOutline(folder)
    for stage in ("encoder", "decoder") if has_towers else ("decoder",):
        _load(adapter, stage, outline)
    count, unread = len(outline.tensors), sorted(outline.tensors.keys() - outline.names_read)
    if not unread:
        return f"all {count:,} are read"
    named = ", ".join(unread[:SHOWN_TENSORS]) + (", …" if len(unread) > SHOWN_TENSORS else "")
    return f"{count - len(unread):,} of {count:,} are read; the model doesn't need {named}"


def _checks(config: ServeConfig, stages: dict[str, int], checkpoint: Mapping[str, Any], loaded: int) -> Iterator[Check]:
    yield _tried("cores", lambda: _cores(config))
    yield _memory(stages, checkpoint, loaded)
    yield _tried("device", lambda: _device(config))
    if config.engine.device in {"auto", "cpu"}:
        yield _tried("kernels for CPUs", _kernels)
    yield _tried("tokenizer, chat template", lambda: _prompts(config))
    for name in ("shm", "nixl", "mooncake") if config.transfer.fabric == "auto" else (config.transfer.fabric,):
        yield _fabric(config, name)
    yield _tried("cluster secret", lambda: _secret(config))
    yield _tried("API keys", lambda: _keys(config.frontend.auth))
    yield _tried("TLS", lambda: _tls(config.frontend.tls))
    yield _tried("where media may come from", lambda: _media(config.frontend.fetch))
    yield _tried("request log", lambda: _request_log(config.observe))
    for what, host, port in (
        ("--port", config.frontend.http.host, config.frontend.http.port),
        ("--control-port", config.cluster.cluster_host, config.frontend.http.control_port),
    ):
        yield _tried(what, lambda host=host, port=port: _port(host, port))  # type: ignore[misc]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Check("open files", f"{soft}" + ("" if soft >= FEW_FILES else f"; raise it (ulimit -n {FEW_FILES})"))
    if config.observe.otlp_traces_endpoint:
        missing = not importlib.util.find_spec("opentelemetry.exporter")
        yield Check("traces", "installed", "pip install '.[otel]' in a checkout" if missing else "")


def _tried(what: str, look: Callable[[], str]) -> Check:
    try:
        return Check(what, look())
    except (TriptychError, OSError) as error:
        return Check(what, "", str(error) or type(error).__name__)


def _memory(stages: dict[str, int], checkpoint: Mapping[str, Any], loaded: int) -> Check:
    """Compare free memory with the weights as stored: in a process they may take half as much, or twice. ``loaded`` is
    what quantized ones take, or 0."""
    needed, there = stages["encoder"] + max(stages["decoder"], loaded), available_bytes()
    found = f"{size(there)} available, the weights have {size(needed)}"
    return Check("memory", found, f"{found}: too little{smaller(checkpoint, needed, there)}" if needed > there else "")


def _device(config: ServeConfig) -> str:
    import torch  # here, because the frontend's process imports this module, too

    from triptych.layers.devices import find_device, free_bytes

    device = find_device(config.engine.device)
    memory = f"{free_bytes(device) / 2**30:.1f} GiB free"
    return f"{device}, {memory}, PyTorch {torch.__version__}"


def _formats(
    config: ServeConfig, tensors: Mapping[str, TensorInfo], quantized: StoredFormats | None, *, has_towers: bool
) -> str:
    from triptych.layers.devices import find_device, tower_format, weight_format

    device = find_device(config.engine.device)
    decoder = weight_format(config.engine, device, tensors, quantized)
    shown = f"decoder {decoder.linear_dtype}, LM head {decoder.high_precision_dtype}"
    if has_towers:
        shown = f"towers {tower_format(config.engine, device, tensors).linear_dtype}, {shown}"
    return shown if quantized is None else f"{shown}; stored as {quantized.described}"


def _kernels() -> str:
    """Load the kernels, or compile them, as an instance would at its start."""
    import torch  # noqa: F401 (the kernels use its threads)

    from triptych.layers import native

    return native.kernels().description


def _identity(model: ModelIdentity) -> str:
    parts = ("weights", "config", "tokenizer")
    shown = ", ".join(f"{part} {getattr(model, part)[:SHOWN_DIGITS]}" for part in parts)
    return f"model {model.digest}: {shown}, adapter {model.adapter}"


def _prompts(config: ServeConfig) -> str:
    named = config.frontend.http
    builder = PromptBuilder(
        config.model, reasoning_parser=named.reasoning_parser, tool_call_parser=named.tool_call_parser
    )
    asked = config.engine.max_model_len
    if asked > builder.context_length:
        raise ConfigError(f"--max-model-len {asked} exceeds the {builder.context_length} tokens of the model")
    shortest = "there is no chat template: only /v1/completions is served"
    if builder.template.names:
        prompt = builder.build([{"role": "user", "content": "?"}])
        shortest = f"the shortest prompt has {len(prompt.tokens)} tokens"
    formats = builder.formats
    parsers = f"reasoning {formats.reasoning_parser or 'none'}, tool calls {formats.tool_call_parser or 'unknown'}"
    fit = asked or builder.context_length
    return f"{shortest}; at most {fit:,} fit; {parsers}"


def _cores(config: ServeConfig) -> str:
    named, allowed = config.engine.cpus.cores, os.sched_getaffinity(0)
    check_cores(named)
    cores, quota = len(named or allowed), OWN_GROUPS.cpu_quota()
    return str(cores) if quota is None or quota >= cores else f"{cores}, with a CPU quota of {quota:g}"


def _ranks(config: ServeConfig, decoder: DecoderConfig) -> str:
    sizes = config.engine.tensor_parallel_size
    for role in Role:
        decoder.shard(sizes.of(role))
    return f"{sizes.largest} process{'' if sizes.largest == 1 else 'es at most'} for each language instance"


def _kv_cache(config: ServeConfig, decoder: DecoderConfig, tensors: Mapping[str, TensorInfo]) -> str:
    """Return its format and a token's bytes in it. Raises ConfigError for a dtype that the device doesn't support."""
    from triptych.engine.kv_size import num_slots
    from triptych.layers.attention.kv_format import cache_format
    from triptych.layers.devices import dtype_name, find_device, kv_dtype, weight_format

    device = find_device(config.engine.device)
    weights = weight_format(config.engine, device, tensors)
    dtype = kv_dtype(config.engine, device, weights)
    specs = decoder.cache_specs(cache_format(dtype))
    shown = f"{dtype_name(dtype)}, {bytes_per_token(specs) / 2**10:.1f} KiB per token"
    for window in filter(None, CacheGroups.of(spec.window for spec in specs).windows):
        num_bytes = bytes_per_token(spec for spec in specs if spec.window == window)
        kept = f"a chunk of {window.length:,}" if isinstance(window, ChunkWindow) else f"the last {window:,}"
        shown += f", {num_bytes / 2**10:.1f} KiB of them only for {kept}"
    if decoder.has_state:
        num_bytes = state_bytes(decoder.state_specs(cache_format(weights.activations)))
        count = num_slots(config.engine)
        shown += f"; {num_bytes / 2**20:.2f} MiB of state per request, for {count} requests and snapshots"
    return shown


def _keys(config: AuthConfig) -> str:
    return f"{len(keys)} are accepted" if (keys := config.api_keys()) else "none: requests need no key"


def _tls(config: TlsConfig) -> str:
    config.check_files()
    return "the certificate and its key can be used" if config.ssl_certfile else "off: plain HTTP"


def _media(config: MediaFetchConfig) -> str:
    AllowedHosts(config.allowed_media_domains)
    if config.allowed_local_media_path:
        MediaFolder(config.allowed_local_media_path)
    where = [*config.allowed_media_domains, *filter(None, [config.allowed_local_media_path])]
    return ", ".join(["requests themselves", *where])


def _request_log(config: ObserveConfig) -> str:
    """Check the file without creating it."""
    path = Path(config.request_log_file)
    if not config.enable_log_requests or not config.request_log_file:
        return "on standard output" if config.enable_log_requests else "off"
    folder, target = path.parent, path if path.exists() else path.parent
    for wrong, reason in (
        (path.is_dir(), "it is a folder"),
        (not folder.is_dir(), f"there is no folder {folder}"),
        (not os.access(target, os.W_OK), f"{target} may not be written to"),
    ):
        if wrong:
            raise ConfigError(f"--request-log-file {path}: {reason}")
    return f"can be written to {path}"


def _fabric(config: ServeConfig, name: str) -> Check:
    """Open and close a fabric as an instance would. One that only ``auto`` would use may be missing."""
    from triptych.transfer.fabrics.opening import open_fabrics

    try:
        transfer, host = replace(config.transfer, fabric=name), config.cluster.cluster_host
        for fabric in reversed(open_fabrics(transfer, host, SystemClock())):
            fabric.close()
    except StartError as error:
        wanted = config.transfer.fabric != "auto"
        return Check(f"fabric {name}", "not installed", str(error) if wanted else "", is_absent=not wanted)
    return Check(f"fabric {name}", "works")


def _secret(config: ServeConfig) -> str:
    if config.cluster.secret() is not None:
        return "can be read, by its owner alone"
    return "none: only processes of this machine can join" if is_loopback(config.cluster.cluster_host) else ""


def _port(host: str, port: int) -> str:
    """Try to listen on a port. Raises StartError, or OSError for a host without an address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError as error:
            raise StartError(refusal(host, port, error)) from None
        return f"{host}:{port} is free" if port else f"any free one on {host}"


def _table(stages: dict[str, int], roles: list[Role]) -> Table:
    table = Table("role", "towers", "decoder", "bytes", title="bytes each role loads from the checkpoint")
    for column in table.columns[1:]:
        column.justify = "right"
    for role in roles:
        encoder = stages["encoder"] if role.encodes else 0
        decoder = stages["decoder"] if role.has_decoder else 0
        table.add_row(role.value, f"{encoder:,}", f"{decoder:,}", f"{encoder + decoder:,}")
    return table
