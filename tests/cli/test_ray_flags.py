"""What ``--on`` and ``--ray-resources`` mean."""

import pytest

from triptych.cli.ray_flags import ray_address, ray_resources, ray_spares
from triptych.errors import ConfigError
from triptych.topology import Role


def test_addresses() -> None:
    assert ray_address("ray") == "auto"
    assert ray_address("ray://10.0.0.1:6379") == "10.0.0.1:6379"
    assert ray_address("ray://[fd00::1]:6379") == "[fd00::1]:6379"


@pytest.mark.parametrize("on", ["", "slurm", "ray:10.0.0.1:6379", "ray://", "ray://host", "ray://a b:1"])
def test_other_words_are_refused(on: str) -> None:
    with pytest.raises(ConfigError, match="neither ray nor ray://HOST:PORT"):
        ray_address(on)


def test_resources() -> None:
    assert ray_resources("") == {}
    assert ray_resources("E=encoder:1,pd=accelerator_type:H100:0.001, E=fast:2") == {
        Role.E: {"encoder": 1.0, "fast": 2.0},
        Role.PD: {"accelerator_type:H100": 0.001},
    }


@pytest.mark.parametrize("text", ["X=encoder:1", "E=encoder", "E=:1", "E=encoder:-1", "E=encoder:nan", "encoder:1"])
def test_bad_resources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not ROLE=NAME:AMOUNT"):
        ray_resources(text)


def test_spares() -> None:
    assert ray_spares(0) == 0
    assert ray_spares(2) == 2
    for number in (-1, 1001):
        with pytest.raises(ConfigError, match=f"--ray-spares {number} is not from 0 to 1000"):
            ray_spares(number)
