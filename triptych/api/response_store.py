"""Responses that later requests can refer to, in an SQLite file, within bounds on bytes, number and age.

Each belongs to the API key that made it. Frontends may share the file: SQLite's locks order their writes."""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from triptych.config.responses import ResponsesConfig
from triptych.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 1
APPLICATION = 0x54726970
LOCK_TIMEOUT = 5.0
"""Seconds to wait for another process that writes."""
MAX_CHAIN = 1024
"""Responses that one may follow on."""
_SCHEMA = f"""
CREATE TABLE responses (
    number INTEGER PRIMARY KEY, scope TEXT NOT NULL, id TEXT NOT NULL, previous TEXT, created REAL NOT NULL,
    input BLOB NOT NULL, output BLOB NOT NULL, bytes INTEGER NOT NULL, UNIQUE (scope, id)
);
CREATE INDEX by_age ON responses (created);
CREATE INDEX by_scope ON responses (scope, number);
CREATE TABLE items (
    scope TEXT NOT NULL, id TEXT NOT NULL, response INTEGER NOT NULL, PRIMARY KEY (scope, id)
) WITHOUT ROWID;
CREATE INDEX items_of ON items (response);
CREATE TABLE held (scope TEXT PRIMARY KEY, rows INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER stored AFTER INSERT ON responses BEGIN
    INSERT INTO held VALUES (new.scope, 1, new.bytes)
    ON CONFLICT (scope) DO UPDATE SET rows = rows + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER deleted AFTER DELETE ON responses BEGIN
    UPDATE held SET rows = rows - 1, bytes = bytes - old.bytes WHERE scope = old.scope;
    DELETE FROM held WHERE scope = old.scope AND rows = 0;
    DELETE FROM items WHERE response = old.number;
END;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True)
class StoredResponse:
    """A response and the part of its conversation that its own request brought."""

    id: str
    previous: str | None
    input: bytes
    """A JSON array of items."""
    output: bytes
    """The response as JSON."""


class ResponseStore:
    """All calls run on a thread of the store's own, one after the other."""

    def __init__(self, config: ResponsesConfig) -> None:
        """Open the file, or create it for this user alone. Raises ConfigError."""
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        try:
            self._thread.submit(self._open).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"--response-store {config.response_store}: {error}") from None

    def close(self) -> None:
        self._thread.submit(self._database.close)
        self._thread.shutdown()

    async def put(self, scope: str, stored: StoredResponse, items: Sequence[str]) -> bool:
        """Store a response, with the ids of its items and its request's. Return whether that worked: an answer doesn't
        fail with the store."""
        try:
            return await self._run(lambda: self._put(scope, stored, items))
        except sqlite3.Error as error:
            log.warning("a response wasn't stored: %s", error)
            return False

    async def get(self, scope: str, name: str) -> StoredResponse | None:
        """Return a response. Raises Unavailable when the file can't be read."""
        return await self._read(lambda: self._row("scope = ? AND id = ?", scope, name))

    async def holding(self, scope: str, item: str) -> StoredResponse | None:
        """Return the response that an item belongs to. Raises Unavailable as ``get`` does."""
        where = "number = (SELECT response FROM items WHERE scope = ? AND id = ?)"
        return await self._read(lambda: self._row(where, scope, item))

    async def chain(self, scope: str, name: str, max_bytes: int) -> list[StoredResponse] | None:
        """Return a response and those that it follows on, the first one first; None if one isn't stored, or they have
        more than ``max_bytes`` or MAX_CHAIN members. Raises Unavailable as ``get`` does."""
        return await self._read(lambda: self._chain(scope, name, max_bytes))

    async def delete(self, scope: str, name: str) -> bool:
        """Delete a response and return whether it was there. Raises Unavailable as ``get`` does."""

        def delete() -> bool:
            with self._database:
                cursor = self._database.execute("DELETE FROM responses WHERE scope = ? AND id = ?", (scope, name))
            return cursor.rowcount > 0

        return await self._read(delete)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _read(self, work: Callable[[], T]) -> T:
        try:
            return await self._run(work)
        except sqlite3.Error as error:
            log.warning("stored responses can't be used: %s", error)
            raise Unavailable("stored responses can't be used at the moment") from None

    def _open(self) -> None:
        os.close(os.open(self._config.response_store, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(self._config.response_store, timeout=LOCK_TIMEOUT)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute(f"PRAGMA journal_size_limit = {2**26}")
            database.execute("BEGIN IMMEDIATE")  # another frontend may be creating the tables
            application = database.execute("PRAGMA application_id").fetchone()[0]
            version = database.execute("PRAGMA user_version").fetchone()[0]
            is_new = not database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            if is_new:
                for statement in _statements(_SCHEMA):
                    database.execute(statement)
            elif (application, version) != (APPLICATION, VERSION):
                raise sqlite3.DatabaseError("the file is of another program or of another version")
            database.commit()
        except BaseException:
            database.close()
            raise
        self._database = database

    def _put(self, scope: str, stored: StoredResponse, items: Sequence[str]) -> bool:
        size = len(stored.input) + len(stored.output)
        if size > self._config.response_store_mb * 2**20:
            log.warning("a response of %d bytes wasn't stored: --response-store-mb is too small", size)
            return False
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            row = (scope, stored.id, stored.previous, time.time(), stored.input, stored.output, size)
            number = self._database.execute(
                "INSERT INTO responses (scope, id, previous, created, input, output, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            ).lastrowid
            self._database.executemany(
                "INSERT OR REPLACE INTO items VALUES (?, ?, ?)", [(scope, item, number) for item in items]
            )
            self._evict()
        return True

    def _evict(self) -> None:
        oldest = time.time() - self._config.response_store_days * 86_400
        self._database.execute("DELETE FROM responses WHERE created < ?", (oldest,))
        while True:
            with closing(self._database.execute("SELECT sum(rows), sum(bytes) FROM held")) as cursor:
                rows, size = cursor.fetchone()
            if rows <= self._config.response_store_rows and size <= self._config.response_store_mb * 2**20:
                return
            self._database.execute(
                "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses WHERE scope = "
                "(SELECT scope FROM held ORDER BY bytes DESC LIMIT 1))"
            )

    def _row(self, where: str, *values: str) -> StoredResponse | None:
        oldest = time.time() - self._config.response_store_days * 86_400
        with closing(
            self._database.execute(
                f"SELECT id, previous, input, output FROM responses WHERE {where} AND created >= ?", (*values, oldest)
            )
        ) as cursor:
            row = cursor.fetchone()
        return StoredResponse(*row) if row else None

    def _chain(self, scope: str, name: str, max_bytes: int) -> list[StoredResponse] | None:
        chain: list[StoredResponse] = []
        following: str | None = name
        while following is not None:
            found = self._row("scope = ? AND id = ?", scope, following)
            if found is None or len(chain) == MAX_CHAIN:
                return None
            max_bytes -= len(found.input) + len(found.output)
            if max_bytes < 0:
                return None
            chain.append(found)
            following = found.previous
        return chain[::-1]


def _statements(script: str) -> list[str]:
    """Split a script, so that it runs within a transaction, which ``executescript`` would end."""
    statements, held = [], ""
    for part in script.split(";"):
        held += part + ";"
        if sqlite3.complete_statement(held):
            statements.append(held)
            held = ""
    return statements
