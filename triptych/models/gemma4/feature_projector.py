"""Makes embeddings of the features of Gemma 4's towers, as ``Gemma4MultimodalEmbedder`` in transformers does."""

import torch
from torch import Tensor, nn

from triptych.layers.linear import Linear, RMSNorm
from triptych.models.shared.tower_weights import TowerWeights


class FeatureProjector(nn.Module):
    """``project(norm(features))``; the norm has no weights."""

    def __init__(self, norm: RMSNorm, project: Linear) -> None:
        super().__init__()
        self.norm = norm
        self.project = project

    def forward(self, features: Tensor) -> Tensor:
        """[rows, features] → [rows, embedding width]"""
        rows: Tensor = self.project(self.norm(features))
        return rows

    @classmethod
    def load(cls, reader: TowerWeights, name: str, features: int, width: int, eps: float) -> "FeatureProjector":
        """Load a tower's projector. Raises CheckpointError as ``TowerWeights`` does."""
        ones = torch.ones(features, dtype=reader.weights.activations, device=reader.device)
        return cls(RMSNorm(ones, eps), reader.linear([f"{name}.embedding_projection"], width, features, bias=False))
