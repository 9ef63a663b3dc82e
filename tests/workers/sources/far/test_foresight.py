"""What is brought and let go is what Belady's MIN would bring and let go, whatever the speeds."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder import Call, sources
from feeder.workers.sources.far import foresight
from feeder.workers.sources.far.ahead import _MOST_USES as MOST_USES
from feeder.workers.sources.far.foresight import FOREVER, Foresight

SIZE = 10


def least_misses(uses: tuple[int, ...], room: int) -> int:
    """The fewest misses with which blocks can be used in this order, of all ways that there are: a
    block that was used may be kept or not, in place of any other one."""

    @cache
    def least(at: int, kept: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        block = uses[at]
        if block in kept:
            return least(at + 1, kept)
        choices = [kept]
        if len(kept) < room:
            choices.append(kept | {block})
        choices += [kept - {one} | {block} for one in kept if room]
        return 1 + min(least(at + 1, each) for each in choices)

    return least(0, frozenset())


def bytes_of_farthest(uses: list[int], sizes: dict[int, int], room: int) -> int:
    """The bytes that are brought if the blocks that are used farthest away go: of equal blocks that
    is MIN."""
    after: list[float] = [FOREVER] * len(uses)
    last: dict[int, int] = {}
    for i in range(len(uses) - 1, -1, -1):
        after[i] = last.get(uses[i], FOREVER)
        last[uses[i]] = i
    kept: dict[int, float] = {}
    brought = 0
    for i, block in enumerate(uses):
        brought += sizes[block] * (block not in kept)
        kept[block] = after[i]
        while sum(sizes[one] for one in kept) > room:
            del kept[max(kept, key=kept.__getitem__)]
    return brought


def min_misses(uses: list[int], room: int) -> int:
    """The misses of MIN, for orders that are too long for that."""
    return bytes_of_farthest(uses, dict.fromkeys(uses, 1), room)


class Driver:
    """A reader and a store around the machine: what lies there, and the most that ever did."""

    def __init__(self, room: int, ahead: int) -> None:
        self.machine = Foresight(room, ahead)
        self.there: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.brought = self.brought_late = self.brought_bytes = 0
        self.most = 0

    def foresee(self, reader: str, blocks: list[tuple[int, int]]) -> None:
        self.sizes |= dict(blocks)
        self.machine.foresee(reader, blocks)

    def obey(self) -> None:
        told = self.machine.instructions()
        for number in told.let_go:
            del self.there[number]
        for number in told.bring:
            assert number not in self.there
            self.there[number] = self.sizes[number]
            self.brought += 1
            self.brought_bytes += self.sizes[number]
        self.most = max(self.most, sum(self.there.values()))

    def use(self, reader: str, number: int, blocks: list[tuple[int, int]]) -> None:
        self.machine.enter(reader, number)
        before = self.brought
        self.obey()
        self.brought_late += self.brought - before
        assert {block for block, _ in blocks} <= self.there.keys()
        self.machine.leave(reader, number)
        self.obey()


orders = st.integers(1, 6).flatmap(
    lambda num: st.lists(st.integers(0, num - 1), min_size=1, max_size=14)
)


@given(orders, st.integers(1, 5), st.integers(1, 3))
def test_one_reader_has_the_fewest_misses_that_there_can_be(
    order: list[int], room: int, ahead: int
) -> None:
    driver = Driver((room + ahead) * SIZE, ahead * SIZE)
    for block in order:
        driver.foresee("a", [(block, SIZE)])
    driver.obey()
    for i, block in enumerate(order):
        driver.use("a", i, [(block, SIZE)])
    assert driver.machine.misses == least_misses(tuple(order), room) == min_misses(order, room)
    assert driver.brought <= driver.machine.misses
    assert driver.brought >= least_misses(tuple(order), room + ahead)
    # Bounded at all times, and always ahead.
    assert driver.most <= (room + ahead) * SIZE
    assert driver.brought_late == 0
    assert driver.machine.uses == len(order)


@pytest.mark.parametrize("window", [2, 16])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("largest", [1, 2 * SIZE])
def test_shuffled_epochs_bring_what_farthest_first_brings(
    part: float, window: int, largest: int
) -> None:
    """Of blocks of one size exactly, and nearly of several sizes."""
    draw, num, order = random.Random(f"{part} {window}"), 120, []
    sizes = {block: draw.randint(1, largest) for block in range(num)}
    for _ in range(3):
        starts = [*range(0, num, window)]
        draw.shuffle(starts)
        for start in starts:
            order += draw.choices(range(start, min(start + window, num)), k=3 * window)
    room, ahead = int(part * sum(sizes.values())), 4 * largest
    driver = Driver(room + ahead, ahead)
    for block in order:
        driver.foresee("a", [(block, sizes[block])])
    driver.obey()
    for i, block in enumerate(order):
        driver.use("a", i, [(block, sizes[block])])
    assert driver.brought_bytes <= 1.05 * bytes_of_farthest(order, sizes, room)
    if largest == 1:
        assert driver.machine.misses == min_misses(order, room)
        assert min_misses(order, room + ahead) <= driver.brought <= driver.machine.misses
        assert driver.most <= room + ahead
        assert part < 1.0 or driver.brought == len(set(order))


class Folded(Driver):
    """The same with a store that holds no more than the room, as the folder of a cache does: a
    block goes for one that is needed sooner; one that finds no room is brought by each who reads
    it."""

    def __init__(self, room: int, ahead: int) -> None:
        super().__init__(room, ahead)
        self.room = room

    def obey(self) -> None:
        told = self.machine.instructions()
        for number in told.let_go:
            self.there.pop(number, None)
        for number in told.bring:
            size, distance = self.sizes[number], self.machine.distance
            while (taken := sum(self.there.values()) + size) > self.room:
                farthest = max(self.there, key=distance)
                if distance(farthest) <= distance(number):
                    self.machine.lost(number)
                    break
                del self.there[farthest]
                self.machine.lost(farthest)
            if taken <= self.room:
                self.there[number] = size
                self.brought_bytes += size

    def use(self, reader: str, number: int, blocks: list[tuple[int, int]]) -> None:
        self.machine.enter(reader, number)
        self.obey()
        self.brought_bytes += sum(size for block, size in blocks if block not in self.there)
        self.machine.leave(reader, number)
        self.obey()


def steps_of(window: int, seed: int, num_blocks: int) -> list[list[int]]:
    """The blocks of each batch of two epochs of records that a source shuffles, 512 to a block."""
    num, batch = 512 * num_blocks, 64
    source = sources.samples(int, num).shuffle(window=window)
    calls = [Call(i, epoch, 0, batch, seed) for epoch in range(2) for i in range(num // batch)]
    return [[*dict.fromkeys((source.indices(call) // 512).tolist())] for call in calls]


def brought_of(
    steps: dict[str, list[list[int]]], sizes: dict[int, int], room: int, ahead: int
) -> int:
    """The bytes that readers have brought who take turns, and foresee as feeds do: some steps more
    at each, as many uses, and anew if they were thought to be late."""
    driver = Folded(room + ahead, ahead)
    first, told = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0)
    for at in range(max(map(len, steps.values()))):
        for name, each in steps.items():
            if not driver.machine.knows(name):
                first[name] = told[name] = at
            for step in each[told[name] : told[name] + 128]:
                if driver.machine.foreseen(name) < MOST_USES:
                    driver.foresee(name, [(block, sizes[block]) for block in step])
                    told[name] += 1
            driver.use(name, at - first[name], [(block, sizes[block]) for block in each[at]])
    return driver.brought_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    ("window", "feeds", "mixed", "most"),
    [
        (1 << 10, 1, False, 1.0), (1 << 16, 1, False, 1.0), (1 << 10, 1, True, 1.05),
        (1 << 16, 1, True, 1.05), (1 << 10, 3, False, 1.1),
    ],
)  # fmt: skip
def test_orders_of_sources_bring_little_more_than_those_who_know_all(
    window: int, part: float, feeds: int, mixed: bool, most: float
) -> None:
    """131,072 records in 256 blocks, two epochs of each feed, a quarter of the room beside it for
    what is ahead."""
    draw, num = random.Random(1), 256
    sizes = {block: draw.randint(1, 2 * SIZE) if mixed else SIZE for block in range(num)}
    steps = {f"{seed}": steps_of(window, seed, num) for seed in range(feeds)}
    room, ahead = int(part * sum(sizes.values())), 64 * SIZE
    merged = [
        block for turn in zip(*steps.values(), strict=True) for step in turn for block in step
    ]
    least = bytes_of_farthest(merged, sizes, room)
    brought = brought_of(steps, sizes, room, ahead)
    assert brought <= most * least, brought / least


steps = st.lists(
    st.lists(st.integers(0, 9), min_size=0, max_size=3, unique=True), min_size=1, max_size=12
)


@given(st.data(), st.lists(steps, min_size=1, max_size=3), st.integers(1, 6))
def test_whatever_readers_do_their_blocks_are_there_and_room_is_given_back(
    data: st.DataObject, readers: list[list[list[int]]], room: int
) -> None:
    sizes = {number: data.draw(st.integers(1, 9)) for number in range(10)}
    driver = Driver(room * 10, room * 5)
    told, used, left = [0] * len(readers), [0] * len(readers), [0] * len(readers)
    closed: set[int] = set()
    for _ in range(60):
        who = data.draw(st.integers(0, len(readers) - 1))
        what = data.draw(st.sampled_from(["foresee", "enter", "leave", "obey", "lost", "close"]))
        name, blocks = f"r{who}", readers[who]
        if who in closed:
            continue
        if what == "foresee" and told[who] < len(blocks):
            driver.foresee(name, [(b, sizes[b]) for b in blocks[told[who]]])
            told[who] += 1
        elif what == "enter" and used[who] < told[who]:
            driver.machine.enter(name, used[who])
            driver.obey()
            assert set(blocks[used[who]]) <= driver.there.keys()
            used[who] += 1
        elif what == "leave" and left[who] < used[who]:
            driver.machine.leave(name, left[who])
            left[who] += 1
            # Those that were entered and are not over stay.
            for step in blocks[left[who] : used[who]]:
                assert set(step) <= driver.there.keys()
        elif what == "obey":
            driver.obey()
        elif what == "close" and told[who] and data.draw(st.booleans()):
            driver.machine.close(name)
            closed.add(who)
    for who in range(len(readers)):
        driver.machine.close(f"r{who}")
    driver.obey()
    # What is left is kept, and fits.
    assert sum(driver.there.values()) <= room * 10 - room * 5


def test_blocks_that_are_there_from_before_are_not_brought() -> None:
    driver = Driver(4 * SIZE, SIZE)
    driver.machine.has([(1, SIZE), (2, SIZE), (3, SIZE), (4, SIZE)])
    driver.there = {1: SIZE, 2: SIZE, 3: SIZE}
    order = [3, 5, 1, 3, 5]
    for block in order:
        driver.foresee("a", [(block, SIZE)])
    for i, block in enumerate(order):
        driver.use("a", i, [(block, SIZE)])
    # 2, which nobody uses, went for 5.
    assert (driver.brought, 2 in driver.there) == (1, False)


def test_a_block_that_is_lost_is_brought_again() -> None:
    driver = Driver(4 * SIZE, SIZE)
    for block in (1, 2):
        driver.foresee("a", [(block, SIZE)])
    driver.use("a", 0, [(1, SIZE)])
    assert driver.brought == 2
    driver.machine.lost(1)
    driver.there.pop(1)
    driver.foresee("a", [(1, SIZE)])
    driver.use("a", 1, [(2, SIZE)])
    driver.use("a", 2, [(1, SIZE)])
    assert driver.brought == 3


def test_a_reader_that_stands_still_does_not_keep_its_blocks_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foresight, "_LATE_USES", 50)
    driver = Driver(8 * SIZE, 2 * SIZE)
    for block in (0, 1, 2, 3, 0, 1, 2, 3):
        driver.foresee("still", [(block, SIZE)])
    for i in range(4):
        driver.use("still", i, [(i, SIZE)])
    for i in range(120):
        driver.foresee("goes on", [(10 + i % 6, SIZE)])
    for i in range(100):
        driver.use("goes on", i, [(10 + i % 6, SIZE)])
    assert not driver.machine.knows("still")
    assert driver.there.keys() == {10, 11, 12, 13, 14, 15}
    # What comes late does nothing.
    driver.machine.enter("still", 4)
    driver.machine.leave("still", 4)
    driver.foresee("still", [(0, SIZE)])
    driver.use("still", 0, [(0, SIZE)])


def test_several_readers_share_the_room_as_if_they_were_one() -> None:
    """Three readers, one three times as quick: near to MIN of what came in fact."""
    draw, blocks, rooms = random.Random(5), 60, 45
    orders = {name: [draw.randrange(blocks) for _ in range(num)]
              for name, num in (("a", 600), ("b", 200), ("c", 200))}  # fmt: skip
    driver, merged = Driver((rooms + 9) * SIZE, 9 * SIZE), []
    at, told = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    turns = [name for name, order in orders.items() for _ in order]
    draw.shuffle(turns)
    for name in turns:
        while told[name] < min(len(orders[name]), at[name] + 150):
            driver.foresee(name, [(orders[name][told[name]], SIZE)])
            told[name] += 1
        driver.obey()
        driver.use(name, at[name], [(orders[name][at[name]], SIZE)])
        merged.append(orders[name][at[name]])
        at[name] += 1
    assert driver.brought <= 1.1 * min_misses(merged, rooms)


def test_how_far_away_a_block_is_does_not_depend_on_how_far_ahead_the_machine_is() -> None:
    machine = Foresight(100, 20)
    for number in (1, 2, 3, 1):
        machine.foresee("me", [(number, 10)])
    before = [machine.distance(number) for number in (1, 2, 3)]
    machine.instructions()
    assert [machine.distance(number) for number in (1, 2, 3)] == before == [1, 2, 3]
    machine.leave("me", 0)
    assert [machine.distance(number) for number in (1, 2, 3)] == [3, 1, 2]
