"""Reads settings from ``TRIPTYCH_*`` variables and from a TOML file, and explains unknown names."""

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from triptych.errors import ConfigError

PREFIX = "TRIPTYCH_"

Values = Mapping[str, Any]
"""Name of a setting, with underscores → what was given for it."""

# Kubernetes sets variables in pods for each service of their namespace; those for a service called triptych or
# triptych-something begin like ours.
_FROM_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)
_ADDRESSES = ("tcp://", "udp://", "sctp://")

OTHER_PROJECTS = {
    "trust_remote_code": "no code of a checkpoint is ever run",
    "gpu_memory_utilization": "use --kv-cache-memory, such as 25% or 8GiB",
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
    "mm_processor_cache_gb": "encode instances cache embeddings: --encode-cache-mb",
    "limit_mm_data_per_request": "use --limit-mm-per-prompt",
    "max_images": "use --limit-mm-per-prompt image=N",
    "max_videos": "use --limit-mm-per-prompt video=N",
    "swap_space": "nothing is swapped; preempted requests are recomputed",
    "disable_log_requests": "requests aren't logged unless --enable-log-requests is given",
    "model": "give the model first: triptych serve MODEL",
}
"""Flags of vLLM and SGLang that have another name here, or no counterpart."""

log = logging.getLogger(__name__)


def from_environment(known: Collection[str]) -> Values:
    """Return the settings given by variables, as text. Raises ConfigError for a variable that is no setting, unless
    Kubernetes set it."""
    values = {}
    for variable, value in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or _FROM_KUBERNETES.fullmatch(variable):
            continue
        if value.startswith(_ADDRESSES):
            # TRIPTYCH_PORT is a setting, too, but never an address. Refusing it would make the name of a service decide
            # whether Triptych starts
            log.warning("%s=%s was set by Kubernetes; ignoring it", variable, value)
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in known:
            raise ConfigError(f"{variable}={value} is no setting{_instead(name, known, as_variable)}")
        values[name] = value
    return values


def from_file(path: Path, known: Collection[str]) -> Values:
    """Return the settings of a TOML file: a line for each, under the names that flags have, with - or _. Raises
    ConfigError for a file that can't be read, and for a name in it that is no setting."""
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
    """Return the error message for arguments that no parser accepted."""
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


def _instead(name: str, known: Collection[str], spelled: Callable[[str], str]) -> str:
    """Return the suggestion that ends an error message: what to use instead of ``name``, as ``spelled`` there."""
    if name in OTHER_PROJECTS:
        return f": {OTHER_PROJECTS[name]}"
    close = difflib.get_close_matches(name, known, 1, 0.75)
    return f"; did you mean {spelled(close[0])}?" if close else ""
