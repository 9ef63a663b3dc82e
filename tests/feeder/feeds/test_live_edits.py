"""Edits while a feed runs: the same as to stop, save and resume with `edit=`."""

from __future__ import annotations

import copy
import random
import threading
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.checkpoint.transcript import read_file
from feeder.errors import ClosedError, ConfigError, FeedError, ResumeError
from feeder.feeds.device_feed import DeviceFeed
from feeder.feeds.stream import Stream
from feeder.state.snapshot import Snapshot, StreamState
from standin.gpu import Machine, assert_sound, installed
from watching import around

FIRSTS = {"web": 0, "code": 10_000, "books": 20_000}


def corpus(name: str, size: int = 60, excluded: Any = ()) -> Any:
    source = sources.arrays(np.arange(size) + FIRSTS[name])
    return (source.exclude(excluded) if excluded else source).shuffle(seed=1)


def mixed(mode: Any = "drop", **weights: Any) -> Any:
    given = {name: one if isinstance(one, tuple) else (corpus(name), one)
             for name, one in weights.items()}  # fmt: skip
    return sources.mix(given, on_exhausted=mode)


def feed(source: Any, resume: Any = None, **settings: Any) -> Any:
    if "global_batch_size" not in settings:
        settings.setdefault("batch_size", 4)
    return feeder.init_data_input_workers(
        ["x"], source, coordinator=feeder.Coordinator(), resume=resume, **settings
    )


class Reader:
    """A feed that is read round by round, or each device at its own pace."""

    def __init__(self, stack: ExitStack, source: Any, resume: Any = None, **settings: Any) -> None:
        self.coordinator = stack.enter_context(feed(source, resume, **settings))
        self.feed = self.coordinator["train"]
        self.devices = [self.feed.on(name) for name in self.feed.devices]
        self.rounds = [0] * len(self.devices)
        self.came: dict[int, tuple[int, list[int]]] = {}
        self.is_told_the_end = False

    def read(self, device: int) -> bool:
        """One batch of a device; whether there was one."""
        batch = next(self.devices[device], None)
        if batch is not None:
            self.rounds[device] += 1
            assert batch.step not in self.came
            self.came[batch.step] = device, batch["x"].tolist()
        self.is_told_the_end |= batch is None
        return batch is not None

    def read_to(self, num: int) -> None:
        """So many rounds of every device, if there are."""
        left = set(range(len(self.devices)))
        while left := {device for device in left if self.rounds[device] < num}:
            # The one that is behind: queues hold so many batches.
            device = min(left, key=lambda one: (self.rounds[one], one))
            if not self.read(device):
                left.discard(device)

    def state(self) -> StreamState:
        (state,) = self.coordinator.snapshot().states
        return state


def assert_same(one: StreamState, other: StreamState) -> None:
    """Two positions are equal, bit for bit, unless one knows already that an epoch has ended."""
    if one.token != other.token:
        (_, index, step, _), (_, others, others_step, _) = one.summary, other.summary
        assert step == others_step
        assert (index == 0) != (others == 0)
        one = one._replace(token=other.token, summary=other.summary)
    assert bytes(Snapshot((one,))) == bytes(Snapshot((other,)))


class Program:
    """A random feed, and random edits of it."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        num = draw.choice([1, 1, 2, 3])
        self.mode = draw.choice(["drop", "repeat", "stop"])
        self.names = ["web", "code"][: draw.randint(1, 2)]
        self.sizes = {name: 4 * draw.randint(8, 15) for name in FIRSTS}
        self.excluded: dict[str, list[int]] = {name: [] for name in FIRSTS}
        self.weights = {name: draw.randint(1, 4) for name in self.names}
        self.size = {"batch_size": draw.randint(1, 5)}
        if num > 1 and draw.random() < 0.3:
            self.size = {"global_batch_size": num * draw.randint(1, 4)}
        threads = draw.randint(0 if num == 1 else 1, 3)
        self.settings: dict[str, Any] = {
            "devices": num, "epochs": draw.choice([1, 2, 3]), "num_threads": threads,
            "last_batch": draw.choice(["keep", "drop", "pad"]),
            "last_round": draw.choice(["uneven", "drop", "pad"]),
        }  # fmt: skip

    def source(self) -> Any:
        return mixed(
            self.mode,
            **{name: (corpus(name, self.sizes[name], self.excluded[name]), weight)
               for name, weight in self.weights.items()},
        )  # fmt: skip

    def change(self) -> None:
        """Make it another one."""
        draw = self.draw
        for kind in draw.sample(["weights", "add", "size", "grow", "exclude", "note"], 2):
            name = draw.choice([*self.weights])
            if kind == "weights":
                self.weights[name] = draw.randint(1, 5)
            elif kind == "add":
                self.weights.setdefault(draw.choice([*FIRSTS]), 1)
                if len(self.weights) > 1 and draw.random() < 0.4:
                    del self.weights[name]
            elif kind == "size":
                (size,) = self.size
                share = self.settings["devices"] if size == "global_batch_size" else 1
                self.size = {size: share * draw.randint(1, 5)}
            elif kind == "grow":
                self.sizes[name] += 4 * draw.randint(0, 3)
            elif kind == "exclude":
                some = draw.sample(range(self.sizes[name]), 2)
                self.excluded[name] = sorted({*self.excluded[name], *some})


def run(seed: int) -> bool:
    """Whether an edit of a random program was made; checks that it is a stop and a resume."""
    program, made = Program(seed), False
    draw = program.draw
    with ExitStack() as stack:
        args: Any = {**program.settings, **program.size}
        live, plain = (
            Reader(stack, program.source(), **args),
            Reader(stack, program.source(), **args),
        )
        before = 0
        for number in range(draw.randint(1, 3)):
            for _ in range(draw.randint(0, 12)):
                device = draw.randrange(len(live.devices))
                # Queues hold so many batches.
                if live.rounds[device] - min(live.rounds) < 12:
                    live.read(device)
            newest, done = max(live.rounds), min(live.rounds)
            if done >= before and not live.is_told_the_end:
                plain.read_to(done)
                assert_same(live.state(), plain.state())
            plain.read_to(newest)
            assert {step: plain.came[step] for step in live.came} == live.came
            old = copy.deepcopy({k: v for k, v in vars(program).items() if k != "draw"})
            program.change()
            args = {**program.settings, **program.size}
            try:
                step = live.feed.edit(program.source(), why=f"{number}", **program.size)
            except ResumeError as error:
                if not live.is_told_the_end:
                    state = plain.coordinator.snapshot()
                    with pytest.raises(ResumeError) as told:
                        feed(program.source(), state, edit=f"{number}", **args)
                    assert "has ended at its position" in str(error)
                    assert "has ended at its position" in str(told.value)
                vars(program).update(old)
                break
            made = True
            state = plain.coordinator.snapshot()
            edited = Reader(stack, program.source(), state, edit=f"{number}", **args)
            if done == newest:
                assert_same(live.state(), edited.state())
            assert (
                step
                == edited.coordinator.snapshot().states[0].fingerprint["source.history"][2][-1][3]
            )
            edited.rounds, edited.came = list(plain.rounds), plain.came
            plain, before = edited, newest
        to = max(live.rounds) + draw.randint(0, 4)
        live.read_to(to)
        plain.read_to(to)
        assert live.came == plain.came
        if live.is_told_the_end == plain.is_told_the_end:
            assert_same(live.state(), plain.state())
        if made:
            args = {**program.settings, **program.size}
            later = Reader(stack, program.source(), live.coordinator.snapshot(), **args)
            # What was handed out of a last round that is not complete comes again.
            step = later.state().summary[2]
            later.came = {at: one for at, one in live.came.items() if at < step}
            for reader in (later, live):
                reader.read_to(10**6)
            assert later.came == live.came
        assert live.feed.is_over
    return made


@pytest.mark.parametrize("seed", range(8))
def test_a_live_edit_is_a_stop_and_a_resume(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_what_was_read_ahead_is_made_anew_and_counts_go_on(num_threads: int) -> None:
    with feed(mixed(web=7, code=3), num_threads=num_threads) as coordinator:
        train = coordinator["train"]
        before = [batch["x"].tolist() for batch in islice(train, 5)]
        assert train.edit(mixed(web=1, code=1), why="more code", batch_size=2) == 5
        # The same again is none.
        assert train.edit(mixed(web=1, code=1), why="more code", batch_size=2) == 5
        after = [batch["x"].tolist() for batch in train]
        stats = train.stats()
        history = coordinator.snapshot().states[0].fingerprint["source.history"]
    rows = [row for batch in before + after for row in batch]
    assert sorted(rows) == [*range(60), *range(10_000, 10_060)]
    assert {len(batch) for batch in after} == {2}
    assert sum(row >= 10_000 for row in rows[20:40]) == 10
    assert stats["handed_batches"] == len(before + after)
    assert [edit[4] for edit in history[2]] == ["more code"]


def test_threads_that_read_each_a_device_are_handed_each_step_once() -> None:
    settings: dict[str, Any] = {"devices": 3, "epochs": None, "last_batch": "drop"}
    came: dict[int, Any] = {}
    gate, num = threading.Barrier(4), 150

    def read(device: Any) -> None:
        for batch in islice(device, num):
            came[batch.step] = batch["x"].tolist()
            if batch.step // 3 == 20:
                gate.wait(30)

    with feed(mixed("repeat", web=7, code=3), **settings) as coordinator:
        train = coordinator["train"]
        threads = [threading.Thread(target=read, args=(train.on(i),)) for i in range(3)]
        for thread in threads:
            thread.start()
        gate.wait(30)
        steps = [
            train.edit(mixed("repeat", web=web, code=1), why=f"{web}", batch_size=web)
            for web in range(1, 6)
        ]
        for thread in threads:
            thread.join(60)
        state = coordinator.snapshot()
    assert sorted(came) == list(range(3 * num))
    assert steps == sorted(steps) and all(step >= 63 and step % 3 == 0 for step in steps)
    ends = [*steps[1:], 3 * num]
    for web, step, end in zip(range(1, 6), steps, ends, strict=True):
        assert all(len(came[at]) == web for at in range(step, end))
    assert state.states[0].summary[2] == 3 * num


def test_an_edit_that_cannot_be_made_leaves_the_feed_as_it_was() -> None:
    with feed(mixed(web=7, code=3)) as coordinator:
        train = coordinator["train"]
        before = [batch["x"].tolist() for batch in islice(train, 3)]
        (stream,) = train.streams
        for changes, why in (
            ({"fetch_fun": mixed(web=(corpus("web", 50), 1))}, "has 50 records, and had 60"),
            ({"fetch_fun": corpus("web")}, "source: 'mix' then"),
            ({"batch_size": 0}, "batch_size is 0"),
            ({"global_batch_size": 8}, "batch_size is 4 and global_batch_size is 8"),
            ({"fetch_fun": lambda call: [np.arange(4)]}, "a fetch function of your own"),
        ):
            with pytest.raises(FeedError, match=why):
                train.edit(**changes, why="no")
        assert train.streams == (stream,)
        before += [batch["x"].tolist() for batch in train]
    with feed(mixed(web=7, code=3)) as coordinator:
        assert before == [batch["x"].tolist() for batch in coordinator["train"]]
    with pytest.raises(ClosedError, match="is stopped"):
        train.edit(mixed(web=1, code=1), why="too late")


def test_a_feed_that_does_not_run_or_has_ended_is_not_edited() -> None:
    coordinator = feed(mixed(web=1))
    with pytest.raises(ConfigError, match="is not started in this process: change"):
        coordinator["train"].edit(mixed(web=1, code=1), why="more")
    with coordinator:
        rows = [batch["x"].tolist() for batch in coordinator["train"]]
        with pytest.raises(ResumeError, match="has ended"):
            coordinator["train"].edit(mixed(web=1, code=1), why="more")
        assert next(coordinator["train"], None) is None
    assert len(rows) == 15


def test_a_device_that_goes_on_before_the_edit_is_done_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_over, rows = Stream._take_over, list[int]()

    def late(self: Stream, old: Stream) -> None:
        rows.extend(next(train)["x"].tolist())
        take_over(self, old)

    with feed(mixed(web=7, code=3)) as coordinator:
        train = coordinator["train"]
        rows += next(train)["x"].tolist()
        monkeypatch.setattr(Stream, "_take_over", late)
        train.edit(mixed(web=1, code=1), why="equal")
        rows += [number for batch in train for number in batch["x"].tolist()]
    with feed(mixed(web=7, code=3)) as coordinator:
        first = next(coordinator["train"])["x"].tolist()
        state = coordinator.state_dict()
    with feed(mixed(web=1, code=1), state, edit="equal") as coordinator:
        assert rows == first + [n for b in coordinator["train"] for n in b["x"].tolist()]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_what_was_left_out_before_an_edit_is_known_after_it(ahead: int) -> None:
    def check(record: Any) -> Any:
        if record % 3 == 0:
            raise ValueError("no picture")
        return record

    def source(weight: int) -> Any:
        parts = {name: corpus(name).map(check, on_error="skip") for name in ("web", "code")}
        return sources.mix({"web": (parts["web"], weight), "code": (parts["code"], 1)})

    def left_out(coordinator: Any) -> Any:
        return coordinator.snapshot().states[0].left_out

    with ExitStack() as stack:
        live, plain = (Reader(stack, source(1), devices=2) for _ in range(2))
        live.read_to(2)
        for _ in range(ahead):
            live.read(0)
        live.feed.edit(source(3), why="more")
        plain.read_to(2 + ahead)
        resumed = Reader(stack, source(3), plain.coordinator.snapshot(), devices=2, edit="more")
        for _ in range(ahead):
            live.read(1)
        assert left_out(live.coordinator) == left_out(resumed.coordinator) != ()
        for one in (live, resumed):
            one.read(0), one.read(1)
        assert left_out(live.coordinator) == left_out(resumed.coordinator)


@pytest.mark.parametrize("seed", range(8))
def test_the_transcript_of_an_edit_is_that_of_a_stop_and_a_resume(
    seed: int, tmp_path: Path
) -> None:
    program, is_edited = Program(seed), False
    draw, size = program.draw, dict(program.size)
    settings: Any = {**program.settings, "epochs": 3}
    one, other = tmp_path / "live", tmp_path / "resumed"
    with ExitStack() as stack:
        live = Reader(stack, program.source(), transcript=one, **settings, **size)
        for _ in range(draw.randint(0, 15)):
            device = draw.randrange(len(live.devices))
            if live.rounds[device] - min(live.rounds) < 8:
                live.read(device)
        first, newest = program.source(), max(live.rounds)
        program.change()
        if not live.is_told_the_end:
            live.feed.edit(program.source(), why="more", **program.size)
            is_edited = True
        live.read_to(10**6)
    with ExitStack() as stack:
        plain = Reader(stack, first, transcript=other, **settings, **size)
        plain.read_to(newest if is_edited else 10**6)
        state = plain.coordinator.snapshot()
    if is_edited:
        with ExitStack() as stack:
            Reader(
                stack, program.source(), state, edit="more", transcript=other, **settings,
                **program.size,
            ).read_to(10**6)  # fmt: skip
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in other.iterdir())
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes()
        assert len(read_file(one / name).settings) == 1 + (is_edited and newest > 0)


def test_a_transcript_goes_on_behind_an_edit_of_which_no_step_has_come(tmp_path: Path) -> None:
    with feed(mixed(web=7, code=3), transcript=tmp_path) as coordinator:
        train = coordinator["train"]
        next(train)
        train.edit(mixed(web=1, code=1), why="equal")
        state = coordinator.snapshot()
        train.on(0).next_epoch()
    with feed(mixed(web=1, code=1), state, transcript=tmp_path) as coordinator:
        num = 1 + len(list(coordinator["train"]))
    (path,) = tmp_path.iterdir()
    assert read_file(path).steps.tolist() == [*range(num)]


def test_an_edit_that_fails_leaves_the_transcript_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Stream) -> None:
        raise ConfigError("no more threads")

    with feed(mixed(web=7, code=3), transcript=tmp_path) as coordinator:
        train = coordinator["train"]
        next(train)
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="no more threads"):
            patch.setattr(Stream, "start", fail)
            train.edit(mixed(web=1, code=1), why="equal")
        num = 1 + len(list(train))
    (path,) = tmp_path.iterdir()
    assert read_file(path).steps.tolist() == [*range(num)]
    assert len(read_file(path).settings) == 1


def test_an_edit_takes_the_place_of_an_error_that_was_read_ahead() -> None:
    def source(excluded: Any = ()) -> Any:
        def check(record: Any) -> Any:
            if record == bad:
                raise ValueError("bad record")
            return record

        return (corpus("web", excluded=excluded)).map(check)

    with feed(corpus("web")) as coordinator:
        bad = next(islice(coordinator["train"], 6, None))["x"][0]
    with feed(source()) as coordinator:
        train = coordinator["train"]
        rows = [row for batch in islice(train, 6) for row in batch["x"].tolist()]
        with pytest.raises(FeedError, match="bad record"):
            next(train)
        train.edit(source([int(bad)]), why="a bad record")
        rows += [row for batch in train for row in batch["x"].tolist()]
    assert sorted(rows) == [row for row in range(60) if row != bad]


def test_a_stop_ends_what_an_edit_has_left() -> None:
    names = {thread.name for thread in threading.enumerate()}
    with feed(mixed("repeat", web=1), devices=2, epochs=None) as coordinator:
        train = coordinator["train"]
        for _ in range(3):
            next(train.on(0))
        # The other device is behind, so both streams run.
        for web in (2, 3):
            train.edit(mixed("repeat", web=web, code=1), why=f"{web}")
        assert next(train.on(0)).step == 6
        assert next(train.on(1)).step == 1
    assert {thread.name for thread in threading.enumerate()} <= names
    with pytest.raises(ClosedError):
        next(train.on(1))
    assert train.stats()["handed_batches"] >= 4


def test_weights_that_are_a_function_name_what_is_to_be_called() -> None:
    with pytest.raises(ConfigError, match=r"'web' is a function.*call feed\.edit\(mix"):
        mixed(web=lambda step: 0.5)
    with pytest.raises(ConfigError, match=r"weights is a function.*call feed\.edit\(mix"):
        sources.mix({"web": corpus("web")}, weights=lambda step: {"web": 1})  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"schedule is a function.*call feed\.edit\(mix"):
        sources.mix({"web": corpus("web")}, lambda step: {"web": 1})  # type: ignore[arg-type]


@pytest.mark.process
def test_processes_give_the_rows_of_threads_after_an_edit() -> None:
    told = {}
    for executor in ("processes:2", None):
        with feed(mixed(web=7, code=3), executor=executor) as coordinator:
            train = coordinator["train"]
            told[executor] = [batch["x"].tolist() for batch in islice(train, 5)]
            train.edit(mixed(web=1, code=1), why="more code")
            told[executor] += [batch["x"].tolist() for batch in train]
    assert told["processes:2"] == told[None]


def test_gpus_go_on_each_after_its_own_last_batch_before_an_edit() -> None:
    machine = Machine(seed=3)
    kept: list[Any] = []
    with installed(machine), ExitStack() as stack:
        host = Reader(stack, mixed(web=7, code=3), devices=2)
        with feed(mixed(web=7, code=3), devices=("cuda:0", "cuda:1"), depth=2) as coordinator:
            train = coordinator["train"]
            mine = machine.clockwork.make("mine")
            train.on(1, stream=mine)
            came: dict[int, Any] = {}

            def read(device: int, train: Any = train) -> Any:
                batch = next(train.on(device))
                with machine.on(mine):
                    came[batch.step] = device, batch["x"].get().tolist()
                return batch

            kept += [read(0), read(0), read(1)]
            for number in range(2):
                made = mixed(web=1, code=1 + number)
                assert train.edit(made, why=f"{number}", batch_size=3) == 4 + 2 * number
                host.read_to(2 + number)
                host.feed.edit(made, why=f"{number}", batch_size=3)
                kept.append(read(0))
            for device in (1, 1, 1, 0, 1):
                kept.append(read(device))
            host.read_to(5)
            assert came == {step: host.came[step] for step in came}
            assert sorted(came) == list(range(10))
            kept.clear()
    del train, coordinator, read
    assert_sound(machine)


class Interrupt(Exception):
    """What a signal's handler raises."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Stream, "_edited"), (Stream, "start"), (Stream, "_take_over"), (Stream, "end_before"),
     (Stream, "_close"), (Stream, "wait_for_edit"), (DeviceFeed, "_read")],
)  # fmt: skip
def test_an_interrupt_anywhere_in_an_edit_leaves_it_made_or_not(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: Any
) -> None:
    interrupts, thread = [Interrupt()], threading.get_ident()

    def interrupt(*_: Any) -> None:
        if interrupts and threading.get_ident() == thread:
            raise interrupts.pop()

    rows: list[Any] = []
    with feed(mixed(web=7, code=3)) as coordinator:
        train = coordinator["train"]
        rows += [batch["x"].tolist() for batch in islice(train, 5)]
        with monkeypatch.context() as patch:
            around(patch, owner, name, **{when: interrupt})
            for act in (
                lambda: train.edit(mixed(web=1, code=1), why="more code"),
                lambda: rows.append(next(train)["x"].tolist()),
            ):
                if not interrupts:
                    break
                with suppress(Interrupt):
                    act()
        assert not interrupts
        train.edit(mixed(web=1, code=1), why="more code")
        (made,) = coordinator.snapshot().states[0].fingerprint["source.history"][2]
        rows += [batch["x"].tolist() for batch in train]
    assert made[3] == 5
    with feed(mixed(web=7, code=3)) as coordinator:
        wanted = [batch["x"].tolist() for batch in islice(coordinator["train"], 5)]
        state = coordinator.snapshot()
    with feed(mixed(web=1, code=1), state, edit="more code") as coordinator:
        assert rows == wanted + [batch["x"].tolist() for batch in coordinator["train"]]
