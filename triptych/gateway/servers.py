"""Language servers of other projects that answer in place of language instances: which of them serve, and which one a
request goes to."""

import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from triptych.clock import Clock
from triptych.config import EnginesConfig
from triptych.config.engines import CONNECTED
from triptych.errors import TriptychError, Unavailable, UnknownModel
from triptych.fair_queue import FairQueue
from triptych.gateway.registration import Card, Refused, read_card, read_tokens
from triptych.messages.operations import ServerStatus

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Seconds between two checks of a server."""
CHECK_TIMEOUT = 5.0
MAX_SILENT_CHECKS = 3
"""Checks without an answer in time after which a server counts as lost. One that refuses connections does at once."""
CONNECT_TIMEOUT, WRITE_TIMEOUT = 5.0, 60.0
KEEPALIVE_SECONDS = 2.0
"""Less than servers keep an idle connection, which would end just as it is used again."""
MAX_CHECK_BYTES = 2**20


class ServerState(enum.StrEnum):
    """Whether a server gets requests."""

    AWAITED = "awaited"
    """It hasn't answered yet."""
    SERVING = "serving"
    LOST = "lost"
    REFUSED = "refused"
    """It answers, and serves another model."""


@dataclass(eq=False)
class Server:
    """One language server."""

    name: str
    url: str
    state: ServerState = ServerState.AWAITED
    why: str = ""
    """Why it isn't serving, or serves text alone; otherwise empty."""
    connected: bool = False
    """Whether its connector is there."""
    card: Card = field(default_factory=Card)
    """What it says of itself."""
    running: int = 0
    """Requests that it has, each counted as its answers."""
    losses: int = 0
    """Times that it was lost."""
    silent_checks: int = 0
    lost: "asyncio.Future[None] | None" = None
    """Done once it is lost; None unless it serves."""
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is checked."""

    def status(self) -> ServerStatus:
        """Return what operators are told."""
        return ServerStatus(self.name, self.url, self.state, self.why, self.running, self.losses)


@dataclass(frozen=True)
class Needs:
    """What a server must have for a request."""

    connector: bool = False
    """Which asks for the request's rows."""
    model: str = ""
    """A model beside the one of all servers, such as a LoRA; empty for that one."""

    def are_met(self, server: Server) -> bool:
        """Return whether a server serves, and has that."""
        if server.state is not ServerState.SERVING:
            return False
        return (server.connected or not self.connector) and (not self.model or self.model in server.card.models)


@dataclass(eq=False)
class _WaitingCall:
    needs: Needs
    number: int
    """Answers that it asks for."""
    granted: "asyncio.Future[tuple[Server, asyncio.Future[None]]]"
    avoid: Collection[Server]
    served: float
    """When a server that it could go to last served."""


@dataclass(frozen=True)
class Probe:
    """What a server of the same model must say."""

    text: str
    tokens: list[int]
    """Those of ``text``."""
    check_root: Callable[[str], str]
    """Returns how the checkpoint at a server's path differs; empty if it doesn't, or isn't on this machine. It may take
    long, and is called on another thread. Raises CheckpointError for one on this machine that can't be read."""


class Servers:
    """All language servers of a service, and the requests that wait for one. Belongs to one event loop."""

    def __init__(
        self,
        config: EnginesConfig,
        probe: Probe,
        *,
        hold: float,
        clock: Clock,
    ) -> None:
        """``hold`` is how long, in seconds, requests wait while no server serves. Raises ConfigError for a key that
        can't be used."""
        self._all = [Server(f"vllm{number}", url) for number, url in enumerate(config.urls)]
        self._limit = config.engine_requests
        self.is_connected = config.kind == CONNECTED
        """Whether servers have a connector, which asks for rows; otherwise requests bring them."""
        self.has_connector: Callable[[str], bool] = lambda _: False
        """Returns whether the connector of a server, given as ``HOST:PORT``, is there."""
        self._probe = probe
        self._hold = hold
        self.tell: Callable[[str, str], None] = lambda *_: None
        """Gets kind and text of what happens to servers, as ``EventLog.add``."""
        self._clock = clock
        self._served = clock.now()
        """When a server last served."""
        self._queue: FairQueue[_WaitingCall] = FairQueue()
        self._watches: list[asyncio.Task[None]] = []
        key = config.key()
        self.http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT, write=WRITE_TIMEOUT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEPALIVE_SECONDS),
            trust_env=False,
            follow_redirects=False,
        )

    def start(self) -> None:
        """Begin to look after the servers. Call it on the event loop."""
        self._watches = [asyncio.create_task(self._watch(server)) for server in self._all]

    async def close(self) -> None:
        """End that, and close the connections."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self.http.aclose()

    def __iter__(self) -> Iterator[Server]:
        return iter(self._all)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a server."""
        return len(self._queue)

    @property
    def missing(self) -> str:
        """Why no server serves; empty if one does."""
        if any(server.state is ServerState.SERVING for server in self._all):
            return ""
        return "; ".join(f"{server.name} is {server.state}: {server.why or 'not reached yet'}" for server in self._all)

    def check(self) -> None:
        """Raise Unavailable if no server serves, and none has for longer than requests wait."""
        if self.missing and self._clock.now() > self._served + self._hold:
            raise Unavailable("no language server is ready")

    def knows(self, model: str) -> bool:
        """Return whether a server offers a model of that name, such as a LoRA, or did when it was lost."""
        states = (ServerState.SERVING, ServerState.LOST)
        return any(model in server.card.models for server in self._all if server.state in states)

    @property
    def adapters(self) -> list[str]:
        """The names of models beside the one of all servers that requests may name now."""
        serving = [server.card for server in self._all if server.state is ServerState.SERVING]
        return sorted({name for card in serving for name in card.models - {card.model}})

    async def suspect(self, server: Server) -> None:
        """Check a server at once that has failed with a request: it may be gone."""
        async with server.checking:
            if server.state is ServerState.SERVING:
                await self._check_now(server)

    @asynccontextmanager
    async def turn(
        self, client: str, cost: float, needs: Needs, number: int = 1, *, avoid: Collection[Server] = ()
    ) -> AsyncIterator[tuple[Server, "asyncio.Future[None]"]]:
        """Wait for the client's turn, and for a server with room that meets the ``needs``; inside, it has the request,
        which asks for ``number`` answers. Yields also what is done once that server is lost. Servers in ``avoid`` are
        taken if no other serves. Raises Unavailable if none serves for too long, and UnknownModel if none has the model
        any more."""
        self.check()
        if gone := self._gone(needs):
            raise gone
        served = self._served if self.missing else self._clock.now()
        waiting = _WaitingCall(needs, number, asyncio.get_running_loop().create_future(), avoid, served)
        ticket = self._queue.add(waiting, client, cost, kind=needs)
        self._grant()
        try:
            server, lost = await waiting.granted
        except BaseException:
            if waiting.granted.done() and not waiting.granted.cancelled() and not waiting.granted.exception():
                self._leave(waiting.granted.result()[0], number)  # granted and cancelled at once
            elif waiting.granted.cancelled():
                self._queue.remove(ticket)
                self._grant()  # a server may have been kept for it
            raise
        try:
            yield server, lost
        finally:
            self._leave(server, number)

    def _leave(self, server: Server, number: int) -> None:
        server.running -= number
        self._grant()

    def _grant(self) -> None:
        # by servers, the first call in turn, for all of whose answers there isn't room: until there is, no other gets
        # there, or calls with few answers would pass it for ever
        kept: dict[Server, _WaitingCall] = {}

        def choose(one: _WaitingCall) -> Server | None:
            has_ended = one.granted.done()  # cancelled, and its task takes it out of the queue
            return None if has_ended or one in kept.values() else self._choose(one, kept)

        while (ticket := self._queue.first(lambda one: choose(one) is not None)) is not None:
            waiting = ticket.work
            server = choose(waiting)
            assert server is not None and server.lost is not None, "it may start"
            if server.running and server.running + waiting.number > self._limit:
                kept[server] = waiting
                continue
            self._queue.take(ticket)
            server.running += waiting.number
            waiting.granted.set_result((server, server.lost))

    def _choose(self, waiting: _WaitingCall, kept: Collection[Server]) -> Server | None:
        """Return the server with the least requests that a request may go to, and that isn't kept for others; None if
        all are full."""
        serving = [server for server in self._all if waiting.needs.are_met(server)]
        usual = [server for server in serving if server not in waiting.avoid] or serving
        free = (server for server in usual if server not in kept)
        least = min(free, key=lambda server: server.running, default=None)
        return least if least is not None and least.running < self._limit else None

    # ── looking after them ───────────────────────────────────────────────────────────────────────────────────

    async def _watch(self, server: Server) -> None:
        while True:
            try:
                async with server.checking:
                    await self._check_now(server)
            except Exception as error:  # whatever it answers, it must be asked again
                why = f"can't be checked: {type(error).__name__}"
                if server.why != why:
                    log.exception("%s at %s %s", server.name, server.url, why)
                server.why = why
            self._expire()
            await asyncio.sleep(CHECK_SECONDS)

    def _expire(self) -> None:
        """Give up requests that have waited for too long for any server that they could go to."""
        now = self._clock.now()
        if not self.missing:
            self._served = now
        for ticket in list(self._queue):
            waiting = ticket.work
            if waiting.granted.done():
                continue
            error: TriptychError | None = self._gone(waiting.needs)
            if any(map(waiting.needs.are_met, self._all)):
                waiting.served = now
            elif error is None and now > waiting.served + self._hold:
                error = Unavailable("no language server is ready for the request")
            if error is not None:
                self._queue.remove(ticket)
                waiting.granted.set_exception(error)

    def _gone(self, needs: Needs) -> UnknownModel | None:
        if not needs.model or self.knows(needs.model):
            return None
        return UnknownModel(f"no language server has the model {needs.model!r} any more", "model")

    async def _check_now(self, server: Server) -> None:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                response = await self._read("GET", f"{server.url}/health")
        except TimeoutError:
            server.silent_checks += 1
            if server.silent_checks >= MAX_SILENT_CHECKS:
                self.lose(server, f"no answer for {MAX_SILENT_CHECKS * CHECK_TIMEOUT:g} s")
            return
        except httpx.HTTPError as error:
            self.lose(server, f"can't be reached: {type(error).__name__}")
            return
        server.silent_checks = 0
        server.connected = self.is_connected and self.has_connector(server.url.partition("://")[2])
        why = "its connector isn't there" if self.is_connected and not server.connected else ""
        if response.status_code != httpx.codes.OK:
            self.lose(server, f"its health check answers {response.status_code}")
        elif server.state is ServerState.SERVING:  # what it has goes on without the connector
            self._set(server, ServerState.SERVING, why and f"only text: {why}")
            await self._refresh(server)
            self._grant()
        elif why:
            self.lose(server, why)
        else:
            await self._register(server)

    async def _register(self, server: Server) -> None:
        """Compare what a server serves, and let it serve."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                card = await self._card(server)
                question = {"model": card.model, "prompt": self._probe.text, "add_special_tokens": False}
                tokens = read_tokens(await self._read("POST", f"{server.url}/tokenize", question))
            if tokens != self._probe.tokens:
                raise Refused("it has another tokenizer")
            if difference := await asyncio.to_thread(self._probe.check_root, card.root):
                raise Refused(f"it serves another checkpoint: {difference}")
        except Refused as refused:
            self._set(server, ServerState.REFUSED, str(refused))
        except TriptychError as error:
            self._set(server, ServerState.REFUSED, f"its checkpoint can't be compared: {error}")
        except (TimeoutError, httpx.HTTPError) as error:
            self._set(server, server.state, f"can't be asked for its model: {type(error).__name__}")
        else:
            server.card = card
            server.lost = asyncio.get_running_loop().create_future()
            self._set(server, ServerState.SERVING, "")
            self._served = self._clock.now()
            self._grant()

    async def _refresh(self, server: Server) -> None:
        """Ask a server for its models again: LoRAs come and go."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT):
                card = await self._card(server)
        except (Refused, TimeoutError, httpx.HTTPError):
            return  # other checks tell whether it is there
        if (card.model, card.root) != (server.card.model, server.card.root):
            self.lose(server, "it has another model now")
        else:
            server.card = card

    async def _card(self, server: Server) -> Card:
        return read_card(await self._read("GET", f"{server.url}/v1/models"))

    def lose(self, server: Server, why: str) -> None:
        """Take a server for lost until it answers again."""
        if server.state is ServerState.SERVING:
            assert server.lost is not None, "it serves"
            server.losses += 1
            server.lost.set_result(None)
            server.lost = None
            self._set(server, ServerState.LOST, why)
        else:
            server.why = why

    def _set(self, server: Server, state: ServerState, why: str) -> None:
        changed = (server.state, server.why) != (state, why)
        server.state, server.why = state, why
        if not changed:
            return
        text = f"{server.name} at {server.url}: {state}{f', {why}' if why else ''}"
        kind = "lost" if state is ServerState.LOST else "failed" if why else "joined"
        log.log(logging.INFO if kind == "joined" else logging.WARNING, "%s", text)
        self.tell(kind, text)

    async def _read(self, method: str, url: str, json: object = None) -> httpx.Response:
        """Return a response with its body, if that isn't longer than ``MAX_CHECK_BYTES``."""
        async with self.http.stream(method, url, json=json) as response:
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_CHECK_BYTES:
                    raise httpx.DecodingError("the answer is too long")
        return httpx.Response(response.status_code, content=bytes(body), request=response.request)
