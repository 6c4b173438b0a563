"""Images that clients sent once under a name of their own, to refer to them later."""

from collections import OrderedDict


class NamedMedia:
    """The bytes most recently used, at most ``max_bytes`` of them. A name means something within its ``scope`` alone:
    nobody can refer to what another sent."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self.num_bytes = 0

    def put(self, scope: str, name: str, data: bytes) -> None:
        """Remembers the data, in place of what was known by that name."""
        self._forget((scope, name))
        if len(data) > self._max_bytes:
            return
        self._data[scope, name] = data
        self.num_bytes += len(data)
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._data)))

    def get(self, scope: str, name: str) -> bytes | None:
        if (data := self._data.get((scope, name))) is not None:
            self._data.move_to_end((scope, name))
        return data

    def _forget(self, key: tuple[str, str]) -> None:
        self.num_bytes -= len(self._data.pop(key, b""))
