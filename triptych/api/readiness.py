"""Readiness probe: checks that all stages have recently produced a token, not only that processes are alive."""

import asyncio
import logging
import random
import secrets
import struct
import zlib
from collections.abc import Sequence

from triptych.errors import TriptychError
from triptych.messages.work import SamplingParams
from triptych.observe.requests import RequestRecord
from triptych.prompt.prompt import Message, PromptBuilder
from triptych.router.admission import PROBE_PRIORITY
from triptych.router.router import Router

log = logging.getLogger(__name__)

FRESH_SECONDS = 5.0
"""Age up to which a positive result is reused, so that frequent polling costs one token in this time."""
FRESH_FAILURE_SECONDS = 1.0
"""Age up to which a negative result is reused; shorter, because a lost instance may be back."""
STALE_SECONDS = 30.0
"""Age beyond which a result isn't reported at all, even while a new probe is running."""
MAX_WAIT = 0.9
"""Seconds that a poll may wait for a probe: less than Kubernetes's default timeout."""
PROBE_TIMEOUT = 30.0
"""Seconds that a probe may take."""
IMAGE_SIDE = 64
"""Width and height of the probe's image in pixels."""


class Readiness:
    """Probes the service with a request for one token through all stages, with an image if there is an encoder.

    Runs one probe at a time, at most every ``FRESH_SECONDS``, and none while clients' requests make progress."""

    def __init__(
        self,
        router: Router,
        builder: PromptBuilder,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._router = router
        self._builder = builder
        self._eos_token_ids = list(eos_token_ids)
        self._clock = router.clock
        self._probe: asyncio.Task[None] | None = None
        self._probed_at = -STALE_SECONDS
        self._reason = ""
        self.num_probes = 0

    async def why_not_ready(self) -> str:
        """Return why the service isn't ready, or an empty string if it is."""
        if self._router.draining or self._router.leaving:
            return "the service is shutting down"
        if not self._router.availability.can_serve:
            return self._router.availability.missing_stages() or "a stage has no instance"
        if self._router.servers is not None or self._shown_by_clients():
            return ""  # servers of others are checked all the time
        if self._age() > (FRESH_FAILURE_SECONDS if self._reason else FRESH_SECONDS) and self._probe is None:
            self._probe = asyncio.create_task(self._run_probe())  # outlives the poll that started it
        if self._probe is not None and (self._reason or self._age() > STALE_SECONDS):
            await asyncio.wait({self._probe}, timeout=MAX_WAIT)
            if self._probe is not None and self._age() > STALE_SECONDS:
                return "the readiness probe is still running"
        return self._reason

    def _shown_by_clients(self) -> bool:
        """Return whether each stage that a probe would use has recently worked for a client."""
        recent = self._clock.now() - FRESH_SECONDS
        has_tokens = self._router.last_token > recent
        return has_tokens and (not self._router.availability.takes_media or self._router.last_encoded > recent)

    def _age(self) -> float:
        return self._clock.now() - self._probed_at

    async def _run_probe(self) -> None:
        self.num_probes += 1
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await self._generate_token()
                self._reason = ""
        except TimeoutError:
            self._reason = f"no token within {PROBE_TIMEOUT:g} s"
        except TriptychError as error:
            self._reason = f"the readiness probe failed: {type(error).__name__}"
        except Exception:
            log.exception("the readiness probe failed")
            self._reason = "the readiness probe failed"
        finally:
            self._probed_at, self._probe = self._clock.now(), None
            if self._reason:
                log.warning("not ready: %s", self._reason)

    async def _generate_token(self) -> None:
        has_media = self._router.availability.takes_media
        content = [{"type": "text", "text": "?"}, *([{"type": "image", "data": _image()}] if has_media else [])]
        messages: list[Message] = [{"role": "user", "content": content}]
        prompt = self._builder.build(messages, self._router.membership.context_length())
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        # must miss every cache: a hit would skip the stage that is to be checked
        salt = secrets.token_hex(8)
        record = RequestRecord("readiness probe", "GET", self._clock, counted=False)
        stream = self._router.lifecycle.submit(
            record, prompt, sampling, self._eos_token_ids, salt, priority=PROBE_PRIORITY, timeout=PROBE_TIMEOUT
        )
        try:
            async for _ in stream:
                pass
        finally:
            self._router.lifecycle.cancel(stream.request)


def _image() -> bytes:
    """Return a PNG of one random colour."""
    row = b"\0" + random.randbytes(3) * IMAGE_SIDE
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", IMAGE_SIDE, IMAGE_SIDE, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(row * IMAGE_SIDE)),
            (b"IEND", b""),
        )
    )
