"""The numbers of batches where rounds end with epochs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.stream.rounds import Counting
from feeder.workers.stream.shares import Place

NUMS = st.integers(1, 20)
STEPS = st.integers(0, 400)


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
