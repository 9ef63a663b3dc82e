"""When the last array over lent memory is gone, so that the memory may be written again.

A loan has a *root*: one object that all arrays over the memory refer to, and that nothing else
holds. NumPy lets a view of a view refer to the array at the bottom, and arrays of CuPy and DLPack
keep what they were given as the owner. So the root lives as long as any of them, and a weak
reference to the root tells when it goes. If the root is an array, it is made over a memoryview, an
address or a mapping, never over another array: NumPy would let the views refer to that array, the
root would go at once, and the memory would be written under them.

A loan ends on whichever thread drops the last array, perhaps inside the garbage collector. So what
is called then takes no lock, and does not wait. An interrupt may end a function in Python half-way:
one lost ten slots in 30,000 interrupts. If a slot must not be lost, the weak reference calls a
function in C (`Loan` by itself); if a lost slot is only made anew, `Loans` will do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Loan(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a root, which knows what was lent. Whoever makes it writes it once, and
    holds it: Python calls nothing for a weak reference that goes before its root."""

    __slots__ = ("what",)
    what: Any
    """What is free when the root is gone."""


class Loans:
    """What is lent, each until its root is gone.

    One thread lends, or several under a lock of their own. `on_end` is called with what was lent
    once its root is gone, on any thread.
    """

    def __init__(self, on_end: Callable[[Any], None]) -> None:
        self._on_end = on_end
        self._loans: dict[int, Loan] = {}

    def lend(self, root: Any, what: Any) -> None:
        """`what` is lent until `root` is gone."""
        loan = Loan(root, self._end)
        loan.what = what
        self._loans[id(loan)] = loan

    def _end(self, loan: Any) -> None:
        # No name of the module: at the interpreter's exit they may be gone before the arrays are.
        del self._loans[id(loan)]
        self._on_end(loan.what)

    def __len__(self) -> int:
        return len(self._loans)
