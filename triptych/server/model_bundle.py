"""A checkpoint folder with its model family, device and dtypes, for instances."""

import logging
from collections.abc import Sequence
from functools import cached_property

from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.reader import Checkpoint
from triptych.config import EngineConfig
from triptych.engine.group import GroupCache, StateSize, make_cache
from triptych.engine.kv_rows import TokenRows
from triptych.engine.kv_size import num_slots
from triptych.errors import CheckpointError
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.decoder import Decoder
from triptych.layers.devices import dtype_name, find_device, kv_dtype, tower_format, weight_format
from triptych.layers.encoder import Encoder, ModelAdapter
from triptych.layers.parallel import Group, rank_device
from triptych.layers.state_spec import StateSpec, record_bytes
from triptych.layers.stored.lists import disagreements
from triptych.layers.stored.registry import read_formats
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowKind, RowLayout
from triptych.models.base import ModelConfig, Planner
from triptych.models.registry import family_of, identity_of, resolve
from triptych.topology import Role

log = logging.getLogger(__name__)


class ModelBundle:
    """A checkpoint, its family's code, and the device and dtypes that it is served with."""

    def __init__(self, checkpoint: Checkpoint, engine: EngineConfig) -> None:
        """Raises CheckpointError for a checkpoint that can't be served, and StartError for settings that don't fit."""
        self.checkpoint = checkpoint
        self.config: ModelConfig = load_config(checkpoint.folder)
        self.family = family_of(self.config)
        processors = load_preprocessor_config(checkpoint.folder), load_video_config(checkpoint.folder)
        self.planner: Planner = resolve(self.family.planner)(self.config, *processors)
        self.adapter: ModelAdapter = resolve(self.family.adapter)(self.config)
        stored = read_formats(checkpoint.quantization, checkpoint.tensors)
        if stored and (other := disagreements(checkpoint.quantization, checkpoint.tensors, stored.markers)):
            log.warning("%s", other)
        self.device = find_device(engine.device)
        self.weights = weight_format(engine, self.device, checkpoint.tensors, stored)
        """The decoder's weight format."""
        self.tower_weights = tower_format(engine, self.device, checkpoint.tensors)
        self.kv_dtype = kv_dtype(engine, self.device, self.weights)
        self.page_size = engine.page_size
        self._num_slots = num_slots(engine)

    @cached_property
    def identity(self) -> ModelIdentity:
        """The model's identity. Determining it may read all weights, and raises CheckpointError if that fails."""
        return identity_of(self.checkpoint.folder)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the checkpoint's files have changed since ``identity`` was determined."""
        if difference := self.identity.difference(identity_of(self.checkpoint.folder)):
            raise CheckpointError(f"{self.checkpoint.folder}: changed while it was loaded: {difference}")

    def num_bytes(self, role: Role) -> int:
        """Return what a role loads of the checkpoint, in bytes."""
        stages = self.adapter.weight_bytes_by_stage(self.checkpoint.tensors)
        return stages["encoder"] * role.encodes + stages["decoder"] * role.has_decoder

    def load_encoder(self) -> Encoder:
        return self.adapter.load_encoder(self.checkpoint, self.tower_weights, self.device)

    def load_decoder(self, group: Group) -> Decoder:
        """Load the shard of this rank of the group."""
        return self.adapter.load_decoder(self.checkpoint, self.weights, rank_device(self.device, group.rank), group)

    def make_cache(self, group: Group, num_pages: Sequence[int], path: str) -> GroupCache:
        """Allocate the KV cache; see ``engine.group.make_cache``."""
        return make_cache(
            self.adapter.decoder_config,
            group,
            num_pages=num_pages,
            page_size=self.page_size,
            dtype=self.kv_dtype,
            device=rank_device(self.device, group.rank),
            path=path,
            states=self.state_size if self.adapter.decoder_config.has_state else None,
        )

    @property
    def row_layout(self) -> RowLayout:
        """Layout of embeddings. Their dtype is the one that the decoder computes in, so that nothing is converted after
        a transfer."""
        dtype, width, towers = self.weights.activations, self.adapter.embedding_width, self.tower_weights
        return RowLayout(
            model=self.identity.digest,
            dtype=dtype_name(dtype),
            width=width,
            row_bytes=width * dtype.itemsize,
            kind=RowKind.MEDIA,
            weight_dtype=" and ".join(dict.fromkeys((towers.linear_dtype, towers.high_precision_dtype))),
        )

    @cached_property
    def kv_rows(self) -> TokenRows:
        """The rows of a token in each layer, as the KV cache holds them."""
        return TokenRows(self.adapter.decoder_config.cache_specs(cache_format(self.kv_dtype)), self._state_specs)

    @cached_property
    def state_size(self) -> StateSize:
        """The size of the slots for requests' states; records are empty for a model without state."""
        specs = self._state_specs
        return StateSize(specs, self._num_slots, record_bytes(specs, self.kv_rows.row_bytes))

    @property
    def _state_specs(self) -> tuple[StateSpec, ...]:
        return self.adapter.decoder_config.state_specs(cache_format(self.weights.activations))

    @property
    def kv_layout(self) -> RowLayout:
        """Layout of KV rows."""
        dtype, row_bytes = self.kv_dtype, self.kv_rows.row_bytes
        return RowLayout(
            model=self.identity.digest,
            dtype=dtype_name(dtype),
            width=row_bytes // dtype.itemsize,
            row_bytes=row_bytes,
            kind=RowKind.KV,
            weight_dtype=self.weights.linear_dtype,
        )
