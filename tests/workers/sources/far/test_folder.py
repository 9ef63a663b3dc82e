"""Blocks on a disk are whole, are bounded whatever is killed, and are the only files that go."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from far_child import data_of, key_of
from feeder.errors import ConfigError
from feeder.workers.sources.far import folder as module
from feeder.workers.sources.far.folder import NEVER, Claim, Folder, Outcome
from project import ROOT, TESTS

PAGE = 4096
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(str(tmp_path / "cache"), 4 * PAGE)
    yield made
    made.close()


def put(folder: Folder, number: int, due: float = 0.0) -> Outcome | None:
    """Put a block of one page; None if that could be done."""
    outcome = folder.claim(key_of(number), 1000, f"b{number}", due or time.time() + number)
    if isinstance(outcome, Outcome):
        return outcome
    outcome.write(bytes([number % 256]) * 1000)
    return None


def read(folder: Folder, number: int, start: int, stop: int) -> bytes | None:
    block = folder.open(key_of(number))
    return block and block.read(start, stop)


def there(folder: Folder) -> list[int]:
    return sorted(int(entry.key, 16) for entry in folder.entries())


def bytes_in(folder: Folder) -> int:
    """What the blocks take, whole or not, while nobody takes or gives back room."""
    sizes: dict[str, int] = {}
    with folder._changing():
        for file in Path(folder.path, "blocks").glob("??/*"):
            with suppress(FileNotFoundError):  # it was renamed: it is found under its name
                key = file.name[:32]
                sizes[key] = max(sizes.get(key, 0), file.stat().st_size)
    return sum(-(-size // PAGE) * PAGE for size in sizes.values())


def test_what_is_put_is_read_in_part_and_by_others(folder: Folder) -> None:
    assert read(folder, 3, 0, 10) is None
    assert put(folder, 3) is None
    assert put(folder, 3) is Outcome.THERE
    assert read(folder, 3, 990, 1000) == b"\3" * 10
    other = Folder(folder.path, folder.max_bytes)
    assert (other.has(key_of(3)), read(other, 3, 0, 2)) == (True, b"\3\3")
    other.close()


def test_the_block_that_is_needed_last_goes_and_none_for_one_that_is_needed_later(
    folder: Folder,
) -> None:
    for number in (10, 40, 20, 30):
        assert put(folder, number) is None
    assert put(folder, 50) is Outcome.FULL
    assert put(folder, 5) is None
    assert there(folder) == [5, 10, 20, 30]
    folder.rank([(key_of(10), NEVER)])
    assert put(folder, 25) is None
    assert there(folder) == [5, 20, 25, 30]
    # Nobody waits any more for what was due an hour ago.
    folder.rank([(key_of(20), time.time() - 3600)])
    assert put(folder, 99) is None
    assert there(folder) == [5, 25, 30, 99]


def test_what_is_being_written_has_its_room_and_goes_for_nobody(folder: Folder) -> None:
    claims = [folder.claim(key_of(n), 1000, "", NEVER - 1) for n in range(4)]
    other = Folder(folder.path, folder.max_bytes)
    assert other.claim(key_of(0), 1000, "", 1.0) is Outcome.ELSEWHERE
    assert other.claim(key_of(9), 1000, "", 1.0) is Outcome.FULL
    assert not other.has(key_of(0))
    first, *rest = claims
    assert isinstance(first, Claim)
    first.drop()
    assert put(other, 9) is None
    for n, claim in enumerate(rest, 1):
        assert isinstance(claim, Claim)
        claim.write(bytes([n]) * 1000)
    assert there(other) == [1, 2, 3, 9]
    other.close()


def test_what_is_being_written_keeps_nothing_else_from_going(folder: Folder) -> None:
    for number in (1, 2, 3):
        assert put(folder, number) is None
    claim = folder.claim(key_of(4), 1000, "", time.time())
    assert isinstance(claim, Claim)
    other = Folder(folder.path, folder.max_bytes)
    assert other.prune(0) == 3
    claim.write(b"x" * 1000)
    assert there(other) == [4]
    other.close()


def test_a_cache_that_has_less_room_by_now_comes_within_it(folder: Folder) -> None:
    for number in (1, 2, 3, 4):
        assert put(folder, number) is None
    less = Folder(folder.path, 2 * PAGE)
    assert less.keys() == {key_of(1), key_of(2)}
    # Another one may still have more.
    assert [put(folder, number) for number in (3, 4)] == [None, None]
    assert put(less, 5) is Outcome.FULL
    assert there(less) == [1, 2]
    less.close()


def test_room_is_found_without_going_through_all_blocks(folder: Folder) -> None:
    now, num = time.time(), 3000
    steps: list[None] = []
    folder.max_bytes = num * PAGE
    with folder._changing() as table:
        table.executemany(
            "INSERT INTO blocks VALUES (?, ?, ?, '', NULL)",
            [(key_of(number), PAGE, now + 100 + number) for number in range(num)],
        )
        # Of its instructions it tells each hundredth.
        table.set_progress_handler(lambda: steps.append(None), 100)
    assert put(folder, num, now + 1) is None
    assert put(folder, num + 1, now + 10 * num) is Outcome.FULL
    assert len(steps) < 30


def test_a_writer_that_is_gone_has_no_room(folder: Folder) -> None:
    claim = folder.claim(key_of(1), 3 * PAGE, "", 1.0)
    assert isinstance(claim, Claim)
    os.write(claim._file, b"half")
    os.close(claim._file)  # as its death does
    other = Folder(folder.path, folder.max_bytes)
    assert put(other, 2) is None
    assert put(other, 1) is None
    assert len(list(Path(folder.path).glob("blocks/??/*"))) == 2
    # Another one of the same block, with room for both.
    claim = other.claim(key_of(3), 1000, "", 1.0)
    assert isinstance(claim, Claim)
    os.close(claim._file)
    assert put(folder, 3) is None
    assert there(folder) == [1, 2, 3]
    other.close()


def test_a_damaged_block_is_as_if_it_were_not_there(folder: Folder) -> None:
    for number in (1, 2, 3):
        assert put(folder, number) is None
        path = Path(folder.path_of(key_of(number)))
        data = path.read_bytes()
        path.write_bytes({1: data[:-1], 2: data[:30] + b"x" + data[31:], 3: b""}[number])
        other = Folder(folder.path, folder.max_bytes)
        assert read(other, number, 0, 10) is None
        assert not path.exists()
        other.close()
    # Under the name of another one, too.
    assert put(folder, 7) is None
    target = Path(folder.path_of(key_of(8)))
    target.parent.mkdir(exist_ok=True)
    os.rename(folder.path_of(key_of(7)), target)
    assert read(folder, 8, 0, 10) is None


def test_a_damaged_block_goes_only_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put(folder, 1) is None
    path = Path(folder.path_of(key_of(1)))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    quick, slow = (Folder(folder.path, folder.max_bytes) for _ in range(2))
    compare, claims = module._is_whole, []

    def compare_slowly(file: int, key: str) -> bool:
        is_whole = compare(file, key)
        if not claims:
            claims.append(None)
            assert quick.open(key) is None
            claims[0] = quick.claim(key, 1000, "", time.time())
        return is_whole

    monkeypatch.setattr(module, "_is_whole", compare_slowly)
    assert slow.open(key_of(1)) is None
    (claim,) = claims
    assert isinstance(claim, Claim)
    claim.write(b"2" * 1000)
    assert read(slow, 1, 0, 3) == b"222"
    # One that is there again stays, too.
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    file = os.open(path, os.O_RDONLY)
    with closing(Folder(folder.path, folder.max_bytes)) as other:
        assert read(other, 1, 0, 3) is None
    assert put(quick, 1) is None
    slow.remove(key_of(1), file)
    os.close(file)
    assert read(slow, 1, 0, 3) == b"\1\1\1"
    quick.close()
    slow.close()


@pytest.mark.parametrize(
    "names",
    [
        ["thesis.tex"], ["blocks-of-my-thesis.txt"], ["indexes.csv"], ["feeder-cache.md"],
        ["feeder-cache"], ["table.sqlite"], ["blocks"],
        ["table.sqlite", "indexes"], ["lost+found", "a"],
    ],
)  # fmt: skip
def test_a_folder_with_other_files_is_no_cache(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("all of it")
    with pytest.raises(ConfigError, match="no cache of feeder's"):
        Folder(str(tmp_path), 4 * PAGE).prepare()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        names, "all of it"
    )


def test_a_table_of_others_makes_no_cache(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "table.sqlite")) as table:
        table.execute("CREATE TABLE blocks (mine)")
    before = (tmp_path / "table.sqlite").read_bytes()
    with pytest.raises(ConfigError, match="no cache of feeder's"):
        Folder(str(tmp_path), 4 * PAGE).prepare()
    assert (tmp_path / "table.sqlite").read_bytes() == before


def test_a_cache_that_lost_its_marker_is_one(folder: Folder) -> None:
    put(folder, 1)
    folder.close()
    Path(folder.path, "feeder-cache").unlink()
    assert there(folder) == [1]
    assert Path(folder.path, "feeder-cache").exists()


def test_the_root_of_a_file_system_can_be_a_cache(folder: Folder) -> None:
    lost = Path(folder.path, "lost+found")
    lost.mkdir(parents=True)
    (lost / "#1").write_text("found")
    assert put(folder, 1) is None
    assert folder.verify() == (1, [])
    assert folder.prune(0) == 1
    assert (lost / "#1").read_text() == "found"


def test_nothing_goes_that_it_did_not_make(folder: Folder) -> None:
    put(folder, 1)
    foreign = [
        Path(folder.path, "blocks", "00", "notes.txt"), Path(folder.path, "blocks", "mine"),
        Path(folder.path, "blocks", "00", key_of(1)[:-1]), Path(folder.path, "x.partial"),
    ]  # fmt: skip
    for path in foreign:
        path.write_text("mine")
    for number in range(2, 12):
        put(folder, number, due=1.0 + time.time() - number)
    folder.verify()
    assert folder.prune(0) >= 1
    assert there(folder) == []
    assert all(path.read_text() == "mine" for path in foreign)


def test_a_table_that_is_lost_or_damaged_is_made_of_the_files(folder: Folder) -> None:
    for number in range(3):
        put(folder, number)
    folder.close()
    table = Path(folder.path, "table.sqlite")
    table.unlink()
    assert there(folder) == [0, 1, 2]
    assert put(folder, 3) is None
    assert put(folder, 4) is None
    assert len(there(folder)) == 4
    folder.close()
    table.write_bytes(b"no table" * 1000)
    with pytest.raises(OSError, match="table"):
        folder.entries()
    assert folder.verify() == (4, [])
    assert len(there(folder)) == 4


def test_a_table_that_others_hold_is_let_be(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, 1)
    monkeypatch.setattr(module, "_LOCKED_S", 0.01)
    other = Folder(folder.path, folder.max_bytes)
    with folder._changing(), pytest.raises(OSError, match="locked"):
        other.verify()
    assert other.verify() == (1, [])
    other.close()


def test_a_change_that_a_signal_interrupts_holds_the_table_for_nobody(folder: Folder) -> None:
    folder.keys()
    table: Any = folder._table

    class Interrupted:
        in_transaction = property(lambda self: table.in_transaction)

        def execute(self, statement: str) -> None:
            table.execute(statement)
            if statement == "BEGIN IMMEDIATE":
                raise KeyboardInterrupt

    made: Any = Interrupted()
    folder._table = made
    with pytest.raises(KeyboardInterrupt):
        folder.keys()
    assert not table.in_transaction
    folder._table = table
    assert folder.keys() == set()


@pytest.mark.process
def test_a_child_that_is_forked_while_a_table_is_changed_can_change_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.keys()
    is_changed, is_waited_for = Event(), Event()

    class Watched:
        def __init__(self, lock: Any) -> None:
            self._lock, self.release = lock, lock.release

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

        def acquire(self, timeout: float) -> bool:
            is_waited_for.set()
            return bool(self._lock.acquire(timeout=timeout))

    def change() -> None:
        with folder._changing() as table:
            table.execute("UPDATE room SET used = used")
            is_changed.set()
            is_waited_for.wait(20)

    made: Any = Watched(folder._lock)
    folder._lock = made
    thread = Thread(target=change)
    thread.start()
    assert is_changed.wait(20)
    child = os.fork()
    if not child:
        signal.alarm(20)
        status = 1
        try:
            folder.begin()  # as the blocks do
            monkeypatch.setattr(module, "_LOCKED_S", 0.01)
            assert folder.keys() == set()
            status = 0
        finally:
            os._exit(status)
    is_waited_for.set()
    thread.join(20)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # The lock is free again.
    assert folder.keys() == set()


def test_blocks_are_for_their_owner_alone(folder: Folder) -> None:
    put(folder, 1)
    for path in (Path(folder.path), *Path(folder.path, "blocks").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0 or path.name == "blocks"


def test_verify_names_what_is_damaged(folder: Folder) -> None:
    put(folder, 1)
    put(folder, 2)
    path = Path(folder.path_of(key_of(2)))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert folder.verify() == (1, ["b2"])
    assert there(folder) == [1]


def test_a_disk_that_cannot_be_written_is_an_error_of_the_system(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, 1)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            put(folder, 2)
    # Its room was given back.
    assert [put(folder, number) for number in (2, 3, 4)] == [None] * 3
    assert len(list(Path(folder.path).glob("blocks/??/*"))) == 4


@pytest.mark.process
def test_writers_that_are_killed_leave_whole_blocks_within_the_bound(tmp_path: Path) -> None:
    path, max_bytes, draw = str(tmp_path / "cache"), 60 * PAGE, random.Random(7)
    survivor = Folder(path, max_bytes)
    survivor.prepare()
    for kill in range(12):
        command = [sys.executable, "-m", "far_child", path, str(max_bytes)]
        children = [
            subprocess.Popen([*command, f"{kill}/{n}"], stdout=subprocess.PIPE, env=ENVIRONMENT)
            for n in range(2)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"begun\n"
        # Some work of this process is the clock: no time is waited for.
        for _ in range(draw.randrange(1, 40)):
            number = draw.randrange(40)
            data = data_of(number)
            assert read(survivor, number, 0, len(data)) in (None, data)
            claim = survivor.claim(key_of(number), len(data), "", time.time() - draw.random())
            if isinstance(claim, Claim):
                claim.write(data)
            assert bytes_in(survivor) <= max_bytes
        for child in children:
            child.kill()
            child.wait(20)
            assert child.stdout is not None
            child.stdout.close()
        assert bytes_in(survivor) <= max_bytes
    assert survivor.verify()[1] == []
    survivor.prune(max_bytes)
    assert not list(Path(path).glob("blocks/??/*.partial"))
    survivor.close()


def test_a_python_without_sqlite_is_told(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(OSError, match="built without SQLite"):
        folder.keys()
