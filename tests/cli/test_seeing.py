"""Where a service says that it can be seen at work: at addresses that it doesn't refuse."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.frontends import alone
from triptych.cli.seeing import NEEDS_KEY, seeing_note, ways_to_see
from triptych.config import FrontendConfig

HERE = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("settings", "url", "ways"),
    [
        ({}, HERE, (f"{HERE}/ui", f"triptych top --url {HERE}")),
        ({"host": "0.0.0.0"}, "http://0.0.0.0:8000", (f"{HERE}/ui", f"triptych top --url {HERE}")),
        ({"host": "::"}, "http://[::]:8000", ("http://[::1]:8000/ui", "triptych top --url http://[::1]:8000")),
        ({"host": "10.0.0.5"}, "http://10.0.0.5:8000", ()),
        (
            {"host": "10.0.0.5", "api_key": ("key",)},
            "https://10.0.0.5:8000",
            ("https://10.0.0.5:8000/ui", "triptych top --url https://10.0.0.5:8000 --api-key-file FILE"),
        ),
        ({"ui": False}, HERE, ()),
    ],
)
def test_ways(settings: dict[str, Any], url: str, ways: tuple[str, ...]) -> None:
    config = FrontendConfig.of(**settings)
    assert ways_to_see(config, url) == ways
    note = seeing_note(config, url)
    if ways:
        assert note.endswith(": " + " or ".join(ways))
    else:
        assert note == (f"to see it at work, {NEEDS_KEY}" if config.http.ui else "")


def test_a_service_at_all_addresses_is_seen_at_the_one_that_is_printed(tmp_path: Path) -> None:
    with alone(make_checkpoint(tmp_path / "tiny"), host="0.0.0.0") as one:
        page, _ = ways_to_see(one.config, one.url)
        assert httpx.get(f"{page}/requests", trust_env=False).status_code == 200
