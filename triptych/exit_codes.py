"""Exit codes of all processes. They tell a supervisor whether starting again can help; docs/operating.md lists them."""

FAILED = 1
"""Any other failure: starting again may help."""
USAGE = 2
"""The command line can't be parsed; argparse's own code."""
BROKEN = 70
"""An instance's device doesn't answer any more, or one of its jobs after the other failed (EX_SOFTWARE of sysexits.h):
starting again helps, unless the device itself is broken."""
NO_FRONTEND = 75
"""No answer from the frontend (EX_TEMPFAIL of sysexits.h): starting again may help."""
CONFIG = 78
"""Settings or checkpoint can't be used, or the frontend refuses the instance (EX_CONFIG of sysexits.h)."""
INTERRUPTED = 130
"""Ended by SIGINT, as a shell reports it."""

PERMANENT = frozenset({USAGE, CONFIG})
"""Codes after which starting again can't help until an operator changes something."""
