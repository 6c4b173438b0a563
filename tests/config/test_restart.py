"""``--restart``."""

import math

import pytest

from triptych.config import LeaseConfig
from triptych.errors import ConfigError


@pytest.mark.parametrize(("text", "times"), [("always", math.inf), ("never", 0), ("0", 0), ("12", 12)])
def test_how_often_a_process_is_started_again(text: str, times: float) -> None:
    assert LeaseConfig(restart=text).max_restarts == times


@pytest.mark.parametrize("text", ["", "sometimes", "-1", "1.5", "²", "9999999"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither always, never nor a number of restarts"):
        LeaseConfig(restart=text)
