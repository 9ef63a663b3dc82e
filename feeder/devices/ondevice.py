"""A function of the user's that makes of each batch what the trainer wants.

On a GPU it runs on the stream of the copies, ahead of the trainer (`cuda/copier.py`); on the host
in the user's thread, when a batch is handed out. Its draws belong to the batch, so a batch that
comes again, after a resume or on another device, is made alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from feeder.errors import ConfigError, DeviceError
from feeder.workers.errors import in_words
from feeder.workers.stream.batch import Batch, rng_of_batch

Facts = tuple[int, Sequence[int]]
"""The seed of a stream, and the axis of each column that is rows."""


class OnDevice:
    """Calls the function with a batch, and looks at what it returns. Never changes once it is
    bound to a stream; a thread for each device calls it. Adapters override how a batch is given,
    what is taken of the result, and where the batch belongs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises `ConfigError` for what is no `fn(batch)` or `fn(batch, rng)`."""
        self.function = function
        self._draws = takes_draws(function)
        self._facts: Callable[[Batch], Facts] = lambda batch: (0, ())

    @classmethod
    def of(cls, given: Any) -> OnDevice | None:
        """What is given as `on_device=`. Raises `ConfigError`."""
        return given if given is None or isinstance(given, OnDevice) else cls(given)

    def of_stream(self, facts: Callable[[Batch], Facts]) -> OnDevice:
        """The same for the batches of a stream, of which the seed and the axes are told."""
        bound = copy(self)
        bound._facts = facts
        return bound

    def __call__(self, batch: Batch) -> Batch:
        """What is handed out in a batch's place. Raises `DeviceError`, which names the step."""
        epoch, index, _ = self.place(batch)
        seed, axes = self._facts(batch)
        try:
            given = self.give(batch)
            draws = (rng_of_batch(seed, epoch, index),) if self._draws else ()
            names, columns = self.take(batch, given, axes, self.function(given, *draws))
        except Exception as error:
            # Any exception: the function is the user's.
            if isinstance(error, _WrongError):
                raise self.error(batch, str(error)) from None
            raise self.error(batch, f"raised {in_words(error)}") from error
        return batch.with_arrays(columns, names)

    def place(self, batch: Batch) -> tuple[int, int, int]:
        """The epoch of a batch, its number in the order of that, and its step."""
        return batch.epoch, batch.index, batch.step

    def error(self, batch: Batch, said: str) -> DeviceError:
        """What the function did wrong, with the batch that it was called with."""
        epoch, index, step = self.place(batch)
        return DeviceError(f"on_device at step {step} (batch {index} of epoch {epoch}): it {said}")

    def give(self, batch: Batch) -> Any:
        """What the function is called with."""
        return batch

    def take(
        self, batch: Batch, given: Any, axes: Sequence[int], made: Any
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The names and columns of what the function has made; raises by `wrong` for what is no
        batch."""
        if not isinstance(made, Mapping) or not made:
            raise wrong(f"returned {_said(made)}, expected a mapping of arrays by name")
        axis_of = dict(zip(batch, axes, strict=False))
        rows = _rows(next(iter(batch.values())), axis_of.get(next(iter(batch)), 0))
        for name, value in made.items():
            if not isinstance(name, str) or not hasattr(value, "shape"):
                raise wrong(f"returned {_said(value)} as {name!r}, expected arrays by name")
            check_rows(repr(name), value, axis_of.get(name, 0), rows)
        return tuple(made), tuple(made.values())

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


class _WrongError(Exception):
    """What the function returned is no batch."""


def wrong(said: str) -> Exception:
    """The error of a function that returned what is no batch, without the step."""
    return _WrongError(said)


def check_rows(name: str, array: Any, axis: int, rows: int | None) -> None:
    """Raise by `wrong` if an array has not a batch's rows; one without axes is for all rows."""
    if array.shape and rows is not None and (found := _rows(array, axis)) != rows:
        raise wrong(
            f"returned {name} with {found} rows, and the batch has {rows}: a batch keeps its rows"
        )


def _rows(array: Any, axis: int) -> int:
    return int(array.shape[axis]) if axis < len(array.shape) else -1


def _said(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def takes_draws(function: Any) -> bool:
    """Whether a function takes draws beside the batch."""
    if not callable(function):
        raise ConfigError(
            f"on_device is {function!r}, expected a function fn(batch) or fn(batch, rng)"
        )
    try:
        # A module of PyTorch's takes anything by its call.
        signature = inspect.signature(getattr(function, "forward", function))
    except (TypeError, ValueError):
        return False  # Written in C, it tells no signature.
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [one for one in signature.parameters.values() if one.kind in positional]
    least = sum(one.default is one.empty for one in taken)
    is_any = any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())
    is_short = any(
        one.kind is one.KEYWORD_ONLY and one.default is one.empty
        for one in signature.parameters.values()
    )
    if least > 2 or is_short or not (taken or is_any):
        raise ConfigError(
            f"on_device is {function!r}, which takes {signature}, expected fn(batch) or "
            "fn(batch, rng)"
        )
    return least == 2 or (len(taken) > 1 and taken[1].name == "rng")
