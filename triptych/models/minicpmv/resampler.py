"""Adapter of MiniCPM-V 2.6 and 4.5: tower, resampler, decoder parameters and tensor names.

The reference is the published code; transformers has no classes. A piece of an image, or of several frames, becomes a
fixed number of embeddings: learned queries attend to its patches.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import CheckpointError, PlanMismatch
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.models.base import VISION, ModelConfig
from triptych.models.minicpmv.navit import NaViT, load_navit
from triptych.models.minicpmv.original import HEAD_VALUES, original_text_config, original_vision_config, tower_depth
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

RESAMPLER = "resampler"
EPS = 1e-6
"""Epsilon of the resampler's norms; not in the config."""


def shares(count: int) -> Tensor:
    """Return the places of patches in a row, as shares of the row: float32 [count]. The step is rounded to float32
    before it is multiplied, as in the reference."""
    return torch.arange(0, 1 - 1e-6, float(torch.tensor(1.0) / count))


def grid_positions(rows: int, columns: int, width: int) -> Tensor:
    """Return the positions of a grid of patches, row by row: float32 [rows * columns, width].

    The first half of the values are those of a patch's column, the second half those of its row: sines, then cosines.
    """
    frequencies = 1.0 / 10_000 ** (torch.arange(width // 4, dtype=torch.float) / (width / 4))
    angles = torch.arange(max(rows, columns), dtype=torch.float)[:, None] * frequencies
    table = torch.cat((angles.sin(), angles.cos()), dim=1)
    across = table[:columns].expand(rows, -1, -1)
    down = table[:rows, None].expand(-1, columns, -1)
    return torch.cat((across, down), dim=-1).flatten(0, 1)


def temporal_positions(times: Sequence[int], width: int) -> Tensor:
    """Return the positions of frames in time: float32 [frames, width], sines, then cosines.

    Angles are rounded as in the reference, which computes them with numpy: those of long videos are large.
    """
    omega = np.arange(width // 2, dtype=np.float32) / np.float32(width / 2)
    angles = np.asarray(times, np.float32)[:, None] * (1.0 / 10_000**omega).astype(np.float32)
    return torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), axis=1))


def positions_of(item: PreprocessedPart, width: int) -> Tensor:
    """Return what is added to the keys of a piece's patches: float32 [patches, width]. Pieces of frames have times,
    which are their ``layout``. Raises PlanMismatch for other numbers of these."""
    images, rows, columns = item.grid
    if len(item.layout) not in (0, images):
        raise PlanMismatch(f"{images} frames have {len(item.layout)} times")
    times = temporal_positions(item.layout, width) if item.layout else torch.zeros(images, width)
    return (grid_positions(rows, columns, width) + times[:, None]).flatten(0, 1)


class Resampler(nn.Module):
    """Learned queries that attend to the patches of a piece."""

    def __init__(
        self,
        kv: tuple[Linear, LayerNorm],
        queries: Tensor,
        key: Linear,
        value: Linear,
        output: tuple[Linear, LayerNorm, Linear],
        *,
        head_values: int = HEAD_VALUES,
    ) -> None:
        """``kv`` makes keys' and values' inputs of the patches. ``queries`` [queries, width] are projected already.
        ``output`` makes embeddings of what they have seen."""
        super().__init__()
        self.kv, self.kv_norm = kv
        self.queries = frozen(queries)
        self.key = key
        self.value = value
        self.output, self.output_norm, self.project = output
        self.head_values = head_values

    def forward(self, states: Tensor, lengths: list[int], positions: Tensor) -> Tensor:
        """Return the embeddings [pieces * queries, width].

        ``states`` [patches, hidden] are those of pieces with ``lengths`` patches, ``positions`` [patches, width] are
        added to what keys are made of.
        """
        seen = self.kv_norm(self.kv(states))
        keys, values = (self._by_heads(part) for part in (self.key(seen + positions.to(seen.dtype)), self.value(seen)))
        queries = self._by_heads(self.queries)
        pieces = zip(torch.split(keys, lengths, dim=1), torch.split(values, lengths, dim=1), strict=True)
        attended = [F.scaled_dot_product_attention(queries[None], k[None], v[None])[0] for k, v in pieces]
        joined = torch.cat([one.transpose(0, 1).flatten(1) for one in attended])
        rows: Tensor = self.project(self.output_norm(self.output(joined)))
        return rows

    def _by_heads(self, states: Tensor) -> Tensor:
        """[T, width] → [heads, T, values]"""
        return states.view(len(states), -1, self.head_values).transpose(0, 1)


class MiniCPMVTower(nn.Module):
    """``Encoder`` of pieces of images, and of frames that are shown together."""

    def __init__(self, transformer: NaViT, resampler: Resampler, embedding_width: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.resampler = resampler
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        hidden = self.transformer.embedded(inputs)
        images = [rows * columns for number, rows, columns in (item.grid for item in inputs) for _ in range(number)]
        states = self.transformer.norm(self.transformer.through(hidden, images))
        positions = torch.cat([positions_of(item, self.embedding_width) for item in inputs])
        rows = self.resampler(states, [len(item.patches) for item in inputs], positions.to(states.device))
        return list(rows.split(len(self.resampler.queries)))


class MiniCPMV(TowerAdapter):
    """``ModelAdapter`` for model type ``minicpmv``. Raises CheckpointError for a config that lacks a setting or asks
    for something unsupported."""

    towers = "SigLIP for any size, and resampler"
    layouts = (WeightPrefixes({VISION: "vpm.", RESAMPLER: "resampler."}, "llm.model.", "llm.lm_head.weight"),)

    def __init__(self, config: ModelConfig) -> None:
        text = original_text_config(config)
        super().__init__(config, text, tied=setting(config, "tie_word_embeddings", bool, default=False))
        if (width := self.embedding_width) % HEAD_VALUES:
            raise CheckpointError(f"config.json: hidden_size {width} isn't a multiple of {HEAD_VALUES}")
        self.vision = original_vision_config(config)
        self._depth = tower_depth(config)
        self._queries = setting(config, "query_num", int, default=64)
        tower_activation(self.vision.activation, "vision_config.hidden_act")  # checks it

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        layers = [f"{VISION}.encoder.layers.{number}." for number in range(self._depth, self.vision.num_layers)]
        return [*layers, f"{VISION}.embeddings.position_ids"]

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower's used layers and the resampler. Raises CheckpointError as ``TowerWeights`` does."""
        transformer = load_navit(reader, self.vision, VISION, self._depth, shares)
        return MiniCPMVTower(transformer, self._resampler(reader), self.embedding_width)

    def _resampler(self, reader: TowerWeights) -> Resampler:
        width, hidden = self.embedding_width, self.vision.hidden_size
        weights = reader.tensor(f"{RESAMPLER}.attn.in_proj_weight", 3 * width, width).chunk(3)
        biases = reader.tensor(f"{RESAMPLER}.attn.in_proj_bias", 3 * width).chunk(3)
        query, key, value = (
            reader.weights.linear(weight, bias, reader.device) for weight, bias in zip(weights, biases, strict=True)
        )
        norm = reader.layer_norm(f"{RESAMPLER}.ln_q", width, EPS)
        projection = reader.tensor(f"{RESAMPLER}.proj", width, width).t().contiguous()
        return Resampler(
            (
                reader.linear([f"{RESAMPLER}.kv_proj"], width, hidden, bias=False),
                reader.layer_norm(f"{RESAMPLER}.ln_kv", width, EPS),
            ),
            query(norm(reader.parameter(f"{RESAMPLER}.query", self._queries, width))),
            key,
            value,
            (
                reader.linear([f"{RESAMPLER}.attn.out_proj"], width, width),
                reader.layer_norm(f"{RESAMPLER}.ln_post", width, EPS),
                reader.weights.linear(projection, None, reader.device),
            ),
        )
