"""What a grammar may cost. All but the waiting is processor time, which a busy machine doesn't add to."""

from triptych.sandbox.protocol import Limits

COMPILE_SECONDS = 10.0
"""For compiling one grammar. With a vocabulary of 152,000, ``[a-z ]{1,500}`` takes 6 s, most schemas below 1 s."""
TOKEN_SECONDS = 0.5
"""For matching one token, the next one's mask included. Most take 0.05 ms; ``([a-z]+ ?)+\\.`` takes 0.3 s a token with
a vocabulary of 152,000, and is of use all the same."""
FREE_SECONDS = 0.002
"""What any token may take without being counted."""
TOTAL_SECONDS = 10.0
"""For all tokens of a request, beyond FREE_SECONDS for each."""
KILL_SECONDS = 2.0
"""For a token after which the grammar's process is ended: nothing else can interrupt it."""
COMPILE_PATIENCE, TOKEN_PATIENCE = 60.0, 20.0
"""Seconds to wait for a grammar to be compiled, and for a token to be matched, however little processor time its
process gets."""

LIMITS = Limits(memory_bytes=2**29)
"""Of one grammar's process, beyond what all of them share."""
NICENESS = 5
"""Matching yields to what computes, but not for long: the step may wait for it."""

MAX_COMPILING = 8
"""Grammars compiled at a time: as many processes may take LIMITS' memory for what is refused in the end."""
MAX_COMPILING_EACH = 2
"""The same for one client."""
MAX_IDLE = 8
"""Grammars that are kept although no request has them: their processes."""
MAX_REFUSED = 1024
"""Grammars that are known to be refused."""
MAX_REBUILDS = 3
"""How often a request's grammar may have to be built again, since its process ended for reasons of others."""
