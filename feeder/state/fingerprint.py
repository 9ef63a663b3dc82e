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


_MOST_SHOWN = 200
"""Characters of a field in words: a list of all files would say no more."""


def in_words(fingerprint: Mapping[str, Any]) -> str:
    """The fields as lines of a text, which a message can hold."""
    # As who reads it from a message has it: tuples are lists there.
    fields = codec.unpack(codec.pack(dict(fingerprint)))
    return "\n".join(f"{name}: {value!r}"[:_MOST_SHOWN] for name, value in fields.items())


def differences_in_words(then: str, now: str) -> list[str]:
    """What differs between two of these texts."""
    olds, news = (dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
                  for text in (then, now))  # fmt: skip
    return [
        f"{name}: {olds.get(name, 'left out')} then, {news.get(name, 'left out')} now"
        for name in {**olds, **news}
        if olds.get(name) != news.get(name)
    ]


def epochs_in_words(epochs: int | None) -> str:
    """How many epochs a stream has, as a text."""
    return "without end" if epochs is None else str(epochs)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each field in which a stored fingerprint differs from the feed's own, in words."""
    return [
        f"{name}: {then.get(name)!r} then, {now.get(name)!r} now"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]


def order_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The same of the order in which mixtures were given their sources: records are drawn in it,
    and no value tells it, since the fields of one source stand before those of the next."""
    olds, news = (_names_of_mixtures(fields) for fields in (then, now))
    return [
        f"{mixture}names: {olds[mixture]} then, {news[mixture]} now"
        for mixture in olds.keys() & news.keys()
        if olds[mixture] != news[mixture] and sorted(olds[mixture]) == sorted(news[mixture])
    ]


def _names_of_mixtures(fields: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of each mixture, by what its fields begin with, the names of its sources."""
    found: dict[str, list[str]] = {
        field.removesuffix("source"): []
        for field, kind in fields.items()
        if field.endswith(".source") and kind == "mix"
    }
    for mixture, names in found.items():
        for field in fields:
            below = field.removeprefix(mixture)
            if below == field or not below.endswith(".source"):
                continue
            name = below.removesuffix(".source")
            # Otherwise it is a part of the source before.
            if not (names and name.startswith(f"{names[-1]}.")):
                names.append(name)
    return found
