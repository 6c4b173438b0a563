"""Whether the service can answer: not that processes live, but that a token came out of all stages a moment ago."""

import asyncio
import logging
import random
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextvars import Context

from triptych.errors import TriptychError
from triptych.messages.work import SamplingParams
from triptych.prompt.prompt import Message, PromptBuilder
from triptych.router.admission import PROBE_PRIORITY
from triptych.router.router import Router

log = logging.getLogger(__name__)

FRESH = 5.0
"""Seconds that an answer is given again without asking: strangers who ask often cost one token in this time."""
FRESH_FAILURE = 1.0
"""The same for an answer that was no: what was lost may be back."""
STALE = 30.0
"""Seconds after which an answer isn't given at all any more while a new one is on its way."""
WAIT = 0.9
"""Seconds that who asks may wait for an answer: less than what Kubernetes waits for one unless told otherwise."""
PATIENCE = 30.0
"""Seconds that a probe may take."""
SIDE = 64
"""Pixels along each side of the probe's image."""


class Readiness:
    """Sends a request for one token through all stages, with an image where there is an encoder, at most every
    ``FRESH`` seconds and one at a time. What clients' own requests have just shown isn't asked again: a service that is
    busy answering is ready."""

    def __init__(
        self,
        router: Router,
        builder: PromptBuilder,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._builder = builder
        self._eos_token_ids = list(eos_token_ids)
        self._clock = clock
        self._probe: asyncio.Task[None] | None = None
        self._answered = -STALE
        self._reason = ""
        self.num_probes = 0

    async def reason_against(self) -> str:
        """Why the service isn't ready; empty when it is."""
        if self._router.draining:
            return "the service is shutting down"
        if not self._router.can_serve:
            return "a stage has no instance"
        if self._shown_by_clients():
            return ""
        if self._age() > (FRESH_FAILURE if self._reason else FRESH) and self._probe is None:
            # in a context of its own: it is nobody's request, and goes on if who asked for it doesn't wait
            self._probe = asyncio.get_running_loop().create_task(self._ask(), context=Context())
        if self._probe is not None and (self._reason or self._age() > STALE):
            await asyncio.wait({self._probe}, timeout=WAIT)
            if self._probe is not None and self._age() > STALE:
                return "a request for one token is under way"
        return self._reason

    def _shown_by_clients(self) -> bool:
        """Whether each stage that a probe would go through has done some client's work lately."""
        lately = self._clock() - FRESH
        shown = self._router.last_token > lately
        return shown and (not self._router.takes_media or self._router.last_encoded > lately)

    def _age(self) -> float:
        return self._clock() - self._answered

    async def _ask(self) -> None:
        self.num_probes += 1
        try:
            async with asyncio.timeout(PATIENCE):
                self._reason = await self._one_token()
        except TimeoutError:
            self._reason = f"no token within {PATIENCE:g} s"
        except TriptychError as error:
            self._reason = f"a request for one token failed: {type(error).__name__}"
        except Exception:
            log.exception("the readiness probe failed")
            self._reason = "a request for one token failed"
        finally:
            self._answered, self._probe = self._clock(), None
            if self._reason:
                log.warning("not ready: %s", self._reason)

    async def _one_token(self) -> str:
        has_media = self._router.takes_media
        content = [{"type": "text", "text": "?"}, *([{"type": "image", "data": _image()}] if has_media else [])]
        messages: list[Message] = [{"role": "user", "content": content}]
        prompt = self._builder.build(messages, self._router.registry.context_length())
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        # no cache may know any of it: what a cache answers shows nothing
        salt = secrets.token_hex(8)
        stream = self._router.submit(
            prompt, sampling, self._eos_token_ids, salt, priority=PROBE_PRIORITY, timeout=PATIENCE
        )
        try:
            async for _ in stream:
                pass
        finally:
            self._router.cancel(stream.request)
        return ""


def _image() -> bytes:
    """A PNG of one colour, most likely another each time."""
    row = b"\0" + random.randbytes(3) * SIDE
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(row * SIDE)),
            (b"IEND", b""),
        )
    )
