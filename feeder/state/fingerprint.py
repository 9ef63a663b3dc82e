"""Fingerprints: the declared fields of a feed that must be equal for a position to fit it.

A token carries only the digest, a snapshot carries the fields, so that an error can name the ones
that differ. The data are not in it: two feeds with equal settings and other files have one
fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from feeder.state import codec


def fingerprint_digest(fields: Mapping[str, Any]) -> bytes:
    """The 8 bytes by which a token knows its feed."""
    # Sorted: the order in which fields were added is no setting.
    digest: bytes = xxhash.xxh3_64_digest(codec.pack(sorted(fields.items())))
    return digest


def check_fingerprint(fingerprint: object) -> None:
    """Raise `TypeError` or `ValueError` where a value that came from elsewhere is no fingerprint:
    a dict of texts, whose values nest no deeper than a recursion reaches."""
    if not isinstance(fingerprint, dict) or not all(type(name) is str for name in fingerprint):
        raise TypeError(f"a {type(fingerprint).__name__}, expected a dict with texts as keys")
    # An error text would print it: where that recursion fails, it has to fail here and by name.
    try:
        repr(fingerprint)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each field in which a stored fingerprint differs from the feed's own, in words."""
    return [
        f"{name}: {then.get(name)!r} then, {now.get(name)!r} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
