"""A server that speaks S3, on a port of its own: `python -m objects.server`.

It says host and port, and ends when its input does. It answers one request at a time: moto looks
whether an object is there and writes it in two steps, so that of two writers at once both would be
told that they were first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

if __name__ == "__main__":
    answer, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_by_one(environ: Any, start_response: Any) -> Iterable[bytes]:
        with lock:
            return answer(environ, start_response)  # type: ignore[no-any-return]

    server = make_server(
        "127.0.0.1", 0, one_by_one, threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever).start()
    print(server.host, server.port, flush=True)
    sys.stdin.read()
    server.shutdown()
