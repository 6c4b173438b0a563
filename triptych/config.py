"""Every setting, as frozen dataclasses by concern. A field's name is its flag's (``max_num_seqs`` ↔
``--max-num-seqs``), its environment variable's (``TRIPTYCH_MAX_NUM_SEQS``) and its name in a file; ``cli/flags.py``
maps all of them onto it."""

import functools
import ipaddress
import json
import os
import re
import ssl
import stat
from collections.abc import Collection, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from triptych.errors import ConfigError
from triptych.topology import Role

FABRICS = ("auto", "shm", "nixl", "mooncake")
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("none", "int8")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
MAX_MESSAGE_BYTES = 256 * 2**20
"""The largest message between processes; an item travels in one, beside less than 1 MiB about it."""
MAX_IMAGE_PIXELS = 50_000_000
"""More than decoders get memory for."""

_UNITS = {"kb": 10**3, "kib": 2**10, "mb": 10**6, "mib": 2**20, "gb": 10**9, "gib": 2**30, "tb": 10**12, "tib": 2**40}
_MEMORY = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?) ?(%|{'|'.join(_UNITS)})", re.ASCII | re.IGNORECASE)

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?", re.ASCII)
_RANKS = re.compile(r"[1-9]\d{0,3}", re.ASCII)
_LIMIT = re.compile(r"\d{1,6}", re.ASCII)
_CORES = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)

MIN_SECRET_BYTES = 16
"""What a cluster secret has at least; 16 random bytes can't be guessed."""
MAX_KEYS_BYTES = 2**20
MAX_SECRET_BYTES = 4096
"""A longer file is something else, given by mistake."""


def setting(default: Any, meaning: str, *, also: tuple[str, ...] = (), path: bool = False) -> Any:
    """A field with the text that ``--help`` shows for it. ``also`` are other names that it has: vLLM's, where it means
    the same. A ``path`` is made absolute when it is read, since child processes run in another folder."""
    return field(default=default, metadata={"help": meaning, "also": also, "path": path})


def names_of(item: Field[Any]) -> tuple[str, ...]:
    """All names of a setting, its own first."""
    return item.name, *item.metadata["also"]


@dataclass(frozen=True)
class EngineConfig:
    """How an instance computes."""

    device: str = setting(
        "auto",
        "device that an instance computes on: cpu, cuda, cuda:N, or auto: cuda where there is a GPU, otherwise cpu",
    )
    dtype: str = setting(
        "auto",
        "float16: weights in fp16, packed, but activations and sums in fp32 (on GPUs all in fp16); bfloat16, or "
        "float32 for exact comparison with a reference: weights and activations; auto: float16, whatever the "
        "checkpoint has (on GPUs: what it has)",
    )
    quantization: str = setting(
        "none", "int8, on CPUs: the decoder's weights in int8, activations rounded as they come; its head stays in fp16"
    )
    tensor_parallel_size: str = setting(
        "1",
        "processes on this machine that share the decoder of a language instance, its weights and its KV cache: a "
        "number for all, or one for each role, as in P=2,D=1",
    )
    threads: int = setting(0, "threads that one process computes with; 0 shares the cores out evenly")
    cpus: str = setting(
        "", "cores that the processes of this command run on, such as 0-3,8; all that it may use unless given"
    )
    max_num_seqs: int = setting(32, "sequences that one language instance works on at a time")
    max_num_batched_tokens: int = setting(512, "tokens in one step: decodes first, then prefill chunks")
    cuda_graphs: bool = setting(True, "on GPUs, run steps that only decode as CUDA graphs, recorded at the start")
    max_model_len: int = setting(0, "longest sequence in tokens; 0 takes what model and KV cache allow")
    page_size: int = setting(16, "tokens in a page of the KV cache", also=("block_size",))
    kv_cache_memory: str = setting(
        "25%",
        "memory for the KV cache: an amount for each language instance (8GiB, 500MB), or the share of the memory that "
        "is free once the weights are loaded (25%), divided among the instances of one command",
    )
    kv_cache_tokens: int = setting(
        0, "tokens that the KV cache of one language instance holds; 0 takes as many as --kv-cache-memory has room for"
    )
    kv_cache_dtype: str = setting(
        "auto",
        "float16, bfloat16 or float32: what keys and values are rounded to; auto: what weights are (float16 with "
        "--quantization int8; on GPUs what activations are, and nothing else)",
    )
    enable_prefix_caching: bool = setting(True, "reuse KV cache pages for the common prefixes of prompts")
    receive_block_rows: int = setting(64, "embedding rows in a block of the receive pool")
    receive_blocks: int = setting(64, "blocks in the receive pool of one language instance")
    kv_receive_blocks: int = setting(
        1024, "blocks in the receive pool of one decode instance, whose rows are a token's keys or values in a layer"
    )
    encode_batch_patches: int = setting(1024, "patches encoded together; an item that has more goes alone")
    decode_workers: int = setting(
        0, "processes in which one encode instance decodes media; 0 takes one for every four threads, at least one"
    )
    decode_memory_mb: int = setting(2048, "memory that decoding one media item may take, in MiB")
    decode_timeout: float = setting(30.0, "seconds that decoding one media item may take")
    encode_cache_mb: int = setting(256, "cache of one encode instance for embedding rows, in MiB")

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device {self.device} is not one of auto, cpu, cuda, cuda:N")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in DTYPES:
            raise ConfigError(f"--kv-cache-dtype {self.kv_cache_dtype} is not one of {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"--quantization {self.quantization} is not one of {', '.join(QUANTIZATIONS)}")
        if self.quantization != "none" and self.dtype != "auto":
            raise ConfigError(f"--quantization {self.quantization} and --dtype {self.dtype} exclude each other")
        parse_ranks(self.tensor_parallel_size)
        parse_cpus(self.cpus)
        parse_memory(self.kv_cache_memory, flag("kv_cache_memory"))
        may_be_zero = ("threads", "max_model_len", "kv_cache_tokens", "encode_cache_mb", "decode_workers")
        for name, value in vars(self).items():
            if type(value) is int and value < (0 if name in may_be_zero else 1):
                raise ConfigError(f"{flag(name)} {value} is too small")
        if self.decode_timeout <= 0:
            raise ConfigError(f"--decode-timeout {self.decode_timeout} is too small")
        if self.kv_cache_tokens and self.max_model_len > self.kv_cache_tokens:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} doesn't fit in --kv-cache-tokens {self.kv_cache_tokens}"
            )


@dataclass(frozen=True)
class TransferConfig:
    """How rows get from one instance to another."""

    fabric: str = setting(
        "auto",
        "transport of rows between processes: shm, nixl, mooncake, or auto: shm within a machine, otherwise what both "
        "ends have installed",
    )
    checksum: str = setting("auto", "check rows end to end: auto (over fabrics that cross hosts) or always")
    mooncake_protocol: str = setting("tcp", "what Mooncake sends over: tcp or rdma")
    mooncake_devices: str = setting("", "network devices for Mooncake's rdma, separated by commas")
    inject_faults: str = setting(
        "", "for tests: break that share of writes on purpose, as in drop=0.01,corrupt=0.05,delay=0.1"
    )

    def __post_init__(self) -> None:
        choices = {"fabric": FABRICS, "checksum": ("auto", "always"), "mooncake_protocol": ("tcp", "rdma")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not one of {', '.join(known)}")


@dataclass(frozen=True)
class FrontendConfig:
    """What the frontend accepts."""

    host: str = setting("127.0.0.1", "address that the HTTP server listens on")
    port: int = setting(8000, "port that the HTTP server listens on; 0 takes any free one")
    control_port: int = setting(0, "port at which instances join the frontend; 0 takes any free one")
    served_model_name: str = setting("", "the name that requests give as model; without it, the name of the folder")
    max_queue: int = setting(256, "requests waiting or running at a time; more are rejected with 503")
    max_queue_per_client: int = setting(
        0, "of these, requests of one client (an API key, or an address); more are rejected with 429; 0 for no limit"
    )
    max_body_mb: int = setting(64, "largest request body, in MiB")
    max_image_mb: int = setting(32, "largest image file, in MiB")
    limit_mm_per_prompt: str = setting(
        "image=64,video=4,audio=16",
        'media items in one request, by modality, as in image=16,video=2 or, in JSON, {"image": 16}; one that isn\'t '
        "named keeps its default",
    )
    max_video_mb: int = setting(64, "largest video file, in MiB")
    max_video_seconds: float = setting(3600.0, "length of the longest video, in seconds")
    max_video_gigapixels: float = setting(
        100.0, "pixels (10^9) of all of a video's frames, seen or not: what decoding it may take"
    )
    max_audio_mb: int = setting(64, "largest audio file, in MiB")
    max_audio_seconds: float = setting(3600.0, "length of the longest audio clip, in seconds")
    max_audio_gigasamples: float = setting(
        1.0, "samples (10^9) of all of an audio clip's channels: what decoding it may take"
    )
    mm_uuid_cache_mb: int = setting(256, "cache for media that clients gave a uuid, in MiB")
    max_image_pixels: int = setting(MAX_IMAGE_PIXELS, "pixels of one image, as stored")
    max_request_pixels: int = setting(500_000_000, "pixels of all images of one request together")
    max_item_tokens: int = setting(16_384, "tokens that one image, video or audio clip may become")
    max_media_mb: int = setting(256, "media files of one request together, in MiB")
    max_inflight_mb: int = setting(
        2048,
        "bodies and media files of all requests at a time, in MiB; what exceeds it is rejected with 503. One client "
        "may use half of it, and is rejected with 429 beyond",
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (), "hosts that media may be fetched from, as HOST or HOST:PORT; none unless given"
    )
    allowed_media_networks: tuple[str, ...] = setting(
        (), "address ranges off the public internet that those hosts may be in, such as 10.1.0.0/16"
    )
    allowed_local_media_path: str = setting("", "folder whose files file: URLs may name; none unless given", path=True)
    media_fetch_timeout: float = setting(10.0, "seconds that fetching one media file may take")
    api_key: tuple[str, ...] = setting(
        (),
        "API keys of which requests must have one, separated by commas; other users of this machine can read flags, so "
        "prefer a file",
    )
    api_key_file: str = setting("", "file with API keys, one a line, that its owner alone may read", path=True)
    ssl_certfile: str = setting("", "file with the certificate and its chain, for HTTPS", path=True)
    ssl_keyfile: str = setting(
        "", "file with the private key of the certificate, that its owner alone may read", path=True
    )
    allowed_origins: tuple[str, ...] = setting((), "origins whose pages may send requests (CORS); none unless given")
    allowed_methods: tuple[str, ...] = setting(("GET", "POST"), "methods that such pages may use")
    allowed_headers: tuple[str, ...] = setting(("*",), "headers that such pages may send")
    allow_credentials: bool = setting(False, "let such pages send cookies")
    request_timeout: float = setting(600.0, "seconds after which a request that isn't finished fails")
    client_timeout: float = setting(
        60.0, "seconds after which the stream of a client that reads nothing of it is closed"
    )

    def __post_init__(self) -> None:
        for name in ("port", "control_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is not a port number")
        positive = (
            "max_queue",
            "max_body_mb",
            "max_image_mb",
            "max_video_mb",
            "max_video_seconds",
            "max_video_gigapixels",
            "max_audio_mb",
            "max_audio_seconds",
            "max_audio_gigasamples",
            "max_media_mb",
            "max_inflight_mb",
            "max_image_pixels",
            "max_request_pixels",
        )
        for name in (*positive, "max_item_tokens", "request_timeout", "client_timeout", "media_fetch_timeout"):
            if not getattr(self, name) > 0:  # nor is nan
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is too small")
        if self.max_image_pixels > MAX_IMAGE_PIXELS:
            raise ConfigError(f"--max-image-pixels {self.max_image_pixels} is more than {MAX_IMAGE_PIXELS}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials and --allowed-origins * exclude each other")
        for name in ("mm_uuid_cache_mb", "max_queue_per_client"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is too small")
        if self.max_queue_per_client > self.max_queue:
            raise ConfigError(
                f"--max-queue-per-client {self.max_queue_per_client} exceeds --max-queue {self.max_queue}"
            )
        self._check_held()
        self._check_media()

    @functools.cached_property
    def media_limits(self) -> dict[str, int]:
        """How many items of each modality a request may have."""
        default = type(self).limit_mm_per_prompt
        return parse_media_limits(default) | parse_media_limits(self.limit_mm_per_prompt)

    def _check_held(self) -> None:
        """Whether one client may hold what one request may have: its body, and the media that come in it or, where they
        may be fetched, from elsewhere."""
        fetches = self.allowed_media_domains or self.allowed_local_media_path
        media = self.max_media_mb if fetches else min(self.max_media_mb, self.max_body_mb)
        if self.max_inflight_mb < 2 * (self.max_body_mb + media):
            raise ConfigError(
                f"--max-inflight-mb {self.max_inflight_mb} is too small: one client may use half of it, one request "
                f"may take {self.max_body_mb + media} MiB (--max-body-mb {self.max_body_mb}, and {media} MiB of media)"
            )

    def _check_media(self) -> None:
        for modality in parse_media_limits(self.limit_mm_per_prompt):
            if modality not in (known := parse_media_limits(type(self).limit_mm_per_prompt)):
                raise ConfigError(
                    f"--limit-mm-per-prompt {self.limit_mm_per_prompt}: {modality!r} is not one of {', '.join(known)}"
                )
        for network in self.allowed_media_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError:
                raise ConfigError(f"--allowed-media-networks {network!r} is not a range such as 10.1.0.0/16") from None
        for name in ("max_image_mb", "max_video_mb", "max_audio_mb"):
            if (getattr(self, name) + 1) * 2**20 > MAX_MESSAGE_BYTES:
                raise ConfigError(
                    f"{flag(name)} {getattr(self, name)} is too large: a message between processes carries files of at "
                    f"most {MAX_MESSAGE_BYTES // 2**20 - 1} MiB"
                )

    def api_keys(self) -> list[str]:
        """All keys, those of the file included; none: requests need no key. Raises ConfigError for a file without one,
        or that can't be used."""
        keys = list(self.api_key)
        if self.api_key_file:
            name = f"--api-key-file {self.api_key_file}"
            text = _read_private(self.api_key_file, name, MAX_KEYS_BYTES)
            if len(text) > MAX_KEYS_BYTES:
                raise ConfigError(f"{name} has more than {MAX_KEYS_BYTES} bytes")
            found = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
            if not found:
                raise ConfigError(f"{name} has no key")
            keys += found
        return keys

    def check_ssl(self) -> None:
        """Raises ConfigError when the certificate and its key can't be used."""
        if not self.ssl_certfile:
            return
        _read_private(self.ssl_keyfile, f"--ssl-keyfile {self.ssl_keyfile}", 0)
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=""
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or "not PEM"
            raise ConfigError(
                f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile}: {reason}"
            ) from None


@dataclass(frozen=True)
class LeaseConfig:
    """How instances stay registered, start and end. The expiry is four heartbeats, because a loop that is late isn't a
    dead process; how late it can be: docs/transfer.md."""

    heartbeat: float = setting(0.5, "seconds between two heartbeats of an instance")
    lease_expiry: float = setting(2.0, "seconds of silence after which an instance counts as gone")
    start_timeout: float = setting(600.0, "seconds that loading a model may take")
    drain_timeout: float = setting(
        30.0, "seconds that running requests may take to finish after SIGTERM", also=("shutdown_timeout",)
    )

    def __post_init__(self) -> None:
        for name in ("start_timeout", "drain_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is too small")
        if not 0 < self.heartbeat < self.lease_expiry:
            raise ConfigError(f"--heartbeat {self.heartbeat} must be shorter than --lease-expiry {self.lease_expiry}")


@dataclass(frozen=True)
class ClusterConfig:
    """Where this process meets the others of its service, and whom it lets in. The secret itself is never a setting:
    other users of a machine can read command lines."""

    cluster_host: str = setting(
        "127.0.0.1",
        "address that the control socket of this process listens on, and at which the other processes reach it",
    )
    cluster_secret_file: str = setting(
        "",
        f"file with the secret that all processes of the service share, at least {MIN_SECRET_BYTES} bytes; needed for "
        "a --cluster-host that isn't loopback",
        path=True,
    )

    def __post_init__(self) -> None:
        if is_unspecified(self.cluster_host):
            raise ConfigError(
                f"--cluster-host {self.cluster_host} stands for all addresses of this machine; give the one that the "
                "other processes reach this process at"
            )
        if not is_loopback(self.cluster_host) and not self.cluster_secret_file:
            raise ConfigError(
                f"--cluster-host {self.cluster_host} can be reached from other machines; that needs a secret, given "
                "with --cluster-secret-file"
            )

    def secret(self) -> bytes | None:
        """The file's content without the white space around it; None when no file is given. Raises ConfigError when it
        can't be read, others can read it too, or it is too short."""
        if not self.cluster_secret_file:
            return None
        name = f"--cluster-secret-file {self.cluster_secret_file}"
        secret = _read_private(self.cluster_secret_file, name, MAX_SECRET_BYTES).strip()
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ConfigError(f"{name} must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes")
        return secret


@dataclass(frozen=True)
class ObserveConfig:
    """What processes tell of themselves."""

    log_level: str = setting(
        "info",
        "least severe messages that are logged: debug (with each state of each transfer), info, warning or error",
    )
    log_format: str = setting("text", "how it is logged: text, or json, one object a line")
    enable_log_requests: bool = setting(
        False, "write a line of JSON for each request: how it ended and where its time went, no prompts and no answers"
    )
    request_log_file: str = setting(
        "", "file that these lines are appended to; standard output unless given", path=True
    )
    otlp_traces_endpoint: str = setting(
        "", "URL of an OpenTelemetry collector that the trace of each request is sent to (http://host:4318/v1/traces)"
    )

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"--log-level {self.log_level} is not one of {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"--log-format {self.log_format} is not one of {', '.join(LOG_FORMATS)}")
        if self.request_log_file and not self.enable_log_requests:
            raise ConfigError(f"--request-log-file {self.request_log_file} needs --enable-log-requests")
        endpoint = self.otlp_traces_endpoint
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-traces-endpoint {endpoint} is not a URL that begins with http:// or https://")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """All of one service's settings. ``model`` is a checkpoint folder."""

    model: Path
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    @property
    def shared(self) -> tuple[Any, ...]:
        """What holds for all processes of the service, whatever each computes."""
        return self.transfer, self.cluster, self.lease, self.observe


def _read_private(path: str, name: str, max_bytes: int) -> bytes:
    """A file's first bytes, one more than ``max_bytes`` if it has them. Raises ConfigError, calling it ``name``, when
    it can't be read, or others can read it too."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{name} can't be read: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"{name} has mode {mode:04o}: others can use it; make it readable by its owner alone")
    return content


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach ``host``. A name may mean any address, unless it is localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether ``host`` stands for all addresses of a machine: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def as_flags(*configs: Any) -> list[str]:
    """The settings as command-line arguments, for a process that shall run with the same ones."""
    arguments = []
    for config in configs:
        for item in fields(config):
            value = getattr(config, item.name)
            if isinstance(value, bool):
                arguments += [flag(item.name if value else f"no_{item.name}")]
                continue
            arguments += [flag(item.name), ",".join(value) if isinstance(value, tuple) else str(value)]
    return arguments


def processes_of(engine: EngineConfig, role: Role) -> int:
    """How many processes one instance is: its ranks, if it has a decoder."""
    return parse_ranks(engine.tensor_parallel_size).get(role, 1)


def parse_ranks(text: str) -> dict[Role, int]:
    """What ``--tensor-parallel-size`` says of the roles that have a decoder: of all, as in 2, or of some, as in
    P=2,D=1. Raises ConfigError for anything else."""
    if _RANKS.fullmatch(text):
        return {role: int(text) for role in Role if role.has_decoder}
    sizes: dict[Role, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        role = next((role for role in Role if role.has_decoder and role.value == name.upper()), None)
        if role is None or role in sizes or not _RANKS.fullmatch(size):
            raise ConfigError(
                f"--tensor-parallel-size {text!r} is neither a number of processes nor one for each role that has a "
                "decoder, as in P=2,D=1"
            )
        sizes[role] = int(size)
    return sizes


def parse_media_limits(text: str) -> dict[str, int]:
    """What ``--limit-mm-per-prompt`` says, in either of vLLM's spellings: image=16,video=2 or a JSON object, in which a
    limit may be an object with nothing but a count. Raises ConfigError for anything else."""
    try:
        if text.lstrip().startswith("{"):
            given = json.loads(text, object_pairs_hook=_without_twins)
        else:
            given = _without_twins([part.partition("=")[::2] for part in text.replace(" ", "").split(",")])
        return {modality: _count(limit) for modality, limit in given.items()}
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--limit-mm-per-prompt {text} doesn't say how many of each modality, as image=16,video=2 does, or "
            '{"image": 16, "video": 2}'
        ) from None


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("one is there twice")
    return found


def _count(limit: Any) -> int:
    if isinstance(limit, dict) and limit.keys() == {"count"}:
        limit = limit["count"]
    if isinstance(limit, bool | dict | list) or not _LIMIT.fullmatch(str(limit)):
        raise ValueError("not a number of items")
    return int(limit)


def check_ranks(engine: EngineConfig, roles: Collection[Role]) -> None:
    """Raises ConfigError when ``--tensor-parallel-size`` names a role that is none of these."""
    for role in parse_ranks(engine.tensor_parallel_size):
        if "=" in engine.tensor_parallel_size and role not in roles:
            raise ConfigError(
                f"--tensor-parallel-size {engine.tensor_parallel_size} names {role}, but the topology has "
                f"{', '.join(sorted(set(roles)))}"
            )


def threads_per_process(engine: EngineConfig, num_processes: int) -> int:
    """``--threads``, or an even share of the cores this process may use; never none."""
    return engine.threads or max(1, len(os.sched_getaffinity(0)) // num_processes)


def parse_cpus(text: str) -> frozenset[int]:
    """The cores that ``--cpus`` names, in the notation of taskset(1) and the kernel: ``0-3,8``; none for the empty
    text. Raises ConfigError for anything else."""
    cores: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        if (match := _CORES.fullmatch(part.strip())) is None or int(match[1]) > int(match[2] or match[1]):
            raise ConfigError(f"--cpus {text!r} doesn't name cores, as 0-3,8 does")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cores)


def kv_cache_memory_per_instance(engine: EngineConfig, num_decoders: int) -> str:
    """``--kv-cache-memory`` for one of ``num_decoders`` instances on this machine; a share is divided evenly."""
    memory = parse_memory(engine.kv_cache_memory, flag("kv_cache_memory"))
    return f"{100 * memory / num_decoders:.4g}%" if isinstance(memory, float) else engine.kv_cache_memory


def parse_memory(text: str, source: str) -> int | float:
    """An amount in bytes, such as 8GiB or 500MB, as an int; a share of what there is, such as 25%, as a float between 0
    and 1. Raises ConfigError, naming the ``source``, for anything else."""
    if (match := _MEMORY.fullmatch(text.strip())) is None:
        raise ConfigError(f"{source} {text!r} is neither an amount such as 8GiB or 500MB nor a share such as 25%")
    number, unit = float(match[1]), match[2].lower()
    amount = number / 100 if unit == "%" else int(number * _UNITS[unit])
    if not amount or (unit == "%" and amount > 1):
        raise ConfigError(f"{source} {text} is not between nothing and everything")
    return amount
