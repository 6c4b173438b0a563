"""What instances import, for a process that forks them."""

import importlib
from pathlib import Path

from triptych.checkpoint.config_files import load_config
from triptych.models.registry import backbone_of, family_of, resolve


def preload(model: Path) -> None:
    """Import what an instance of a model does. Raises CheckpointError for a model that can't be served."""
    for module in ("triptych.server.instance_main", "triptych.server.instance_process"):
        importlib.import_module(module)
    config = load_config(model)
    family = family_of(config)
    resolve(family.planner)
    resolve(family.adapter)
    backbone_of(config)
