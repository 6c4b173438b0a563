"""The process that speaks to Mooncake Store for one encode instance.

Mooncake's client holds the interpreter while it connects and closes, which takes minutes without a master, and its
calls can't be cancelled. A process of its own can be killed.
"""

import ctypes
import importlib
import os
import signal
import socket
import sys
from typing import Any

from triptych.encode.pool_protocol import MAX_BODY, PoolReply, PoolRequest, receive, send

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Connect, and answer the requests of the parent process until it ends."""
    descriptor, host, master, segment = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # this process may be stuck when its parent ends
    with socket.socket(fileno=int(descriptor)) as connection:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        code = store.setup(host, "P2PHANDSHAKE", int(segment), MAX_BODY, "tcp", "", master)
        send(connection, PoolReply(int(code)))
        try:
            while True:
                request, values = receive(connection, PoolRequest)
                reply, found = _answer(store, request, values)
                send(connection, reply, found)
        except (EOFError, OSError):
            os._exit(0)  # closing takes seconds, and the master notices


def _answer(store: Any, request: PoolRequest, values: list[bytearray]) -> tuple[PoolReply, list[bytes]]:
    match request.act:
        case "exist":
            codes = store.batch_is_exist(request.keys)
            return PoolReply(min(0, *codes), [code == 1 for code in codes]), []
        case "get":
            (key,) = request.keys  # values of several needn't fit in memory
            value = bytes(store.get(key))
            return PoolReply(sizes=[len(value)]), [value]
        case "put":
            codes = [store.put(key, value) for key, value in zip(request.keys, values, strict=True)]
            return PoolReply(min(0, *codes)), []
        case "remove":
            for key in request.keys:
                store.remove(key, True)  # even if it is being read
            return PoolReply(), []


if __name__ == "__main__":
    main()
