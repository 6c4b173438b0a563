"""Media that clients sent once under a name of their own, to refer to them later."""

from collections import OrderedDict

PER_ITEM = 512
"""Bytes that an item counts for beside its name and its data: Python's objects and tables take 390 for one of two bytes
in a scope of its own. If they didn't count, many small ones would take far more than ``max_bytes``."""


class NamedMedia:
    """The media most recently used, which take at most ``max_bytes`` together with their names. A name means something
    within its ``scope`` alone: nobody can refer to what another sent. Nor does anybody's media make another's be
    forgotten who has less than its share: what goes first is the item longest unused of scopes that have more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """By scope and name, the longest unused first."""
        self._bytes: dict[str, int] = {}
        self.num_bytes = 0

    def put(self, scope: str, name: str, data: bytes) -> None:
        """Remembers the data, in place of what was known by that name; not if it is empty, or alone is too large."""
        key = (scope, name)
        self._forget(key)
        if not data or _size(name, data) > self._max_bytes:
            return
        self._items[key] = data
        self._add(scope, _size(name, data))
        while self.num_bytes > self._max_bytes:
            self._forget(self._first_to_go(key))

    def get(self, scope: str, name: str) -> bytes | None:
        if (data := self._items.get((scope, name))) is not None:
            self._items.move_to_end((scope, name))
        return data

    def _first_to_go(self, newest: tuple[str, str]) -> tuple[str, str]:
        """What is new goes only if all others are of scopes that have no more than their share."""
        share = self._max_bytes / len(self._bytes)
        return next((key for key in self._items if key != newest and self._bytes[key[0]] > share), newest)

    def _forget(self, key: tuple[str, str]) -> None:
        if (data := self._items.pop(key, None)) is not None:
            self._add(key[0], -_size(key[1], data))

    def _add(self, scope: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes[scope] = self._bytes.get(scope, 0) + num_bytes
        if not self._bytes[scope]:
            del self._bytes[scope]


def _size(name: str, data: bytes) -> int:
    return len(data) + len(name) + PER_ITEM
