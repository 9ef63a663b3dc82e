"""The arithmetic of rounds, compared with queues that are dealt to one batch after another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.stream.rounds import Counting, Dealing, begin
from feeder.workers.stream.shares import Place

NUMS = st.integers(1, 20)
STEPS = st.integers(0, 400)


@given(start=STEPS, num=NUMS, rounds=st.integers(0, 30))
def test_one_place_is_written_in_one_way(start: int, num: int, rounds: int) -> None:
    dealing = Dealing(0, num, 4)
    assert dealing.begun_at(start) == dealing.begun_at(start + rounds * num)


@given(num=NUMS, step=STEPS, epochs=st.integers(1, 5), epoch=st.integers(0, 9))
def test_a_round_ends_with_its_stream(num: int, step: int, epochs: int, epoch: int) -> None:
    dealing = Dealing(0, num, 4, 0, epochs)
    assert dealing.rest(epoch, step) == (-step % num if epoch < epochs else 0)
    turns = begin(epoch, step, dealing, num=2, batch_size=4, epochs=None)
    assert turns.ends_after == epochs
    assert turns.first == -dealing.rest(epoch, step)


@given(
    num=NUMS,
    places=st.lists(st.tuples(st.integers(0, 9), STEPS), min_size=2, max_size=2),
    begins=STEPS,
)
def test_each_epoch_begins_with_a_round_where_rounds_end_with_epochs(
    num: int, places: list[tuple[int, int]], begins: int
) -> None:
    """A number grows with the place, and tells its epoch, its round in that and its queue."""
    counting = Counting(num, per_epoch=True)
    numbers = [counting.number(Place(epoch, index, 0)) for epoch, index in places]
    assert (numbers[0] < numbers[1]) == (places[0] < places[1])
    for number, (epoch, index) in zip(numbers, places, strict=True):
        first = counting.number(Place(epoch, 0, 0))
        assert counting.queue(number) == index % num
        assert counting.round(number) - counting.round(first) == index // num
        assert counting.after_epoch(number) == counting.round(
            counting.number(Place(epoch + 1, 0, 0))
        )
        # Where a round begins elsewhere, it does so in that epoch alone.
        shifted = counting._replace(begins=counting.number(Place(5, begins, 0)))
        into = index - begins if epoch == 5 else index
        assert shifted.queue(number) == into % num
