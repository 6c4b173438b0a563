"""Limits on the cost of a grammar. All but the timeouts are processor time, independent of the load on the machine."""

from triptych.sandbox.protocol import Limits

COMPILE_SECONDS = 10.0
"""For compiling one grammar. Most schemas take a fraction of it; bounded repetitions over a large vocabulary, most."""
TOKEN_SECONDS = 0.5
"""For matching one token and computing the next mask: far more than most grammars take, even with nested repetition."""
FREE_SECONDS = 0.002
"""Per token, not counted towards TOTAL_SECONDS."""
TOTAL_SECONDS = 10.0
"""For all tokens of a request, beyond FREE_SECONDS for each."""
KILL_SECONDS = 2.0
"""For one token, after which the grammar's process is killed: nothing else can interrupt xgrammar."""
COMPILE_TIMEOUT, TOKEN_TIMEOUT = 60.0, 20.0
"""Seconds of wall time to wait for a grammar to be compiled and for a token to be matched."""

LIMITS = Limits(memory_bytes=2**29)
"""Of one grammar's process, beyond the memory that all of them share."""
NICENESS = 5
"""Matching yields to compute threads, but only a little: the next step may wait for the mask."""

MAX_COMPILING = 8
"""Grammars compiled at a time. Even one that is rejected in the end may use all of LIMITS' memory meanwhile."""
MAX_COMPILING_EACH = 2
"""The same for one client."""
MAX_IDLE = 8
"""Grammars whose processes are kept although no request uses them."""
MAX_REJECTED = 1024
"""Grammars remembered as rejected."""
MAX_REBUILDS = 3
"""How often a request's grammar is compiled again after its process ended for reasons not its own."""
