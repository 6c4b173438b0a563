"""Commands of ``triptych``, run in the tests' process."""

from collections.abc import Sequence

import pytest

from triptych.cli import main


def exit_code(arguments: Sequence[object]) -> int:
    """Run a command to its end, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(str(ended.value.code or 0))
