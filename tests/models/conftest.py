"""Fixtures for the tests of ``triptych/models``."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and the machine may be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_checkpoint`` into a folder of its own, made once per set of options. Tests don't write to it."""
    made: dict[str, Path] = {}

    def make(**options: object) -> Path:
        name = repr(sorted(options.items()))
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **options)
        return made[name]

    return make
