"""Resumes a feed in a process of its own, at the position that it reads, and tells its digest.

Arguments: form, pattern, settings as JSON.
"""

from __future__ import annotations

import json
import sys

from feeds import digest, drain
from fetches import make_fetch


def main(form: str, pattern: str, settings: str) -> None:
    """Write the digest of what the feed has left."""
    position = sys.stdin.buffer.read()
    rest = drain(make_fetch(form, pattern), resume=position, **json.loads(settings))
    sys.stdout.write(digest(rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
