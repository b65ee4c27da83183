"""Server of the authenticated store, in rank 0's process.

It answers connections that `comm.handshake` has authenticated, and does not listen on a socket itself.
It is one C++ thread (csrc/store_server.cpp) that needs no interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from collections.abc import Callable
from typing import Any

from frontier_llm.libraries import load_library


@functools.cache
def _library() -> ctypes.CDLL:
    store = ctypes.c_void_p
    functions: dict[str, tuple[Any, list[Any]]] = {
        "fl_store_open": (store, []),
        "fl_store_serve": (None, [store, ctypes.c_int]),
        "fl_store_close": (None, [store]),
    }
    return load_library("libstore_server.so", functions)


class NativeServer:
    """Answers requests on its connections until it is closed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._server = library.fl_store_open()

    def serve(self, connection: socket.socket) -> None:
        """Answer all requests on this connection from now on."""
        if self._server is None:
            connection.close()
        else:
            self._library.fl_store_serve(self._server, connection.detach())

    def close(self) -> None:
        """End all connections."""
        server = self._server
        self._server = None
        if server is not None:
            self._library.fl_store_close(server)


def open_server() -> tuple[Callable[[socket.socket], None], Callable[[], None]]:
    """Open a new, empty store. Returns (function that serves a connection, function that closes the store).

    Raises BackendError if the server has not been built.
    """
    server = NativeServer(_library())
    return server.serve, server.close
