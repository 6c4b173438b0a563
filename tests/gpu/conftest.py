"""Tests that need a GPU, and nothing else that Triptych doesn't need; skipped without one. ``docs/gpu.md`` lists where
they have been run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import make_checkpoint


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        # the GPU's machine may have other releases of torch and transformers, which warn of other things
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix() and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no GPU (torch.cuda.is_available() is false)"))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_checkpoint`` into a folder of its own, made once per set of options."""
    made: dict[str, Path] = {}

    def make(**options: object) -> Path:
        name = repr(sorted(options.items()))
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **options)
        return made[name]

    return make
