"""Sends the heartbeats of one rank to TCPStore by a C++ thread (csrc/heartbeat.cpp) that needs no interpreter lock.

The connection uses TCPStore's wire protocol: the magic number of a client, then SET requests.
"""

from __future__ import annotations

import ctypes
import functools
import json
import socket
import struct
import threading
from typing import Any

import torch.distributed as dist

from frontier_llm.libraries import load_library

# first bytes that a client sends to TCPStore: c10d::detail::QueryType::VALIDATE and validationMagicNumber
VALIDATE = 0
MAGIC = 0x3C85F7CE
KEY_PREFIX = "/"  # TCPStore's clients add this prefix to each key
CONNECT_S = 10.0
LATE_FACTOR = 1.5  # without an `update` for this factor times `period_s`, the thread sends the last heartbeat again


@functools.cache
def _library() -> ctypes.CDLL:
    sender = ctypes.c_void_p
    functions: dict[str, tuple[Any, list[Any]]] = {
        "fl_heartbeat_open": (sender, [ctypes.c_int, ctypes.c_char_p, ctypes.c_double]),
        "fl_heartbeat_update": (None, [sender, ctypes.c_char_p]),
        "fl_heartbeat_sent": (ctypes.c_int64, [sender]),
        "fl_heartbeat_failed": (ctypes.c_int, [sender]),
        "fl_heartbeat_close": (None, [sender]),
    }
    return load_library("libheartbeat.so", functions)


class Heartbeats:
    """Sends the heartbeats of one rank to one key of TCPStore."""

    def __init__(self, address: tuple[str, int], key: str, period_s: float) -> None:
        """Connect to TCPStore. `period_s` is the usual time between two calls of `update`.

        Raises BackendError if the library has not been built, OSError if the store cannot be reached.
        """
        library = _library()
        connection = socket.create_connection(address, timeout=CONNECT_S)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(struct.pack("<BI", VALIDATE, MAGIC))
        self._library = library
        self._lock = threading.Lock()
        self._sender = library.fl_heartbeat_open(
            connection.detach(),
            f"{KEY_PREFIX}{key}".encode(),
            LATE_FACTOR * period_s,
        )

    def update(self, heartbeat: dict[str, Any]) -> None:
        """Send `heartbeat` now. The number of heartbeats sent so far is added as "posts".

        Raises DistStoreError if the store is gone.
        """
        text = json.dumps(heartbeat).removesuffix("}")
        with self._lock:
            is_closed = self._sender is None
            if not is_closed:
                self._library.fl_heartbeat_update(self._sender, f'{text}, "posts": '.encode())
            if is_closed or self._library.fl_heartbeat_failed(self._sender):
                raise dist.DistStoreError("heartbeats cannot be sent: the job's store has ended")

    @property
    def sent(self) -> int:
        """Number of heartbeats sent so far."""
        return int(self._library.fl_heartbeat_sent(self._sender))

    def close(self) -> None:
        """Stop the thread and close its connection."""
        with self._lock:
            sender = self._sender
            self._sender = None
        if sender is not None:
            self._library.fl_heartbeat_close(sender)
