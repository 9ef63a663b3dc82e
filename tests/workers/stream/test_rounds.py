"""The arithmetic of rounds, compared with queues that are dealt to one batch after another."""

from __future__ import annotations

from itertools import count, islice

from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.stream.rounds import Counting, Dealing, begin, ends_round, next_round
from feeder.workers.stream.shares import Place

NUMS = st.integers(1, 20)
STEPS = st.integers(0, 400)


@given(start=STEPS, num=NUMS, dealt=STEPS)
def test_a_place_in_a_round_is_rounded_up_to_its_end(start: int, num: int, dealt: int) -> None:
    """By counting: batches are dealt from `start` on until the last queue has one as the others."""
    step = start + dealt
    end = next(s for s in count(step) if (s - start) % num == 0)
    rest = Dealing(0, num, 4).begun_at(start).rest(0, step)
    assert step + rest == end == start + -(-dealt // num) * num
    assert rest < num


@given(start=STEPS, num=NUMS, rounds=st.integers(0, 30))
def test_one_place_is_written_in_one_way(start: int, num: int, rounds: int) -> None:
    dealing = Dealing(0, num, 4)
    assert dealing.begun_at(start) == dealing.begun_at(start + rounds * num)


@given(
    parts=st.lists(st.tuples(NUMS, st.integers(0, 60)), min_size=1, max_size=8),
    skips=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_any_numbers_of_queues_one_after_another_get_each_batch_once(
    parts: list[tuple[int, int]], skips: list[int]
) -> None:
    step, then, wanted, got, skipped = 0, None, 0, list[int](), 0
    for (num, dealt), skip in zip(parts, skips, strict=False):
        turns = begin(0, step, then, num=num, batch_size=4, epochs=None, skip=skip)
        assert turns.dealing is not None
        # The rest of the round before counts as dealt; what is skipped is left out.
        wanted += 0 if then is None else then.rest(0, step)
        assert step - turns.first == wanted + skip * num
        skipped += skip
        assert turns.dealing.skipped == skipped
        queues: list[list[int]] = [[] for _ in range(num)]
        for turn, at in islice(zip(count(turns.first), count(step), strict=False), 200):
            if turn >= 0 and at < wanted + skip * num + dealt:
                queues[turn % num].append(at)
                assert (at - turns.dealing.start) % num == turn % num
        got += [at for queue in queues for at in queue]
        first = wanted + skip * num
        assert sorted(at for queue in queues for at in queue) == list(range(first, first + dealt))
        step, then, wanted = first + dealt, turns.dealing, first + dealt
    assert len(got) == len(set(got))


@given(num=NUMS, turn=st.integers(-60, 60), skip=st.integers(0, 3), drops=st.booleans())
def test_a_round_that_is_not_complete_is_the_last_but_where_it_is_dropped(
    num: int, turn: int, skip: int, drops: bool
) -> None:
    first = -skip * num
    following = next_round(turn, num, drops=drops, first=first)
    assert following % num == 0
    assert following >= first
    if turn >= first:
        assert following in (turn // num * num, -(-turn // num) * num)
        assert (following >= turn) is (not drops or turn % num == 0)


@given(num=NUMS, turn=st.integers(-60, 60))
def test_a_round_ends_with_its_last_queue(num: int, turn: int) -> None:
    assert ends_round(turn, num) is (turn % num == num - 1)


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
