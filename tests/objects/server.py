"""A server that speaks S3, on a port of its own: `python -m objects.server`.

It says host and port, and ends when its input does.
"""

from __future__ import annotations

import sys

from moto.server import ThreadedMotoServer

if __name__ == "__main__":
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(*server.get_host_and_port(), flush=True)
    sys.stdin.read()
    server.stop()
