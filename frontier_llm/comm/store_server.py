"""The store itself, in rank 0's process: it answers connections that `comm.door` has let in and listens nowhere.

It is C++ (csrc/store_server.cpp), one thread that needs no interpreter lock: 3,072 ranks that post four notices a second would take half of the time that rank 0's
Python has. Where it has not been built a relay over torch's in-process store does the same, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from frontier_llm.comm.relay import Relay
from frontier_llm.errors import BackendError
from frontier_llm.libraries import load_library


@functools.cache
def _library() -> ctypes.CDLL | None:
    store = ctypes.c_void_p
    functions: dict[str, tuple[Any, list[Any]]] = {
        "fl_store_open": (store, []),
        "fl_store_serve": (None, [store, ctypes.c_int]),
        "fl_store_close": (None, [store]),
    }
    with suppress(BackendError):
        return load_library("libstore_server.so", functions)
    return None


class NativeServer:
    """Answers its connections until it is closed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._server = library, library.fl_store_open()

    def serve(self, connection: socket.socket) -> None:
        """Take a connection over."""
        if self._server is None:
            connection.close()
        else:
            self._library.fl_store_serve(self._server, connection.detach())

    def close(self) -> None:
        """End all connections."""
        server, self._server = self._server, None
        if server is not None:
            self._library.fl_store_close(server)


def open_server() -> tuple[Callable[[socket.socket], None], Callable[[], None]]:
    """(what takes a connection over, what ends it all) of a new, empty store."""
    library = _library()
    if library is None:
        return Relay(dist.HashStore()).serve, lambda: None
    server = NativeServer(library)
    return server.serve, server.close
