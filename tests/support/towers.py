"""A checkpoint's encode stage in one object."""

from pathlib import Path

import torch

from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.reader import Checkpoint
from triptych.layers.linear import PlainFormat
from triptych.messages.rows import RowLayout
from triptych.models.registry import family_of, identity_of, resolve
from triptych.prompt.probe import probe_image
from triptych.transfer.memory import Bytes
from triptych.types import ItemContext, ItemPlan


class Tower:
    """Plans and encodes pictures in float32."""

    def __init__(self, folder: Path) -> None:
        config = load_config(folder)
        family, self.identity = family_of(config), identity_of(folder)
        settings = load_preprocessor_config(folder), load_video_config(folder)
        assert family.planner is not None and family.preprocessor is not None
        self._planner = resolve(family.planner)(config, *settings)
        self._preprocessor = resolve(family.preprocessor)(config, *settings)
        adapter = resolve(family.adapter)(config)
        self._encoder = adapter.load_encoder(Checkpoint(folder), PlainFormat(torch.float32), torch.device("cpu"))
        width = self._encoder.embedding_width
        self.layout = RowLayout(self.identity.digest, "float32", width, 4 * width, weight_dtype="float32")

    def plan(self, file: bytes) -> ItemPlan:
        return self._planner.plan(probe_image(file), ItemContext())

    def rows(self, file: bytes) -> Bytes:
        """uint8 of shape (rows, row_bytes)."""
        plan = self.plan(file)
        rows = torch.empty(plan.rows, self._encoder.embedding_width)
        for number, part in enumerate(self._preprocessor(file, plan)):
            encoded, at = self._encoder.encode([part])[0], 0
            for first, length in plan.runs_of(number):
                rows[first : first + length] = encoded[at : at + length]
                at += length
        return rows.numpy().view("uint8")
