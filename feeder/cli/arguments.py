"""Types of `argparse`, and words, that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from feeder.errors import ConfigError


def address(text: str) -> str:
    """An address, checked; wrong usage where it is none."""
    # Imported when it is needed: `feeder --help` loads no ZeroMQ.
    from feeder.service.net.addresses import parse

    try:
        parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def count(low: float, high: float | None = None) -> Callable[[str], int]:
    """A type: a whole number from `low` to `high`."""
    wanted = f"a whole number from {low} " + ("on" if high is None else f"to {high}")

    def number(text: str) -> int:
        # int() takes signs, spaces and underscores too, which nobody means here.
        if not text.isdecimal() or not low <= int(text) <= (high or int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def check_resume(where: Any) -> None:
    """Raise `ConfigError` where a file that is to be gone on from is not there: to start the
    command again does not help."""
    is_path = where is not None and "://" not in str(where) and str(where) != "latest"
    if is_path and not os.path.lexists(where):
        raise ConfigError(f"--resume is {str(where)!r}, which is not there; name another")


MOST_RANGES = 10


def in_words(ranges: Sequence[Sequence[int]]) -> str:
    """Ranges of numbers, each from and to; of very many the first ones."""
    told = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:MOST_RANGES])
    return told + " and more" * (len(ranges) > MOST_RANGES)
