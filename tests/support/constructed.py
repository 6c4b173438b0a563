"""``triptych`` with settings that only code sets: python -m tests.support.constructed JSON COMMAND …"""

import dataclasses
import json
import sys
from typing import Any

from triptych.cli import flags, main


def run(internal: dict[str, Any], arguments: list[str]) -> None:
    """Run a command whose groups of settings have these values, by the names of their fields."""
    given = flags.settings

    def settings(group: Any, parsed: Any, **how: Any) -> Any:
        found = given(group, parsed, **how)
        names = {item.name for item in dataclasses.fields(group)} & internal.keys()
        return dataclasses.replace(found, **{name: internal[name] for name in names})

    flags.settings = settings  # type: ignore[assignment]  # one that is generic
    main(arguments)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.argv[2:])
