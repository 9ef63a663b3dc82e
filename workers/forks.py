"""What a forked child gives up: the threads, locks and sockets that are its parent's.

A child has one thread, and copies of locks that threads of the parent may have held. So whatever
has a thread, a lock or a socket names here what it does in a child, one function each, and all of
them run right after the fork, before any code that could wait for such a lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

logger = logging.getLogger("feeder")

# By the object that is to give something up, the function that does it. Any thread adds and removes
# by one operation; the thread that has forked is alone. Not of `WeakMethod`s, whose callback fails
# where they and their objects go together (Python 3.11).
_functions: WeakKeyDictionary[object, Callable[[Any], None]] = WeakKeyDictionary()


def call_in_child(method: Callable[[], None]) -> None:
    """Call a bound method in forked children, for as long as its object lives; the object that was
    named first comes first. No other thread runs there, and a lock may be held for ever.

    What a child has given up its own children never had, so the child forgets the method. An object
    that the child goes on to use names its method again.
    """
    bound: Any = method
    _functions[bound.__self__] = bound.__func__


def call_no_more(held: object) -> None:
    """Forget an object, which is closed. Harmless when done before."""
    _functions.pop(held, None)


def _after_fork() -> None:
    found = list(_functions.items())
    _functions.clear()
    for held, give_up in found:
        # One that fails must not keep the others from it.
        try:
            give_up(held)
        except Exception:
            logger.exception("a forked child does not let go of what is its parent's")


os.register_at_fork(after_in_child=_after_fork)
