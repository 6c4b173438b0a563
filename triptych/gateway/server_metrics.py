"""Prometheus metrics of language servers of other projects."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych.gateway.servers import Servers, ServerState
from triptych.observe.metrics import PREFIX

SERVER_UP, SERVER_RUNNING, SERVER_LOSSES = "server_up", "server_requests_running", "server_losses"
SERVER_SERIES = {
    SERVER_UP: "1 while a language server serves",
    SERVER_RUNNING: "requests that a language server has",
    SERVER_LOSSES: "times that a language server was lost",
}
"""The metrics of a server, and their meanings."""
WAITING, WAITING_MEANING = "server_requests_waiting", "requests that wait for a language server"
SERVER_LABELS = ("server",)


class ServerCollector(Collector):
    """Collects the samples of all language servers."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        up, running = (
            GaugeMetricFamily(PREFIX + name, SERVER_SERIES[name], labels=SERVER_LABELS)
            for name in (SERVER_UP, SERVER_RUNNING)
        )
        losses = CounterMetricFamily(PREFIX + SERVER_LOSSES, SERVER_SERIES[SERVER_LOSSES], labels=SERVER_LABELS)
        for server in self._servers:
            up.add_metric([server.name], float(server.state is ServerState.SERVING))
            running.add_metric([server.name], server.running)
            losses.add_metric([server.name], server.losses)
        waiting = GaugeMetricFamily(PREFIX + WAITING, WAITING_MEANING, value=self._servers.num_waiting)
        yield from (up, running, losses, waiting)
