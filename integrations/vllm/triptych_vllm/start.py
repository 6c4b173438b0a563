"""Starts the thread that fetches rows."""

from collections.abc import Callable

from triptych.clock import Clock, SystemClock
from triptych.messages.channel import Channel
from triptych.messages.codec import Send
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout
from triptych.transfer.collector import RowCollector
from triptych.transfer.fabrics.opening import open_fabrics
from triptych.types import Address
from triptych_vllm.row_consumer import ConsumerThread, EngineRows
from triptych_vllm.settings import ConnectorSettings


def start_consumer(
    settings: ConnectorSettings,
    *,
    engine: str,
    identify: Callable[[], ModelIdentity],
    width: int,
    dtype: str,
    clock: Clock | None = None,
) -> ConsumerThread:
    """Start a thread that fetches rows of ``width`` elements, which the engine has in a dtype. ``engine`` is its
    name and version; ``identify`` is as in EngineRows.

    Raises ConfigError and BadAddress for settings that can't be used."""
    clock = clock or SystemClock()
    channel = Channel(clock, settings.host, secret=settings.cluster.secret())
    name = settings.name or f"{engine.split(maxsplit=1)[0]}-{channel.address.rpartition(':')[2]}"
    rows = EngineRows(name, engine, identify, width, dtype)

    def open_collector(layout: RowLayout, send: Send) -> RowCollector:
        return _open_collector(settings, channel.address, clock, layout, send)

    return ConsumerThread(settings.frontends, rows, channel, open_collector, clock)


def _open_collector(
    settings: ConnectorSettings, address: Address, clock: Clock, layout: RowLayout, send: Send
) -> RowCollector:
    fabrics = open_fabrics(settings.transfer, settings.host, clock)
    try:
        return RowCollector(layout, address, send, fabrics=fabrics, pool_bytes=settings.pool_mb * 2**20, clock=clock)
    except BaseException:
        for fabric in fabrics:
            fabric.close()
        raise
