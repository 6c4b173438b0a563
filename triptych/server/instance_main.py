"""Entry point of an instance's process. Its parent writes an ``InstanceSpec`` to its standard input."""

import logging
import os
import sys

from triptych import exit_codes
from triptych.config import InstanceSpec
from triptych.errors import StartError
from triptych.heap import gc_paused
from triptych.observe import logs
from triptych.observe.machine import end_with_parent
from triptych.server.worker_extra import check_installed


def run(spec: InstanceSpec) -> None:
    """Run an instance in this process until the frontend or a signal ends it. Raises StartError when it can't start."""
    check_installed("an instance")
    os.environ["OMP_NUM_THREADS"] = str(spec.engine.threads)
    with gc_paused():
        # imported now, because torch reads that variable once, when it is imported
        from triptych.server.instance_process import run_instance
    run_instance(spec)


def main(*, is_forked: bool = False) -> None:
    """Run the instance whose settings are on standard input. One that ``is_forked`` ends with its parent already."""
    logs.set_up(logs.LogSettings())
    try:
        spec = InstanceSpec.from_bytes(sys.stdin.buffer.read())
        if spec.supervisor and not is_forked:
            end_with_parent(spec.supervisor)
        level = logging.getLevelNamesMapping()[spec.observe.log_level.upper()]
        logs.set_up(logs.LogSettings(spec.observe.log_format, level, spec.name))
        run(spec)
    except StartError as error:
        logs.fatal(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)


if __name__ == "__main__":
    main()
