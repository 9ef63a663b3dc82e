"""A wire of so many bytes a second between a consumer and its server: a proxy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

PIECE_BYTES = 16 * 1024


def _pump(
    source: socket.socket, target: socket.socket, bytes_per_s: float, over: threading.Event
) -> None:
    with suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            target.sendall(data)
            if over.wait(len(data) / bytes_per_s):
                break
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_wire(address: str, bytes_per_s: float) -> Iterator[str]:
    """Yield the address of a proxy that lets the server at `address` send so much a second."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    over = threading.Event()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(10.0)
        threads: list[threading.Thread] = []

        def run() -> None:
            with suppress(OSError):
                near, _ = listener.accept()
                # Small buffers: what waits at a wire waits at the server, and not on the way.
                near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
                far = socket.create_connection((host, int(port)))
                for sock in (near, far):
                    stack.callback(sock.close)
                back = threading.Thread(target=_pump, args=(near, far, 1e12, over))
                threads.append(back)
                back.start()
                _pump(far, near, bytes_per_s, over)

        proxy = threading.Thread(target=run)
        proxy.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            proxy.join(10.0)
            for thread in threads:
                thread.join(10.0)
