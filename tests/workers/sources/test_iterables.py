"""Stateful iterators, one per worker, with a cursor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from feeder.workers.errors import ConfigError
from feeder.workers.sources import IterableSource, RecordError, iterable
from small import Walk


class Counts:
    """An iterable that has the state methods, and a generator for an iterator."""

    def __init__(self, stop: int) -> None:
        self.at, self.stop = 0, stop

    def __iter__(self) -> Iterator[int]:
        while self.at < self.stop:
            self.at += 1
            yield self.at - 1
        self.at = 0

    state_dict, load_state_dict = Walk.state_dict, Walk.load_state_dict


def take(source: IterableSource, num_calls: int, worker_id: int = 0, size: int = 3) -> list[Any]:
    """What calls return: rows, or None for the end of an epoch."""
    taken: list[Any] = []
    for _ in range(num_calls):
        try:
            (column,) = source(worker_id, size)
        except StopIteration:
            taken.append(None)
        else:
            taken.append(column.tolist())
    return taken


def of_worker(worker_id: int, epoch: int) -> Walk:
    return Walk(7, lambda i: 1000 * epoch + 100 * worker_id + i)


def test_each_worker_has_an_iterator_for_each_epoch() -> None:
    source = iterable(of_worker)
    assert take(source, 4) == [[0, 1, 2], [3, 4, 5], [6], None]
    assert take(source, 1, worker_id=2) == [[200, 201, 202]]
    assert take(source, 2) == [[1000, 1001, 1002], [1003, 1004, 1005]]
    assert take(source, 3, worker_id=2) == [[203, 204, 205], [206], None]


@pytest.mark.parametrize("size", [3, 7, 10])
@pytest.mark.parametrize("factory", [of_worker, lambda: Walk(7), lambda: Counts(7)])
def test_a_fresh_source_goes_on_at_any_cursor(factory: Any, size: int) -> None:
    whole = take(iterable(factory), 9, size=size)
    for calls in range(9):
        source = iterable(factory)
        take(source, calls, size=size)
        fresh = iterable(factory)
        fresh.seek(0, source.cursor(0))
        assert take(fresh, 9 - calls, size=size) == whole[calls:], calls
        again = iterable(factory)
        again.seek(0, source.cursor(0))
        assert again.cursor(0) == source.cursor(0)


def test_an_iterator_that_begins_anew_after_its_end_is_not_asked_again() -> None:
    class Round(Walk):
        def __next__(self) -> int:
            if self.at == self.num:
                self.at = 0
                raise StopIteration
            return super().__next__()

    assert take(iterable(lambda: Round(4)), 4) == [[0, 1, 2], [3], None, [0, 1, 2]]


def test_a_collate_function_does_not_end_the_epoch() -> None:
    def ends(samples: Any) -> Any:
        raise StopIteration

    with pytest.raises(
        RecordError, match=r"^worker 1, sample 0 of the call and on: collate raised"
    ):
        iterable(lambda: Walk(4), collate=ends)(1, 3)


def test_several_workers_do_not_give_the_same_samples() -> None:
    source = iterable(lambda: Walk(7))
    assert take(source, 1) == [[0, 1, 2]]
    with pytest.raises(
        ConfigError, match=r"takes no worker_id, and workers \[0, 3\] would all give"
    ):
        source(3, 3)
    resumed = iterable(lambda: Walk(7))
    resumed.seek(1, source.cursor(0))
    with pytest.raises(ConfigError, match="takes no worker_id"):
        resumed.seek(2, source.cursor(0))


def test_a_list_of_the_callers_is_no_state() -> None:
    with pytest.raises(ConfigError, match="factory made list, expected an iterator with"):
        iterable(lambda: [1, 2])(0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factory": 3}, "factory is 3, expected a function that makes an iterator"),
        ({"factory": lambda a, b, c: 1}, "factory requires 3 arguments, expected"),
        ({"factory": list, "collate": 3}, "collate is 3, expected a function of a list of"),
        ({"factory": list, "batched": 1}, "batched is 1, expected True or False"),
        ({"factory": list, "batched": True, "collate": list}, "collate is for single samples"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        iterable(**arguments)
