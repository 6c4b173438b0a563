"""vLLM's encoder-cache connector whose rows come from Triptych's encode instances. It only consumes.

The scheduler's half, in the engine's process, has the rows, and a step's metadata take them to the workers' half.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.version import __version__

from triptych.clock import SystemClock
from triptych.errors import ConfigError, TriptychError
from triptych.messages.identity import ModelIdentity
from triptych.messages.tickets import PARAMETER
from triptych.models.registry import identity_of
from triptych_vllm.pace import Pace
from triptych_vllm.row_needs import RowNeeds
from triptych_vllm.settings import ConnectorSettings
from triptych_vllm.start import start_consumer

log = logging.getLogger("vllm.triptych")

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

_OWN_DATA = ("pixel", "_embeds", "input_features", "input_audio")
"""Parts of the names of what towers take, or have made. Other names are metadata, such as grids."""


@dataclass
class LoadRows(ECConnectorMetadata):  # type: ignore[misc]
    """The rows that the workers take into their caches in this step: uint8 of shape (rows, row_bytes)."""

    items: dict[str, NDArray[np.uint8]] = field(default_factory=dict)


class TriptychECConnector(ECConnectorBase):  # type: ignore[misc]  # vLLM isn't installed where types are checked
    """One half, as ``role`` says: the engine's, or a worker's."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        """Raises ConfigError and BadAddress for settings that can't be used."""
        super().__init__(vllm_config, role)
        self._dtype = vllm_config.model_config.dtype
        if self._dtype not in _DTYPES:
            raise ConfigError(f"no rows of {self._dtype} are transferred, only {', '.join(_DTYPES.values())}")
        if role is ECConnectorRole.SCHEDULER:
            self._start(vllm_config)

    # ── the engine's half ────────────────────────────────────────────────────────────────────────────────────

    def _start(self, vllm_config: VllmConfig) -> None:
        for name in ("triptych", "triptych_vllm"):
            logging.getLogger(name).parent = logging.getLogger("vllm")
        settings = ConnectorSettings.parse(vllm_config.ec_transfer_config.ec_connector_extra_config)
        model = vllm_config.model_config
        hidden = model.get_inputs_embeds_size()
        width = hidden * (1 + num_deepstack_levels(model.hf_config))
        self._hidden_bytes, self._row_bytes = hidden * self._dtype.itemsize, width * self._dtype.itemsize
        self._clock = SystemClock()
        self._consumer = start_consumer(
            settings,
            engine=f"vllm {__version__}",
            identify=lambda: _identify(model.model, model.revision),
            width=width,
            dtype=_DTYPES[self._dtype],
            clock=self._clock,
        )
        self._needs = RowNeeds(
            self._consumer,
            self._row_bytes,
            max_bytes=settings.rows_mb * 2**20,
            cache_bytes=settings.cache_mb * 2**20,
        )
        # others wait for a rank of data parallelism in each step
        is_alone = vllm_config.parallel_config.data_parallel_size == 1
        self._pace = Pace(self._consumer.news, settings.idle_wait if is_alone else 0.0)
        self._waiting: set[str] = set()
        """Requests that wait for rows."""
        self._hopeless: set[str] = set()
        """Requests that vLLM must end."""
        self._loads: dict[str, NDArray[np.uint8]] = {}

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether the request's rows are here that the KV cache doesn't cover, and ask for those that aren't."""
        last = request.mm_features[-1].mm_position
        if last.offset + last.length <= num_computed_tokens and request.request_id not in self._waiting:
            return True  # as in most steps: it decodes
        sealed = (request.ec_transfer_params or {}).get(PARAMETER)
        missing = [
            (feature.identifier, feature.mm_position.get_num_embeds())
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
            and (sealed is not None or not _has_own_data(feature))
        ]
        if not missing:
            return True
        try:
            is_ready = self._needs.ready(request.request_id, missing, sealed, self._clock.now())
        except TriptychError as error:
            self._end(request, str(error))
            return False
        if is_ready:
            self._waiting.discard(request.request_id)
        else:
            self._waiting.add(request.request_id)
        return is_ready

    def take_unavailable_requests(self) -> set[str]:
        """Return the requests that will never have their rows."""
        ended, self._hopeless = self._hopeless, set()
        return ended

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether the workers are to load an item, rather than compute it."""
        return self._needs.rows(identifier) is not None

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Have the workers load an item in this step."""
        feature = request.mm_features[index]
        rows = self._needs.rows(feature.identifier)
        if rows is None and not _has_own_data(feature):
            # without rows the workers would fail, and all requests with them
            self._end(request, f"{feature.identifier} was scheduled without its rows")
            rows = np.zeros((feature.mm_position.get_num_embeds(), self._row_bytes), np.uint8)
        if rows is not None:
            # towers without deepstack features have rows of the same format, filled up with zeros
            is_plain = feature.modality == "audio"
            self._loads[feature.identifier] = np.ascontiguousarray(rows[:, : self._hidden_bytes]) if is_plain else rows

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LoadRows:
        """Return what the workers load in this step. Rests if the step has nothing to do but to wait."""
        loads, self._loads = self._loads, {}
        has_work = bool(scheduler_output.total_num_scheduled_tokens or self._hopeless)
        self._pace.step(is_empty=not has_work and bool(self._waiting))
        return LoadRows(loads)

    def update_state_after_free(self, request: Request, index: int) -> None:
        """Note that an item's keys and values are computed."""
        self._needs.release(request.request_id, request.mm_features[index].identifier)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Release what the request had, in any state."""
        self._needs.forget(request.request_id)
        self._waiting.discard(request.request_id)
        self._hopeless.discard(request.request_id)
        return False, None

    def shutdown(self) -> None:
        """End the thread that fetches rows."""
        if self.role is ECConnectorRole.SCHEDULER:
            self._consumer.stop()

    def _end(self, request: Request, reason: str) -> None:
        log.warning("request %s ends: %s", request.request_id, reason)
        self._waiting.discard(request.request_id)
        self._hopeless.add(request.request_id)

    # ── a worker's half ──────────────────────────────────────────────────────────────────────────────────────

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """Take the step's rows into a worker's cache."""
        device = self._vllm_config.device_config.device_type
        for identifier, rows in self._get_connector_metadata().items.items():
            raw = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
            encoder_cache[identifier] = raw.view(self._dtype).to(device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        """Nothing: rows only arrive."""


def num_deepstack_levels(config: Any) -> int:
    """Return how many layers' features follow the embedding in a row, by a model's configuration."""
    for owner in (config, getattr(config, "thinker_config", None)):
        levels = getattr(getattr(owner, "vision_config", None), "deepstack_visual_indexes", None)
        if levels:
            return len(levels)
    return 0


def _has_own_data(feature: MultiModalFeatureSpec) -> bool:
    """Return whether the request brought what vLLM's own tower needs, or embeddings."""
    names: Iterable[str] = feature.data or ()
    return any(part in name for name in names for part in _OWN_DATA)


def _identify(model: str, revision: str | None) -> ModelIdentity:
    """Return the identity of the checkpoint that vLLM has loaded, a folder or a name on the Hub."""
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    return identity_of(folder)
