"""Fetches models by their names on the Hugging Face Hub, through its own client: with its cache, resumed downloads, and
its variables (``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``).

Nothing of a model is run, and of its files only those are fetched that Triptych reads.
"""

import glob
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.checkpoint.config_files import LORA_CONFIG, LORA_FILE, LORAS
from triptych.checkpoint.safetensors_header import INDEX_FILE, SINGLE_FILE, no_weights, shard_names
from triptych.errors import CheckpointError, StartError

MAX_SMALL_BYTES = 128 * 2**20
"""Size of the largest file besides weights. Tokenizers of large vocabularies have tens of megabytes."""
MAX_FILES = 100_000

_NAME = re.compile(
    r"(?P<repository>[A-Z0-9][\w.-]{0,95}/[A-Z0-9][\w.-]{0,95})(@(?P<revision>\w[\w.-]{0,99}(/\w[\w.-]{0,99}){0,5}))?",
    re.ASCII | re.IGNORECASE,
)
_SMALL = re.compile(r"[\w-][\w.-]*\.(json|jinja|txt|model)|additional_chat_templates/[\w-]+\.jinja", re.ASCII)

Check = Callable[[Path, int], None]
"""Called with the folder of small files, and the bytes of all weights, before any of them is downloaded."""


def no_check(_folder: Path, _num_bytes: int) -> None:
    """Check nothing."""


@dataclass(frozen=True)
class HubName:
    """Name of a model on the Hub."""

    repository: str
    """Organization and model, such as ``Qwen/Qwen2.5-VL-3B-Instruct``."""
    revision: str = "main"
    """A branch, a tag or a commit."""

    @classmethod
    def parse(cls, text: str) -> "HubName | None":
        """Return the name that ``ORG/NAME`` or ``ORG/NAME@REVISION`` is; None for another text."""
        match = _NAME.fullmatch(text)
        return cls(match["repository"], match["revision"] or cls.revision) if match else None

    def __str__(self) -> str:
        return self.repository if self.revision == HubName.revision else f"{self.repository}@{self.revision}"


def fetch(name: HubName, checks: Iterable[Check], *, needs_weights: bool = True) -> Path:
    """Return the folder of a model in the Hub's cache, downloaded as far as it isn't there. Without weights, only
    configs, tokenizer and templates are. Without a connection, the folder is what the cache has.

    Raises StartError for a model that can't be had, and what ``checks`` raise."""
    from huggingface_hub import HfApi, snapshot_download  # here, because few commands need it
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each attempt for each file
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _explained(name):
        listed = _listed(HfApi(), name)
    if listed is None:
        return _cached(name)

    def download(files: list[str]) -> Path:
        _check_disk(name, {file: listed[file] for file in files})
        patterns = [glob.escape(file) for file in files]
        with _explained(name):
            return Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=patterns))

    small = [file for file, size in listed.items() if _SMALL.fullmatch(file) and size <= MAX_SMALL_BYTES]
    if "config.json" not in small:
        raise CheckpointError(f"{name}: {no_weights(listed) or 'it has no config.json, so it is no model to serve'}")
    folder = download(small)
    weights = _weights(name, folder, listed)
    for check in checks:
        check(folder, sum(listed[file] for file in weights))
    return download(small + weights) if needs_weights else folder


def _listed(api: Any, name: HubName) -> dict[str, int] | None:
    """Return the bytes of each file; None if the Hub can't be reached. Raises what the client does."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = api.model_info(name.repository, revision=name.revision, files_metadata=True, timeout=10.0)
    except (OfflineModeIsEnabled, httpx2.ConnectError, httpx2.TimeoutException):
        return None
    return {file.rfilename: file.size or 0 for file in (info.siblings or [])[:MAX_FILES]}


def _cached(name: HubName) -> Path:
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(name.repository, "config.json", revision=name.revision)
    if isinstance(found, str):
        return Path(found).parent
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} can't be reached"
    raise StartError(f"{name}: it isn't in {constants.HF_HUB_CACHE}, no folder here has that name, and {why}")


def _weights(name: HubName, folder: Path, listed: Mapping[str, int]) -> list[str]:
    """Return the files with weights that are served. Raises CheckpointError if there are none, or some are missing."""
    if SINGLE_FILE in listed:
        weights = [SINGLE_FILE]
    elif INDEX_FILE in listed:
        weights = shard_names(folder / INDEX_FILE)
    else:
        raise CheckpointError(f"{name}: neither {SINGLE_FILE} nor {INDEX_FILE} is there{no_weights(listed)}")
    for lora in LORAS:
        if f"{lora}-lora/{LORA_CONFIG}" in listed:
            weights += [f"{lora}-lora/{LORA_CONFIG}", f"{lora}-lora/{LORA_FILE}"]
    if missing := [file for file in weights if file not in listed]:
        raise CheckpointError(f"{name}: {missing[0]} is missing")
    return weights


def _check_disk(name: HubName, files: Mapping[str, int]) -> None:
    """Raise StartError if the files that aren't cached don't fit; on a terminal, say what is downloaded."""
    from huggingface_hub import constants, try_to_load_from_cache

    def is_there(file: str) -> bool:
        return isinstance(try_to_load_from_cache(name.repository, file, revision=name.revision), str)

    needed = sum(size for file, size in files.items() if not is_there(file))
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if needed > free:
        raise StartError(
            f"{name}: {needed / 1e9:.1f} GB are to be downloaded, and {cache} has {free / 1e9:.1f} GB left: set "
            "HF_HOME to a folder on a larger disk"
        )
    if needed > MAX_SMALL_BYTES // 16:
        print(f"downloading {name}: {needed / 1e6:,.0f} MB to {cache}", file=sys.stderr, flush=True)


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Raise a StartError in place of the client's own errors."""
    import httpx2
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{name.repository}"
    try:
        yield
    except errors.GatedRepoError:
        account = "the account of HF_TOKEN has no access" if get_token() else "HF_TOKEN isn't set"
        raise CheckpointError(f"{name}: it is gated, and {account}: ask for access at {page}") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{name}: {name.repository} has no revision {name.revision!r}") from None
    except errors.RepositoryNotFoundError:
        hint = "" if get_token() else ", or it is private and HF_TOKEN isn't set"
        raise CheckpointError(f"{name}: there is no such folder, and no such model at {page}{hint}") from None
    except errors.HfHubHTTPError as error:
        raise StartError(f"{name}: {constants.ENDPOINT} answered {error.response.status_code}") from None
    except (OSError, ValueError, httpx2.HTTPError, errors.EntryNotFoundError) as error:
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise StartError(f"{name}: the download broke off; the same command resumes it: {reason}") from None
