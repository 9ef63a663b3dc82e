"""Where a loader stands, and how that is written for a trainer's checkpoint: numbers and texts."""

from __future__ import annotations

import copy
from base64 import b64decode, b64encode
from typing import Any, NamedTuple

from feeder.adapters.torch.feed_loader import STATES
from feeder.adapters.torch.order import START, Begun, Now, Pulled, Reach

Reader = tuple[int, bytes | None, bool]
"""Where the iterable of a worker stands: the batches that it has given, its state after them, and
whether that was all."""


class Mark(NamedTuple):
    """Where a loader stands: after a batch, or between two loops. Never changes."""

    epoch: int = 0
    num: int = 0
    """Batches that the loop has given."""
    step: int = 0
    """Batches that all loops have given."""
    begun: Begun | None = None
    """None between two loops."""
    pulled: Pulled = START
    seed: int | None = None
    """Of the workers' draws."""
    readers: tuple[Reader, ...] | None = None
    """Of an iterable, for each worker. The next batch is that of worker `turn`."""
    turn: int = 0
    is_kept: bool = False
    """Whether the loop's workers are those of a loop before, which persist: then PyTorch draws no
    seed for them."""
    now: Now | None = None
    """In a loop: what was when this was told."""


class Stand:
    """Where a loader stands, as its newest loop writes it: the loop has it as long as it is read,
    and the loader as long as no other loop is begun or state loaded."""

    __slots__ = ("_was_left", "mark", "reach", "said")

    def __init__(self, mark: Mark, reach: Reach | None = None, *, was_left: bool = False) -> None:
        """`was_left`: what `is_left` is without a `reach`."""
        self._was_left = was_left
        self.mark = mark
        self.reach = reach
        """How far the order was pulled; None for an iterable, and before a loop."""
        self.said: bytes | None = None
        """What a data set with a state said before the batch that is being read, or has failed."""

    def copy(self) -> Stand:
        """One that the loop does not write."""
        reach = None if self.reach is None else copy.copy(self.reach)
        return Stand(self.mark, reach, was_left=self._was_left)

    @property
    def is_left(self) -> bool:
        """Whether the sampler has begun an order, and has not said that there is no more of it."""
        if self.reach is None:
            return self._was_left
        return self.reach.pulled.num > 0 and not self.reach.has_ended


def write(mark: Mark) -> dict[str, Any]:
    """A place as JSON has it; of a place between two loops `begun` is what the next one has."""
    begun, pulled, readers = mark.begun or Begun(), mark.pulled, mark.readers
    return {
        "epoch": mark.epoch,
        "batches": mark.num,
        "step": mark.step,
        "seed": mark.seed,
        "generators": {
            "own": list(begun.own), "process": dict(begun.process)
        },
        "now": None if mark.now is None else list(mark.now),
        "samplers": [_text(STATES.pack(state)) for state in begun.states],
        "is_after_end": begun.is_after_end,
        "times": begun.times,
        "is_lazy": begun.is_lazy,
        "order_seed": begun.seed,
        "dealt": None if begun.dealt is None else list(begun.dealt),
        "pulled": pulled.num,
        "digest": f"{pulled.digest:016x}",
        "sampler": None if pulled.state is None else _text(STATES.pack(pulled.state)),
        "is_last": pulled.is_last,
        "given": list(pulled.given),
        "readers": None if readers is None else [
            [num, None if state is None else _text(state), is_done]
            for num, state, is_done in readers
        ],
        "turn": mark.turn,
        "is_kept": mark.is_kept,
    }  # fmt: skip


def read(state: dict[str, Any]) -> Mark:
    """The reverse. Raises `KeyError`, `TypeError` or `ValueError` for what is damaged."""
    sampler, readers, dealt = state["sampler"], state["readers"], state["dealt"]
    now = state.get("now")
    own, process = state["generators"]["own"], state["generators"]["process"]
    # A state of an older feeder between two loops has that of its one sampler there.
    of_one = [] if sampler is None or state["is_begun"] else [sampler]
    samplers = state.get("samplers", of_one)
    return Mark(
        epoch=int(state["epoch"]),
        num=int(state["batches"]),
        step=int(state["step"]),
        begun=Begun(
            tuple(own), tuple(process.items()), state["order_seed"],
            None if dealt is None else tuple(dealt),
            tuple(STATES.unpack(b64decode(said)) for said in samplers),
            bool(state.get("is_after_end", True)),
            # Of an older feeder: whether there were workers, and these had not persisted.
            int(state.get("times", 2 if state["seed"] and not state["is_kept"] else 1)),
            state.get("is_lazy"),
        ),
        pulled=Pulled(
            int(state["pulled"]), int(state["digest"], 16),
            None if sampler is None else STATES.unpack(b64decode(sampler)), bool(state["is_last"]),
            tuple(state["given"]),
        ),
        seed=state["seed"],
        readers=None if readers is None else tuple(
            (int(num), None if at is None else b64decode(at), bool(is_done))
            for num, at, is_done in readers
        ),
        turn=int(state["turn"]),
        now=None if now is None else Now(tuple(now[0]), int(now[1]), bool(now[2]), *now[3:]),
        is_kept=bool(state["is_kept"]),
    )  # fmt: skip


def _text(raw: bytes) -> str:
    return b64encode(raw).decode()
