"""Limits on the cost of a grammar. All but the timeouts are processor time, independent of the load on the machine."""

from triptych.sandbox.protocol import Limits

COMPILE_SECONDS = 10.0
"""Seconds to compile one grammar. Most schemas take a fraction; bounded repetitions over a large vocabulary take
most."""
TOKEN_SECONDS = 0.5
"""Seconds to match one token and compute the next mask. Most grammars take far less, even with nested repetition."""
FREE_SECONDS = 0.002
"""Seconds per token that don't count towards TOTAL_SECONDS."""
TOTAL_SECONDS = 10.0
"""Seconds to match all tokens of a request, beyond FREE_SECONDS for each."""
KILL_SECONDS = 2.0
"""Seconds for one token after which the grammar's process is killed, because xgrammar can't be interrupted."""
COMPILE_TIMEOUT, TOKEN_TIMEOUT = 60.0, 20.0
"""Seconds of wall time to wait for a grammar to be compiled and for a token to be matched."""

LIMITS = Limits(memory_bytes=2**29)
"""Limits of one grammar's process, beyond the memory that all of them share."""
NICENESS = 5
"""Matching yields to compute threads, but only a little: the next step may wait for the mask."""

MAX_COMPILING = 8
"""Grammars compiled at a time. Even one that is rejected in the end may use all of LIMITS' memory meanwhile."""
MAX_COMPILING_EACH = 2
"""The same for one client."""
MAX_IDLE = 8
"""Grammars whose processes are kept although no request uses them."""
MAX_REJECTED = 1024
"""Rejected grammars that are kept, with their errors."""
MAX_REBUILDS = 3
"""Times that a request's grammar is compiled again after its process ended for an external reason."""
