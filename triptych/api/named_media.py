"""Images that clients sent once under a name of their own, to refer to them later."""

from collections import OrderedDict


class NamedMedia:
    """The bytes most recently used, at most ``max_bytes`` of them. A name means something within its ``scope`` alone:
    nobody can refer to what another sent. Nor does anybody's media make another's be forgotten who has fewer: what goes
    first is the oldest of the scope that has most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._scopes: dict[str, OrderedDict[str, bytes]] = {}
        self._bytes: dict[str, int] = {}
        self.num_bytes = 0

    def put(self, scope: str, name: str, data: bytes) -> None:
        """Remembers the data, in place of what was known by that name."""
        self._forget(scope, name)
        if len(data) > self._max_bytes:
            return
        self._scopes.setdefault(scope, OrderedDict())[name] = data
        self._add(scope, len(data))
        while self.num_bytes > self._max_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self._forget(most, next(iter(self._scopes[most])))

    def get(self, scope: str, name: str) -> bytes | None:
        known = self._scopes.get(scope)
        if known is None or (data := known.get(name)) is None:
            return None
        known.move_to_end(name)
        return data

    def _forget(self, scope: str, name: str) -> None:
        known = self._scopes.get(scope)
        if known is None or (data := known.pop(name, None)) is None:
            return
        self._add(scope, -len(data))
        if not known:
            del self._scopes[scope], self._bytes[scope]

    def _add(self, scope: str, num_bytes: int) -> None:
        self._bytes[scope] = self._bytes.get(scope, 0) + num_bytes
        self.num_bytes += num_bytes
