"""A TCP proxy in front of a server that loses what it is told to: an answer, a request, or all connections at once."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

_PIECE = 1 << 16


class LossyProxy:
    """Listens at `url` for the server at `target`.

    `lose` applies to the next request whose head holds `marked`, once: the `request` never arrives, or its `answer` is
    read and dropped; either way the connection closes.
    """

    def __init__(self, target: str, marked: bytes = b"/finish_weight_update") -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._marked = marked
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lose: Literal["request", "answer"] | None = None
        self.lost = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> LossyProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> int:
        """Shut down every connection. Returns how many there were."""
        with self._lock:
            sockets = list(self._open)
        for each in sockets:
            _shut_down(each)
        return len(sockets) // 2

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        with self._lock:
            self._open |= {client, server}
        dropping = threading.Event()
        back = threading.Thread(target=self._bring_back, args=(server, client, dropping), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while data := client.recv(_PIECE):
                if self._marked in data and (lose := self._loses()):
                    if lose == "request":
                        break
                    dropping.set()
                server.sendall(data)
        if not dropping.is_set():
            _shut_down(server)
        back.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _bring_back(self, server: socket.socket, client: socket.socket, dropping: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(_PIECE):
                if dropping.is_set():
                    break
                client.sendall(data)
        _shut_down(client)
        _shut_down(server)

    def _loses(self) -> str | None:
        with self._lock:
            lose, self.lose = self.lose, None
            self.lost += lose is not None
        return lose


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
