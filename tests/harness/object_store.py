"""A local S3 server, and a connection to it that can be cut."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Wire:
    """A TCP proxy. After `cut_after` bytes from clients it closes every connection, and refuses new ones."""

    def __init__(self, port: int) -> None:
        self.cut_after: int | None = None
        self.bytes_from_clients = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_cut(self) -> bool:
        return self.cut_after is not None and self.bytes_from_clients >= self.cut_after

    def cut(self, after: int) -> None:
        """Let the proxy cut the connection after this number of further bytes."""
        self.bytes_from_clients = 0
        self.cut_after = after

    def mend(self) -> None:
        self.cut_after = None

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._copy, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    self.bytes_from_clients += len(data)
                if self.is_cut:
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "HUSH-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def s3_server(bucket: str) -> Iterator[Wire]:
    """Start a server with an empty bucket. Clients in this process find the server by environment variables."""
    import fsspec
    from fsspec.registry import _registry
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    wire = Wire(port)
    before = dict(os.environ)
    os.environ.update(VARIABLES, AWS_ENDPOINT_URL=f"http://127.0.0.1:{wire.port}")
    retries = S3FileSystem.retries
    S3FileSystem.retries = 1  # a cut connection is reported at once
    try:
        fsspec.filesystem("s3").mkdir(bucket)
        yield wire
    finally:
        S3FileSystem.retries = retries
        S3FileSystem.clear_instance_cache()
        _registry.pop("s3", None)  # fsspec forgets this entry, so that other tests find the state before the first use
        os.environ.clear()
        os.environ.update(before)
        wire.close()
        server.stop()
