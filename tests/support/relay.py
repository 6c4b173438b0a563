"""A relay between two ends of a TCP connection, which can lose what it is given and break the connection."""

import contextlib
import selectors
import socket
import struct
import threading
from types import TracebackType


class Relay:
    """Listens, and passes each connection's bytes on to ``target`` (HOST, PORT), and the answers back."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.losing = False
        """Whether bytes on the way to the target are lost."""
        self.num_lost = 0
        """Bytes that were lost."""
        self.num_connections = 0
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.cut()
        self._listener.close()
        self._selector.close()

    def cut(self) -> None:
        """Reset all connections, and lose no more."""
        with self._lock:
            self.losing = False
            for one in self._pairs:
                self._reset(one)
            self._pairs.clear()

    def _run(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.05):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._pairs:
                        assert isinstance(key.fileobj, socket.socket)
                        self._pass_on(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        for one, other in ((client, server), (server, client)):
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ, one is client)
        self.num_connections += 1

    def _pass_on(self, one: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            if data := one.recv(2**16):
                if self.losing and self._selector.get_key(one).data:
                    self.num_lost += len(data)
                else:
                    self._pairs[one].sendall(data)
                return
        other = self._pairs.pop(one)
        del self._pairs[other]
        self._reset(one)
        self._reset(other)

    def _reset(self, one: socket.socket) -> None:
        self._selector.unregister(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
