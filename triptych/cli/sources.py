"""Where values come from besides flags: ``TRIPTYCH_*`` variables and a file in TOML. And what is said of names that
nobody knows."""

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from triptych.errors import ConfigError

PREFIX = "TRIPTYCH_"

Values = Mapping[str, Any]
"""Settings' names, with underscores, and what was given for them."""

# Kubernetes tells pods of each service in their namespace; of services that are called triptych or triptych-something
# by variables that begin like ours.
_FROM_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)
_ADDRESSES = ("tcp://", "udp://", "sctp://")

ELSEWHERE = {
    "trust_remote_code": "no code of a checkpoint is ever run",
    "gpu_memory_utilization": "give the KV cache's part with --kv-cache-memory, such as 25% or 8GiB",
    "mm_encoder_only": "use --role E",
    "encoder_only": "use --role E",
    "language_only": "use --role PD",
    "encoder_urls": "encoders join the frontend: --role E --join HOST:PORT",
    "disaggregation_mode": "use --role P or --role D, or a --topology such as 1E1P1D",
    "kv_transfer_config": "use --fabric and --kv-receive-blocks",
    "ec_transfer_config": "use --fabric and --receive-blocks",
    "encoder_transfer_backend": "use --fabric",
    "disaggregation_transfer_backend": "use --fabric",
    "data_parallel_size": "use a --topology such as 1E2PD",
    "pipeline_parallel_size": "not supported; see --tensor-parallel-size",
    "enforce_eager": "use --no-cuda-graphs",
    "enable_chunked_prefill": "prefill is always chunked; see --max-num-batched-tokens",
    "mm_processor_cache_gb": "encode instances remember embeddings: --encode-cache-mb",
    "limit_mm_data_per_request": "use --limit-mm-per-prompt",
    "max_images": "use --limit-mm-per-prompt image=N",
    "max_videos": "use --limit-mm-per-prompt video=N",
    "swap_space": "nothing is swapped; a sequence that loses its pages is computed again",
    "disable_log_requests": "requests aren't logged unless --enable-log-requests is given",
    "model": "give the model first: triptych serve MODEL",
}
"""Flags of vLLM and SGLang that are called otherwise here, or that there is nothing for."""

log = logging.getLogger(__name__)


def from_environment(known: Collection[str]) -> Values:
    """What the variables say, as text. Raises ConfigError for one that isn't a setting's, unless it is Kubernetes'."""
    values = {}
    for variable, value in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or _FROM_KUBERNETES.fullmatch(variable):
            continue
        if value.startswith(_ADDRESSES):
            # TRIPTYCH_PORT is a setting, too. Nobody means an address by it, and to refuse it would make the name of a
            # service decide whether Triptych starts
            log.warning("%s=%s comes from Kubernetes, not from you; ignoring it", variable, value)
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in known:
            raise ConfigError(f"{variable}={value} is no setting{_instead(name, known, as_variable)}")
        values[name] = value
    return values


def from_file(path: Path, known: Collection[str]) -> Values:
    """What a TOML file says: a line for each setting, under the names that flags have, with - or _. Raises ConfigError
    for a file that can't be read, and for a name in it that isn't a setting's."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    values: dict[str, Any] = {}
    for written, value in table.items():
        name = written.replace("-", "_")
        if name not in known:
            raise ConfigError(f"--config {path}: {written} = {value!r} is no setting{_instead(name, known, as_key)}")
        if isinstance(value, dict):
            raise ConfigError(f"--config {path}: [{written}] is a table; settings are lines of their own")
        if name in values:
            raise ConfigError(f"--config {path}: {written} is there twice: {values[name]!r} and {value!r}")
        values[name] = value
    return values


def unknown_flags(given: Iterable[str], known: Collection[str]) -> str:
    """What to say of arguments that nobody has taken."""
    first = next(iter(given))
    name = first.partition("=")[0].removeprefix("--").replace("-", "_")
    if not first.startswith("--"):
        return f"unexpected argument {first!r}"
    return f"there is no {first.partition('=')[0]}{_instead(name, known, as_flag)}"


def as_key(name: str) -> str:
    return name.replace("_", "-")


def as_flag(name: str) -> str:
    return "--" + as_key(name)


def as_variable(name: str) -> str:
    return PREFIX + name.upper()


def _instead(name: str, known: Collection[str], spelled: Any) -> str:
    if name in ELSEWHERE:
        return f": {ELSEWHERE[name]}"
    close = difflib.get_close_matches(name, known, 1, 0.75)
    return f"; did you mean {spelled(close[0])}?" if close else ""
