"""Services that tests of the API share: one with default settings, and one of a model with audio."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.serving import SOON, Served, served, wait_for
from tests.support.tiny import make_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("api") / "tiny")


@pytest.fixture(scope="session")
def shared_service(folder: Path) -> Iterator[Served]:
    with served(folder) as service:
        yield service


@pytest.fixture
def service(shared_service: Served) -> Iterator[Served]:
    """The shared service; fails a test that leaves requests or memory behind."""
    yield shared_service
    shared_service.settle()


@pytest.fixture(scope="session")
def hears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("hears") / "tiny", "qwen3_omni_moe")


@pytest.fixture(scope="session")
def shared_hearing(hears: Path) -> Iterator[Served]:
    with served(hears, allowed_local_media_path=str(hears)) as service:
        yield service


@pytest.fixture
def hearing(shared_hearing: Served) -> Iterator[Served]:
    """As ``service``, of a model with audio."""
    yield shared_hearing
    wait_for(shared_hearing.is_idle, SOON)
