"""The frontend: HTTP requests in, work to instances, tokens back. It imports neither torch nor transformers."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import uvicorn

from triptych.api.app import create_app
from triptych.api.context import ApiContext, GenerationDefaults
from triptych.api.grammar_checker import GrammarChecker
from triptych.api.http import BoundedHttp
from triptych.api.recording import TraceRecorder
from triptych.api.response_store import ResponseStore
from triptych.api.security import add_security
from triptych.api.uuid_cache import UuidMediaCache
from triptych.checkpoint.config_files import load_config
from triptych.clock import Clock, SystemClock
from triptych.config import FrontendConfig, MediaConfig, ObserveConfig, ServeConfig
from triptych.errors import BadAddress, CheckpointError, ConfigError, InstanceLost, StartError, TriptychError
from triptych.gateway.servers import Probe, Servers
from triptych.messages.channel import Channel, endpoint_of
from triptych.messages.codec import Send
from triptych.messages.rows import RowLayout
from triptych.messages.work import Deregister, FrontendEnding, HandingOver
from triptych.models.registry import family_of, identity_of
from triptych.models.vllm_grids import FAMILIES
from triptych.observe.pipeline import ALONE, FrontendNames
from triptych.observe.request_log import RequestLog
from triptych.prompt.caps import AudioLimits, MediaCaps, VideoLimits
from triptych.prompt.hosts import AllowedHosts
from triptych.prompt.local_files import MediaFolder
from triptych.prompt.media import MediaLimits, MediaSource
from triptych.prompt.prompt import PromptBuilder
from triptych.prompt.web import WebFetcher, WebLimits
from triptych.router.router import Router
from triptych.server.http_server import HttpServer
from triptych.server.http_socket import listen, url_of
from triptych.transfer.collector import RowCollector
from triptych.transfer.fabrics.opening import open_fabrics
from triptych.transfer.sender import Sender
from triptych.types import Address

if TYPE_CHECKING:
    from triptych.observe.traces import Traces

log = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between two checks of leases and deadlines."""
LAST_RESPONSES = 1
"""Seconds for responses to reach their clients at shutdown."""
MAX_WAIT = 5.0
"""Most seconds until a frontend that was started again accepts connections, with or without instances."""
PROBE_TEXT = "Ærø, 1234567890: 日本語 \U0001f600 def f(x):\n\treturn x**2"
"""Which tokens it has tells tokenizers apart."""


@dataclass(frozen=True)
class FrontendState:
    """Snapshot of a ``Frontend``, for tests and debugging."""

    num_responses: int
    """Responses that the HTTP server has yet to complete."""
    num_fetches: int
    """Media files that are being fetched from the web."""
    listener: socket.socket
    """The live socket that accepts HTTP connections."""


class Frontend:
    """Channel, router and HTTP server of one service, on the running event loop. An async context manager: inside,
    requests are served as soon as instances have joined at ``control``."""

    _handed_over = False
    """Whether instances have been told that another one takes over."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        expects_encoders: bool = True,
        listener: socket.socket | None = None,
        own_listener: socket.socket | None = None,
        awaits_instances: bool = False,
        takes_over: Sequence[str] = (),
        among: FrontendNames = ALONE,
    ) -> None:
        """Read the checkpoint's small files and bind both ports. Raises StartError when that fails.

        ``expects_encoders`` is passed to the router, for a model that takes media. ``listener`` is the HTTP server's
        socket, of a supervisor that keeps it open and that stops the instances; None opens one. ``own_listener`` is
        a second one, which no other frontend shares. ``among`` are all frontends of its supervisor.
        ``awaits_instances`` and ``takes_over`` are as in ``FrontendSpec``."""
        self._supervised = listener is not None
        self._awaits_instances, self._config = awaits_instances, config
        self._takes_over, self._taken = [endpoint_of(one) for one in takes_over], list[Address]()
        builder, clock = _prompt_builder(config), SystemClock()
        servers = _language_servers(config, builder, clock)
        config.frontend.tls.check_files()
        self._media = _media_source(config.frontend)
        self._responses = ResponseStore(config.frontend.responses) if config.frontend.responses.response_store else None
        self._socket = listener or listen(config.frontend.http)
        self._sockets = [self._socket, *([own_listener] if own_listener else [])]
        self.channel = _open_channel(config, clock, config.cluster.secret(), self._socket)
        self.router = Router(
            address=self.channel.address,
            send=self.channel.send,
            disconnect=self.channel.disconnect,
            identity=builder.identity,
            admission=config.frontend.admission,
            lease=config.lease,
            expects_encoders=expects_encoders and family_of(load_config(config.model)).takes_media,
            open_collector=partial(_open_collector, config, self.channel.address, clock),
            open_sender=partial(_open_sender, config, self.channel.address, clock),
            servers=servers,
            clock=clock,
        )
        self._log, self._traces = _open_log(config.observe), _open_traces(config.observe.otlp_traces_endpoint)
        self.api = ApiContext(
            model_name=config.frontend.http.served_model_name or config.model.name,
            router=self.router,
            prompt_builder=builder,
            tokenizer=builder.tokenizer,
            media=self._media,
            uuid_cache=UuidMediaCache(config.frontend.media.mm_uuid_cache_mb * 2**20, clock),
            generation_defaults=GenerationDefaults.load(config.model),
            grammars=GrammarChecker(config.model),
            frontend=config.frontend,
            # traces first: they give a request its trace id
            observers=tuple(one for one in (self._traces, self._log, _open_recorder(config.observe)) if one),
            ui_trace_url=config.observe.ui_trace_url,
            responses=self._responses,
            among=among,
        )
        self._server = HttpServer(_http_settings(self.api, config.frontend))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Where the HTTP server listens."""
        return url_of(self._socket, self._config.frontend.tls)

    @property
    def control(self) -> str:
        """``HOST:PORT`` where instances join."""
        return self.channel.address.removeprefix("tcp://")

    def debug_state(self) -> FrontendState:
        return FrontendState(len(self._server.server_state.tasks), self._media.web.num_fetches, self._socket)

    async def __aenter__(self) -> "Frontend":
        asyncio.get_running_loop().add_reader(self.channel.fileno(), self._take_messages)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._serve())]
        self._taking_over = asyncio.create_task(self._take_over())
        if self.router.servers is not None:
            self.router.servers.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_messages()  # a supervisor may just have reported that the service ends
        ticking, serving = self._tasks
        self.router.draining = self._server.should_exit = True
        self.api.viewers.end()
        if not self._server.started:
            serving.cancel()
        asyncio.get_running_loop().remove_reader(self.channel.fileno())
        # requests that are still running get an error, not a stream that breaks off
        self.router.end_all(InstanceLost("the service has ended"))
        # a frontend that is restarted alone leaves its instances to its successor
        leaves_instances = self._supervised or self._config.lease.leave_instances
        if self.router.launcher_view.stopping or self._handed_over or not leaves_instances:
            self._tell_instances(FrontendEnding(self.channel.address))
        for lease in self.router.membership:
            self.router.handle(Deregister(lease.address, resets=lease.resets))
        for task in (ticking, self._taking_over):
            task.cancel()
        await asyncio.gather(*self._tasks, self._taking_over, return_exceptions=True)
        # responses that the server has cancelled still have to release their requests
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)
        if self.router.servers is not None:
            await self.router.servers.close()
        self._media.web.close()
        self.api.executor.close()
        self.api.grammars.close()
        if self._responses:
            await asyncio.to_thread(self._responses.close)
        for listener in self._sockets:
            listener.close()
        self.router.close()
        self.channel.close()
        if self._traces:
            await asyncio.to_thread(self._traces.close)
        if self._log:
            self._log.close()
        if self.api.recorder:
            self.api.recorder.close()

    async def drain(self) -> None:
        """Finish the requests that run, up to the drain timeout, and admit no others. A frontend that has a successor
        rejects none, and ends the connections that it has. It accepts no others where its supervisor keeps the socket
        open; elsewhere it does, since a balancer may still send some."""
        self._take_messages()  # a supervisor may just have reported that the service ends
        self.api.viewers.end()
        if self._supervised and not self.router.launcher_view.stopping and self._server.started:
            log.info("SIGTERM: leaving new connections to the next frontend; finishing the requests that are running")
            ending = self._hand_over()
        elif self._config.lease.leave_instances and self._server.started:
            log.info("SIGTERM: leaving the instances to the next frontend; finishing the requests that are running")
            self.router.leaving = True
            ending = self._leave()
        else:
            log.info("SIGTERM: rejecting new requests; finishing those that are running")
            self.router.draining = True
            ending = self._wait_until_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending, self._config.lease.drain_timeout)

    async def _hand_over(self) -> None:
        """Close the listening socket, which the supervisor keeps open, and every connection after its next response.
        Instances register with the next frontend as soon as there is one, so that it can serve while this one finishes.
        Until then those that start join this one."""
        closing = asyncio.create_task(self._server.end())
        try:
            while not closing.done() or self._is_busy:
                self._leave_control_addresses()
                await asyncio.sleep(TICK / 2)
            await closing
        finally:
            closing.cancel()
            self._leave_control_addresses(at_once=True)

    def _leave_control_addresses(self, *, at_once: bool = False) -> None:
        """Leave them to the next frontend, if a supervisor has replaced this one, or ``at_once``."""
        is_replaced = self.channel.address in self.router.launcher_view.finishing(self.router.clock.now())
        if self._handed_over or not self._taken or not (at_once or is_replaced):
            return
        self._taking_over.cancel()
        for where in self._taken:
            self.channel.stop_listening(where)
        self._handed_over = True
        self._tell_instances(HandingOver(self.channel.address))

    async def _leave(self) -> None:
        """Answer what still comes, on connections that close after it, until nothing runs; then accept no others."""
        await self._server.end_connections()
        await self._wait_until_idle()
        await self._server.end()
        await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        while self._is_busy:
            await asyncio.sleep(TICK / 2)

    @property
    def _is_busy(self) -> bool:
        # a request may have ended while the HTTP server is still sending its response
        return bool(self.router.num_requests or self._server.server_state.tasks)

    async def _serve(self) -> None:
        """Accept connections, once instances that run already have joined."""
        if self._awaits_instances:
            began = asyncio.get_running_loop().time()
            while self.router.launcher_view.standby or not self.router.availability.can_serve:
                if not self.router.launcher_view.standby and asyncio.get_running_loop().time() > began + MAX_WAIT:
                    break
                await asyncio.sleep(TICK / 5)
        await self._server.serve(self._sockets)

    def _take_messages(self) -> None:
        for message in self.channel.drain():
            try:
                self.router.handle(message)
            except Exception:  # a message that fails must not affect the others
                log.exception("couldn't handle %s", type(message).__name__)
        if self.channel.pending and not self._server.should_exit:  # the descriptor doesn't signal what is left
            asyncio.get_running_loop().call_soon(self._take_messages)

    async def _take_over(self) -> None:
        """Listen at the other control addresses as soon as they are free."""
        for where in self._takes_over:
            while not self.channel.listen_too(where):
                await asyncio.sleep(TICK / 5)
            self._taken.append(where)

    def _tell_instances(self, message: FrontendEnding | HandingOver) -> None:
        for lease in self.router.membership:
            with contextlib.suppress(TriptychError):  # others must hear of it, even if one is unreachable
                self.channel.send(lease.address, message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._take_messages()
            try:
                self.router.tick()
            except Exception:  # leases and deadlines must still be checked
                log.exception("the router's tick failed")


def _http_settings(api: ApiContext, config: FrontendConfig) -> uvicorn.Config:
    return uvicorn.Config(
        add_security(create_app(api), config),
        ssl_certfile=config.tls.ssl_certfile or None,
        ssl_keyfile=config.tls.ssl_keyfile or None,
        http=BoundedHttp,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=LAST_RESPONSES,
    )


def _open_channel(config: ServeConfig, clock: Clock, secret: bytes | None, listener: socket.socket) -> Channel:
    """Return the frontend's channel. Raises StartError, with ``listener`` closed, if its port isn't free."""
    try:
        return Channel(clock, config.cluster.cluster_host, config.frontend.http.control_port, secret)
    except BadAddress as error:
        listener.close()
        raise StartError(str(error)) from None


def _open_collector(config: ServeConfig, address: Address, clock: Clock, layout: RowLayout, send: Send) -> RowCollector:
    """Return this frontend's consumer of rows, as ``OpenCollector``."""
    always = config.transfer.checksum == "always"
    fabrics = open_fabrics(config.transfer, config.cluster.cluster_host, clock)
    try:
        return RowCollector(layout, address, send, fabrics=fabrics, check_always=always, clock=clock)
    except BaseException:
        for fabric in fabrics:
            fabric.close()
        raise


def _open_sender(config: ServeConfig, address: Address, clock: Clock, send: Send) -> Sender:
    """Return this frontend's producer of rows, as ``OpenSender``."""
    fabrics = open_fabrics(config.transfer, config.cluster.cluster_host, clock)
    return Sender({fabric.name: fabric for fabric in fabrics}, address, send, clock=clock)


def _language_servers(config: ServeConfig, builder: PromptBuilder, clock: Clock) -> Servers | None:
    """Return the servers that answer, or None if instances do."""
    if not config.frontend.engines.urls:
        return None
    if not builder.model_type.startswith(FAMILIES):
        raise ConfigError(f"--engine: vLLM takes no rows of {builder.model_type}; it does of {', '.join(FAMILIES)}")

    def check_root(root: str) -> str:
        """Compare the checkpoint at a path of this machine."""
        folder = Path(root)
        try:
            if not folder.is_absolute() or folder == config.model or not (folder / "config.json").is_file():
                return ""
            return builder.identity.difference(identity_of(folder))
        except OSError as error:
            raise CheckpointError(f"{root}: {error}") from None

    probe = Probe(PROBE_TEXT, builder.tokenizer.encode(PROBE_TEXT), check_root)
    return Servers(config.frontend.engines, probe, hold=config.frontend.admission.restart_hold, clock=clock)


def _prompt_builder(config: ServeConfig) -> PromptBuilder:
    return PromptBuilder(
        config.model,
        config.engine.max_model_len or None,
        _media_caps(config.frontend.media),
        reasoning_parser=config.frontend.http.reasoning_parser,
        tool_call_parser=config.frontend.http.tool_call_parser,
    )


def _media_caps(config: MediaConfig) -> MediaCaps:
    return MediaCaps(
        config.max_image_pixels,
        config.max_request_pixels,
        config.max_item_tokens,
        VideoLimits(config.max_video_seconds, config.max_video_gigapixels),
        AudioLimits(config.max_audio_seconds, config.max_audio_gigasamples),
    )


def _media_source(config: FrontendConfig) -> MediaSource:
    """Return where media comes from. Raises ConfigError for invalid hosts or an invalid folder."""
    fetch, media = config.fetch, config.media
    limits = WebLimits(fetch.media_fetch_timeout, min(fetch.media_fetch_timeout, WebLimits.idle_seconds))
    return MediaSource(
        web=WebFetcher(AllowedHosts(fetch.allowed_media_domains), fetch.networks, limits),
        folder=MediaFolder(fetch.allowed_local_media_path) if fetch.allowed_local_media_path else None,
        limits=MediaLimits(
            max_bytes=media.max_file_mb * 2**20,
            max_total_bytes=media.max_media_mb * 2**20,
        ),
    )


def _open_recorder(observe: ObserveConfig) -> TraceRecorder | None:
    return TraceRecorder(observe.record) if observe.record else None


def _open_log(observe: ObserveConfig) -> RequestLog | None:
    return RequestLog(observe.request_log_file) if observe.enable_log_requests else None


def _open_traces(endpoint: str) -> "Traces | None":
    """Return the exporter, or None without an endpoint. Raises StartError when the extra isn't installed."""
    if not endpoint:
        return None
    try:
        from triptych.observe.traces import Traces
    except ImportError:
        raise StartError("--otlp-traces-endpoint needs another package: pip install '.[otel]' in a checkout") from None
    return Traces(endpoint)
