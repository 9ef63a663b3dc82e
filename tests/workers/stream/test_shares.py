"""Which batches a rank makes: together they are all, in one order, with any numbers of ranks. And
the numbers of batches where rounds end with epochs."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.stream.rounds import Counting
from feeder.workers.stream.shares import Place, Share

COUNTS = st.integers(0, 40)
RANKS = st.integers(1, 7)


def flat(rounds: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(rounds))


def dealt(num: int, num_batches: int, index: int = 0, *, drops: bool) -> list[list[int]]:
    """Each round of an epoch, as all ranks together make it."""
    ranks = [Share(rank, num, drops) for rank in range(num)]
    rounds = ranks[0].rounds(num_batches, index)
    assert [share.batch(rounds, num_batches, index) for share in ranks] == [None] * num
    made = [[share.batch(k, num_batches, index) for share in ranks] for k in range(rounds)]
    assert None not in flat(made)
    return made  # type: ignore[return-value]  # no None, as was just looked at


@given(RANKS, COUNTS, COUNTS)
def test_ranks_make_the_batches_in_order_and_pad_with_the_last(
    num: int, num_batches: int, index: int
) -> None:
    made = flat(dealt(num, num_batches, index, drops=False))
    real = list(range(index, num_batches))
    assert made[: len(real)] == real
    padding = made[len(real) :]
    assert len(padding) < num
    assert set(padding) <= {num_batches - 1}


@given(RANKS, COUNTS, COUNTS)
def test_or_leave_out_the_round_that_is_not_complete(
    num: int, num_batches: int, index: int
) -> None:
    made = flat(dealt(num, num_batches, index, drops=True))
    left = max(0, num_batches - index)
    assert made == list(range(index, index + left - left % num))


@given(st.integers(1, 40), st.lists(st.tuples(RANKS, st.integers(0, 9)), max_size=6))
def test_the_order_stays_with_any_number_of_ranks_any_number_of_times(
    num_batches: int, legs: list[tuple[int, int]]
) -> None:
    place, seen, steps = Place(), [], 0
    for num, rounds in [*legs, (3, num_batches)]:
        share = Share(0, num)
        made = dealt(num, num_batches, place.index, drops=False)[:rounds]
        seen += flat(made)
        place, steps = share.after(place, len(made)), steps + len(made)
    assert seen[:num_batches] == list(range(num_batches))
    assert set(seen[num_batches:]) <= {num_batches - 1}
    assert place.step == steps
    assert place.after_epoch() == Place(1, 0, place.step)


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


@given(
    num=NUMS,
    begins=st.lists(st.tuples(st.integers(0, 3), STEPS), min_size=2, max_size=2),
    epoch=st.integers(0, 3),
    index=STEPS,
)
def test_countings_agree_on_the_queue_of_a_batch_or_one_knows_nothing_of_it(
    num: int, begins: list[tuple[int, int]], epoch: int, index: int
) -> None:
    counting = Counting(num, per_epoch=True)
    one, other = (counting._replace(begins=counting.number(Place(*place, 0))) for place in begins)
    number = counting.number(Place(epoch, index, 0))
    # Of the epochs before the one that it begins in a counting knows nothing.
    knows = epoch >= max(since for since, _ in begins)
    agrees = not knows or one.queue(number) == other.queue(number)
    assert one.agrees(other, number) == other.agrees(one, number) == agrees
