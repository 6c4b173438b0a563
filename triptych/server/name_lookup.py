"""Resolves names without making the caller wait: a name server that doesn't answer takes many seconds."""

import ipaddress
import threading

from triptych.config import host_and_port
from triptych.errors import BadAddress
from triptych.messages.channel import endpoint
from triptych.types import Address


class NameLookup:
    """Resolves one ``HOST:PORT``, again and again. Used by one thread, which looks at ``result`` until it is there."""

    def __init__(self, host_port: str) -> None:
        self._host, self._port = host_and_port(host_port)
        self._thread: threading.Thread | None = None
        self.result: Address | BadAddress | None = None
        """The last answer; None before the first."""

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Look the host up, unless that is under way. ``result`` follows at once if it is an IP address."""
        try:
            ipaddress.ip_address(self._host)
        except ValueError:
            if not self.under_way:
                self._thread = threading.Thread(target=self._look_up, name="name lookup", daemon=True)
                self._thread.start()
        else:
            self._look_up()

    def _look_up(self) -> None:
        try:
            self.result = endpoint(self._host, self._port)
        except BadAddress as error:
            self.result = error
