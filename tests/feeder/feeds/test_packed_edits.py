"""Edits of runs of `pack` and `batch_by_tokens`: what is left of a window comes, and comes once."""

from __future__ import annotations

import json
import logging
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.cli import main
from feeder.errors import ConfigError, ResumeError

pytestmark = pytest.mark.timeout(120)  # of many runs

FIRSTS = {"web": 0, "code": 1000, "books": 2000}
LONGEST = 13
BOS, EOS = 99_990, 99_991


def size_of(number: int) -> int:
    return number * 7919 % LONGEST + 1


def document(number: Any) -> Any:
    return int(number) * LONGEST + np.arange(size_of(int(number)))


def corpus(name: str, size: int = 40, *, excluded: Any = (), make: Any = document) -> Any:
    source = sources.arrays(np.arange(size) + FIRSTS[name])
    source = source.exclude(excluded) if excluded else source
    return source.map(make, on_error="skip" if make is defective else "raise").shuffle(1)


def mixed(**weights: Any) -> Any:
    return sources.mix({
        name: weight if isinstance(weight, tuple) else (corpus(name), weight)
        for name, weight in weights.items()
    })  # fmt: skip


def feed(source: Any, resume: Any = None, **settings: Any) -> Any:
    names = ["tokens", "segment_ids", "positions", "loss_mask"]
    if source.kind != "pack":
        names = names[:1]
    if source.kind == "batch_by_tokens":
        settings = {"dont_rebatch": True, **settings}
    settings = {"batch_size": 3, "coordinator": feeder.Coordinator(), **settings}
    return feeder.init_data_input_workers(names, source, resume=resume, **settings)


def read(source: Any, num: int | None, resume: Any = None, **settings: Any) -> tuple[Any, Any]:
    """The rows of some batches, each as the tokens of its documents, and the position after."""
    with feed(source, resume, **settings) as coordinator:
        rows = []
        for batch in islice(coordinator["train"], num):
            tokens = batch["tokens"].tolist()
            has = np.array(batch["tokens"]) >= 0
            has = np.array(batch["segment_ids"]) > 0 if len(batch) > 1 else has
            rows.append([
                [token for token, there in zip(row, of, strict=True) if there]
                for row, of in zip(tokens, has.tolist(), strict=True)
            ])  # fmt: skip
        return rows, coordinator.snapshot()


def every(*runs: Any) -> list[int]:
    return [token for rows in runs for batch in rows for row in batch for token in row]


def tokens_of(*names: str, size: int = 40, without: Any = ()) -> list[int]:
    numbers = [FIRSTS[name] + i for name in names for i in range(size)]
    return [token for n in numbers if n not in without for token in document(n).tolist()]


def test_what_is_left_of_a_window_comes_first_and_each_token_once() -> None:
    first = sources.pack(mixed(web=1, code=2), seq_len=8, window=8)
    with pytest.raises(ResumeError, match=r"seq_len: 8 then, 12 now.*give edit='why'$"):
        _, state = read(first, 2)
        feed(sources.pack(mixed(web=1, code=2), 12, 8), state)
    before, state = read(first, 2)
    then = sources.pack(mixed(web=1, code=1, books=1), seq_len=12, window=8)
    after, _ = read(then, None, state, edit="longer rows")
    assert sorted(every(before, after)) == sorted(tokens_of("web", "code", "books"))


def test_rows_are_those_of_what_is_left_and_then_of_new_documents() -> None:
    sizes = [5, 10, 3, 2, 4, 4, 1, 6]

    def packed(seq_len: int) -> Any:
        source = sources.arrays(np.arange(8)).map(lambda n: 100 * int(n) + np.arange(sizes[n]))
        return sources.pack(source, seq_len, window=4)

    # Of the first window two rows come: the first document, and six tokens of the second.
    before, state = read(packed(6), 2, batch_size=1)
    assert [len(row) for batch in before for row in batch] == [5, 6]
    after, _ = read(packed(9), None, state, edit="longer rows", batch_size=1)
    # Left: four tokens of document 1, then 2 and 3; document 4 fills the window.
    came = [[divmod(token, 100) for token in row] for batch in after for row in batch]
    rows = [sorted({number for number, _ in row}) for row in came]
    assert rows == [[1, 4], [2, 3], [5], [6, 7]]
    assert came[0][:4] == [(1, 6), (1, 7), (1, 8), (1, 9)]


KINDS = ("pieces", "batches", "bos and eos", "whole", "skip")


def defective(number: Any) -> Any:
    if int(number) % 3 == 0:
        raise ValueError("defective")
    return np.array([int(number)])


class Program:
    """A run in one epoch that is edited, drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.kind = draw.choice([*KINDS, "pieces", "skip"])
        may_drop = self.kind in ("whole", "pieces", "skip")
        self.settings = {"last_batch": draw.choice(["keep", "drop"]) if may_drop else "keep"}
        self.sizes = {"web": 30, "code": 30}
        self.came: list[int] = []
        self.state: Any = None

    def source(self) -> Any:
        draw = self.draw
        make = defective if self.kind == "skip" else document
        of = mixed(**{
            name: (corpus(name, n, make=make), draw.randint(1, 3)) for name, n in self.sizes.items()
        })  # fmt: skip
        if self.kind == "skip":
            return of
        seq_len, window = draw.randint(3, 20), draw.randint(1, 12)
        if self.kind == "batches":
            return of.batch_by_tokens(draw.randint(13, 60), window=window, value=-1)
        more = {"bos": BOS, "eos": EOS} if self.kind == "bos and eos" else {}
        if self.kind == "pieces" and (self.state is None or draw.random() < 0.7):
            more = {"window_tokens": draw.randint(1, 60)}
        return sources.pack(of, seq_len, window, **more)  # type: ignore[arg-type]

    def change(self) -> None:
        change = self.draw.choice(["sizes", "add", "grow"])
        if change == "add":
            self.sizes["books"] = 20
        elif change == "grow":
            self.sizes["web"] += 5

    def read(self, rounds: int | None, edit: str | None) -> bool:
        """Whether the run may go on."""
        devices = self.draw.randint(1, 3)
        try:
            size = self.draw.randint(1, 5) if self.kind == "skip" else 3
            coordinator = feed(
                self.source(), self.state, edit=edit, devices=devices, batch_size=size,
                **self.settings,
            )  # fmt: skip
        except ResumeError as error:
            assert "has ended" in str(error)
            return False
        with coordinator:
            queues = [coordinator["train"].on(i) for i in range(devices)]
            while rounds is None or rounds > 0:
                batches = [next(queue, None) for queue in queues]
                for batch in filter(None, batches):
                    tokens = np.array(batch["tokens"])
                    has = tokens >= 0
                    if len(batch) > 1:
                        has = np.array(batch["segment_ids"]) > 0
                    self.came += tokens[has].tolist()
                if None in batches:
                    return False
                rounds = rounds and rounds - 1
            self.state = coordinator.snapshot()
        return True


@pytest.mark.served  # as much work as feeds that are served
@pytest.mark.parametrize("seed", range(24))
def test_each_token_comes_once_whatever_is_packed_and_edited(seed: int) -> None:
    program = Program(seed)
    goes_on = program.read(program.draw.randint(0, 9), None)
    for number in range(program.draw.randint(1, 6)):
        if goes_on:
            program.change()
            goes_on = program.read(program.draw.randint(0, 2), f"edit {number}")
    if goes_on:
        program.read(None, "the last")
    came, sizes = sorted(token for token in program.came if token < BOS), program.sizes
    expected = sorted(t for name, size in sizes.items() for t in tokens_of(name, size=size))
    if program.kind == "skip":
        expected = [FIRSTS[name] + i for name, size in sizes.items() for i in range(size)]
        expected = sorted(number for number in expected if number % 3)
    if not goes_on or program.settings["last_batch"] == "drop":
        assert len(came) == len(set(came))
        assert set(came) <= set(expected)
        return
    assert came == expected
    if program.kind == "bos and eos":
        assert [program.came.count(one) for one in (BOS, EOS)] == [sum(sizes.values())] * 2


def test_what_is_excluded_comes_no_more_also_of_a_half_used_window(caplog: Any) -> None:
    first = sources.pack(mixed(web=1), seq_len=13, window=40)
    before, state = read(first, 2)
    came = {token // LONGEST for token in every(before)}
    out = [next(n for n in range(40) if n not in came), min(came)]
    then = sources.pack(mixed(web=(corpus("web", excluded=out), 1)), seq_len=13, window=40)
    with caplog.at_level(logging.WARNING, "feeder"):
        after, _ = read(then, None, state, edit="a bad document")
    assert sorted(every(before, after)) == tokens_of("web", without=out[:1])
    assert "1 of the 2 records that are excluded have come already" in caplog.text


def test_a_source_that_is_taken_out_is_wanted_until_its_documents_have_come() -> None:
    first = sources.pack(mixed(web=1, code=1), seq_len=8, window=10)
    before, state = read(first, 1)
    with pytest.raises(ResumeError, match=r"'code' has been taken out .* with weight 0"):
        feed(sources.pack(mixed(web=1), 8, 10), state, edit="web alone")
    with_it = sources.pack(mixed(web=1, code=0), 8, 10)
    some, state = read(with_it, 8, state, edit="web alone")
    rest, _ = read(sources.pack(mixed(web=1), 8, 10), None, state)
    came = every(before, some, rest)
    assert len(set(came)) == len(came)
    assert set(tokens_of("web")) < set(came)


@pytest.mark.served
def test_a_resume_reads_one_window_beside_what_is_left() -> None:
    reads: list[int] = []

    def noted(number: Any) -> Any:
        reads.append(int(number))
        return document(number)

    def packed(seq_len: int) -> Any:
        part = corpus("web", 990, make=noted)
        return sources.pack(sources.mix({"web": (part, 1)}), seq_len, 10)

    _, state = read(packed(8), 4)
    for number in range(20):
        _, state = read(packed(9 + number), 4, state, edit=f"{number}")
    with feed(packed(28), state, num_worker_threads=1, max_buffered_batches=1) as coordinator:
        del reads[:]
        next(coordinator["train"])
        # The window at hand, and those that are read ahead; none of the twenty chapters.
        assert len(reads) < 200


def test_all_comes_again_but_from_before_another_length_of_rows() -> None:
    one, state = read(sources.pack(mixed(web=1, code=1), 8, 10), 3)
    two, state = read(sources.pack(mixed(web=1, code=2), 8, 4), 3, state, edit="smaller windows")
    again, _ = read(sources.pack(mixed(web=1, code=2), 8, 4), 6, state.at_start())
    assert again == one + two
    longer = sources.pack(mixed(web=1, code=2), 9, 4)
    _, state = read(longer, 1, state, edit="longer rows")
    with pytest.raises(ResumeError, match=r"before step 6.*seq_len 8 then"):
        feed(longer, state.at_start())


@pytest.mark.parametrize("change", [{"eos": 7}, {"long": "drop"}, {"per_document": ["doc"]}])
def test_what_no_edit_can_change_of_a_packing_is_named(change: Any) -> None:
    _, state = read(sources.pack(mixed(web=1), 8, 4), 1)
    (field,) = change
    with pytest.raises(ResumeError, match=f"cannot change these: source.{field}: "):
        feed(sources.pack(mixed(web=1), 8, 4, **change), state, edit="no")


def test_windows_that_are_shuffled_themselves_are_refused() -> None:
    source = sources.pack(mixed(web=1), 8, 4, random_shuffle=True)
    _, state = read(source, 1)
    with pytest.raises(feeder.ConfigError, match="pack that is shuffled or sharded itself"):
        feed(source, state, edit="no")


def test_rows_that_no_document_fits_into_are_an_error() -> None:
    part = corpus("web", make=lambda number: np.arange(20) + int(number))
    _, state = read(sources.pack(part, 20, 4, "drop"), 1)
    with feed(sources.pack(part, 8, 4, "drop"), state, edit="short rows") as coordinator:  # noqa: SIM117
        with pytest.raises(feeder.FeedError, match=r"does not fit \(seq_len=8, "):
            next(coordinator["train"])


def test_documents_that_are_left_out_may_be_below_a_packing() -> None:
    def odd(number: Any) -> Any:
        if int(number) % 3 == 0:
            raise ValueError("defective")
        return document(number)

    def source(seq_len: int) -> Any:
        part = sources.arrays(np.arange(40)).map(odd, on_error="skip").shuffle(1)
        return sources.pack(part.filter(lambda tokens: len(tokens) > 2), seq_len, 6)

    before, state = read(source(8), 2)
    after, _ = read(source(11), None, state, edit="longer rows")
    left = [n for n in range(40) if n % 3 and size_of(n) > 2]
    assert sorted(every(before, after)) == [t for n in left for t in document(n).tolist()]


def test_a_record_that_cannot_be_read_is_an_error_of_the_edit() -> None:
    is_lost: list[bool] = []

    def lost(number: Any) -> Any:
        if is_lost:
            raise ValueError("lost")
        return document(number)

    part = corpus("web", make=lost)
    _, state = read(sources.pack(part, 8, 10), 1)
    is_lost.append(True)
    with pytest.raises(ResumeError, match=r"left of windows cannot be found: .*lost"):
        feed(sources.pack(part, 9, 10), state, edit="longer rows")


@pytest.mark.served
def test_twenty_edits_are_a_small_position() -> None:
    state, sizes = None, []
    for number in range(21):
        weights = {name: number % (3 + i) + 1 for i, name in enumerate(FIRSTS)}
        source = sources.pack(mixed(**weights), 8 + number % 5, 4 + number % 3)
        edit = None if state is None else f"{number}"
        _, state = read(source, 1, state, edit=edit, epochs=None)
        sizes.append(len(bytes(state)))
    assert sizes[-1] - sizes[0] <= 20 * 200


@pytest.mark.parametrize("seed", range(6))
def test_batches_know_the_pieces_of_documents_that_they_hold(seed: int) -> None:
    draw, state, num = random.Random(seed), None, 0
    for number in range(4):
        options: dict[str, Any] = {"window_tokens": 40} if seed % 2 else {}
        packed = sources.pack(corpus("web"), draw.choice([8, 12]), draw.choice([4, 9]), **options)
        edit = {} if state is None else {"resume": state, "edit": f"edit {number}"}
        with feed(packed, **edit) as coordinator:
            for batch in islice(coordinator["train"], 2):
                for tokens, pieces in zip(batch["tokens"], batch.records(), strict=True):
                    row = np.zeros_like(tokens)
                    for piece in pieces:
                        stop = piece.offset + piece.stop - piece.start
                        row[piece.start : piece.stop] = document(piece.number)[piece.offset : stop]
                    assert row.tolist() == tokens.tolist()
                    num += 1
                told = coordinator["train"].records(batch.step, read=True)
                assert told == batch.records()
            state = coordinator.state_dict()
    assert num > 10
    with feed(packed, state) as coordinator, pytest.raises(ConfigError, match="the last edit of"):
        coordinator["train"].records(0, read=True)


def test_the_log_tells_of_packing(tmp_path: Path, capsys: Any) -> None:
    _, state = read(sources.pack(mixed(web=1), 8, 10), 2)
    _, state = read(sources.pack(mixed(web=1), 12, 20), 1, state, edit="longer rows")
    state.write(tmp_path / "run.snapshot")
    assert main(["log", str(tmp_path / "run.snapshot")]) == 0
    told = capsys.readouterr().out
    assert "pack: seq_len 8, window 10, long split" in told
    assert "pack: seq_len 12, window 20, long split" in told
    assert main(["log", "--json", str(tmp_path / "run.snapshot")]) == 0
    first, second = json.loads(capsys.readouterr().out)["train[0]"]
    assert (first["packing"]["seq_len"], second["packing"]["seq_len"]) == (8, 12)
    # Windows are read whole.
    assert (first["sources"]["web"]["read"], second["sources"]["web"]["read"]) == (10, 20)


@pytest.mark.process
def test_processes_give_the_rows_of_threads() -> None:
    _, state = read(sources.pack(mixed(web=1, code=1), 8, 10), 2)
    told = {}
    for executor in ("processes:2", None):
        source = sources.pack(mixed(web=1, code=3), 9, 7)
        told[executor], _ = read(source, 6, state, edit="more code", executor=executor)
    assert told["processes:2"] == told[None]
