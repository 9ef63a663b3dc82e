"""Fetch functions that are sent to a process: there they are imported by their names."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from feeder import Call
from feeder.workers import sources
from fetches import make_rows

NUM_CALLS = 20
"""Calls of an epoch."""


def once(path: Path) -> bool:
    """Whether nobody has come by here before, in whichever process."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


def pause() -> None:
    """Pause before a call for as long as nobody can foresee."""
    random_bytes = os.urandom(2)
    if random_bytes[0] < 80:
        threading.Event().wait(random_bytes[1] / 256_000)


def rows_of(call: Call, num: int = 3) -> dict[str, np.ndarray]:
    """Return the rows of a call of a pure function, and end its epoch."""
    if call.index >= NUM_CALLS:
        raise StopIteration
    return make_rows(0, call.epoch, call.index, num)


def plain(call: Call) -> Any:
    """Give rows, and do nothing else."""
    return rows_of(call)


def beyond(call: Call) -> Any:
    """Give rows again beyond the end of the epoch."""
    if call.index == 5:
        raise StopIteration
    return make_rows(0, call.epoch, call.index, 3)


class Tensor:
    """Memory that NumPy can read, as a tensor of another library is."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **settings: Any) -> Any:
        return self._array.__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __reduce__(self) -> Any:
        raise TypeError("it is not pickled")


def tensors(call: Call) -> Any:
    """Give the rows of `plain` as tensors."""
    return {name: Tensor(array) for name, array in rows_of(call).items()}


class Labelled(np.ndarray):
    """An array of a subclass, which is not pickled either."""

    def __reduce__(self) -> Any:
        raise TypeError("it is not pickled")


def labelled(call: Call) -> Any:
    """Give the rows of `plain` as arrays of a subclass."""
    return {name: array.view(Labelled) for name, array in rows_of(call).items()}


def many(call: Call) -> Any:
    """Give rows, slowly, for long."""
    if call.index >= 4000:
        raise StopIteration
    threading.Event().wait(0.004)
    return [np.full(8, call.index)]


class HangsOnce:
    """Hangs in the first call with some number of all, and not again."""

    def __init__(self, mark: Path, number: int) -> None:
        self.mark, self.number = mark, number

    def __call__(self, call: Call) -> Any:
        number = call.epoch * NUM_CALLS + call.index
        if number >= self.number and once(self.mark):
            threading.Event().wait()
        return rows_of(call)


class LiesNowAndThen:
    """Takes long for one call in some hundred, when it is made first, and gives other rows then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, call: Call) -> Any:
        number = call.epoch * NUM_CALLS + call.index
        # So few that long calls do not count as usual.
        if number % 499 == 100 and once(self.folder / str(number)):
            threading.Event().wait(1.0)
            return make_rows(0, 77, 77, 3)
        return rows_of(call)


class Cursors:
    """A pure function with cursors, which says by files where it was put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, call: Call) -> Any:
        return rows_of(call)

    def cursor(self, call: Call) -> bytes:
        return f"{call.epoch}-{call.index}".encode()

    def seek(self, call: Call, cursor: bytes) -> None:
        assert cursor == f"{call.epoch}-{call.index - 1}".encode()
        self.folder.joinpath(f"{cursor.decode()} {os.getpid()}").touch()


class At:
    """Does something at one call, before it gives rows."""

    def __init__(self, index: int, act: Callable[..., Any], *args: Any) -> None:
        self.index = index
        self.act = act
        self.args = args

    def __call__(self, call: Call) -> Any:
        if call.index == self.index:
            self.act(*self.args)
        return rows_of(call)


def die(number: int = signal.SIGKILL) -> None:
    """End this process by a signal."""
    # A test that expects it does not want the stacks.
    faulthandler.disable()
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


def door(folder: Path) -> str:
    """Return a place where a call that never returns says that it has begun."""
    path = str(folder / "door")
    os.mkfifo(path)
    return path


def wait_at(door: str) -> None:
    """Wait until a call has begun."""
    with open(door):
        pass


def hang_in_a_place_of_its_own(door: str) -> None:
    """Never return."""
    with open(door, "w"):
        pass
    threading.Event().wait()


class Marked:
    """Tells by a file for each call which process has made it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, call: Call) -> Any:
        rows = rows_of(call)
        self.folder.joinpath(f"{call.epoch}-{call.index}-{os.getpid()}").touch()
        return rows


class Raises:
    """Raises in its fourth call."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def __call__(self, call: Call) -> Any:
        if call.index == 3:
            raise self.make()
        return rows_of(call)


class NeedsTwo(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class HoldsLock(Exception):
    """Has an argument that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock", threading.Lock())


class SaysNothing(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def needs_two() -> BaseException:
    return NeedsTwo("one", "two")


def value_error() -> BaseException:
    return ValueError("a value")


def chained() -> BaseException:
    error = ValueError("a value")
    error.__cause__ = KeyError("its cause")
    return error


class Flaky:
    """`fetch(worker_id, batch_size)` around another one: each call of some raises at first."""

    def __init__(self, fetch: Any, folder: Path) -> None:
        self.fetch = fetch
        self.folder = folder

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        epoch, call = self.fetch.at[worker_id]
        chunk = self.fetch(worker_id, batch_size)
        if call % 2 and once(self.folder / f"{worker_id}-{epoch}-{call}"):
            raise OSError("flaky")
        return chunk

    def cursor(self, worker_id: int) -> Any:
        return self.fetch.cursor(worker_id)

    def seek(self, worker_id: int, cursor: Any) -> None:
        self.fetch.seek(worker_id, cursor)


# ---- Draws from generators that belong to the whole process


def draw() -> np.ndarray:
    """Draw from each of them."""
    draws = [random.random(), np.random.random_sample()]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        draws.append(torch.rand(1, dtype=torch.float64).item())
    return np.array([draws])


def drawing(call: Call) -> Any:
    """Give a row of draws, from a pure function."""
    if call.index >= NUM_CALLS:
        raise StopIteration
    return [draw()]


def drawing_late(call: Call) -> Any:
    """Give a row of draws, from a pure function that imports PyTorch in the middle of a call."""
    if call.index >= NUM_CALLS:
        raise StopIteration
    first = random.random()
    import torch

    return [np.array([[first, torch.rand(1, dtype=torch.float64).item()]])]


class Drawing:
    """Gives a row of draws, by workers; with cursors."""

    def __init__(self) -> None:
        self.at: dict[int, int] = {}

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        at = self.at.get(worker_id, 0)
        if at % 11 == 10:
            self.at[worker_id] = at + 1
            raise StopIteration
        self.at[worker_id] = at + 1
        return [draw()]


class DrawingSeek(Drawing):
    """The same with cursors."""

    def cursor(self, worker_id: int) -> int:
        return self.at.get(worker_id, 0)

    def seek(self, worker_id: int, cursor: int) -> None:
        self.at[worker_id] = cursor


def draw_for(*given: Any) -> Any:
    """Draw for a record, whatever it is: `map`, a decoder, and a picture's transform."""
    return draw()[0]


def draw_half(record: Any) -> bool:
    """Draw whether a record stays."""
    return random.random() < 0.5


# ---- Sources


def drawn_sample(info: sources.SampleInfo) -> tuple[int, float, float]:
    return info.idx_in_epoch, random.random(), float(np.random.random_sample())


# ---- What a process says


def speak() -> None:
    """Print and log, in every way."""
    print("printed")
    print("to stderr", file=sys.stderr)
    sys.stdout.write("without an end")
    sys.stdout.flush()
    sys.stdout.buffer.write("in bytes: ü\n".encode())
    print("\ud800")
    logging.getLogger("remote").warning("logged %s", "here", extra={"who": "a process"})
    try:
        raise ValueError("told")
    except ValueError:
        logging.getLogger("remote").exception("an error")


def read_stdin() -> None:
    """Find nothing there."""
    assert sys.stdin.read() == ""


def look_at_environment(variables: dict[str, str]) -> None:
    """Find the variables, and no input."""
    assert {name: os.environ[name] for name in variables} == variables
    read_stdin()


def import_it(name: str) -> None:
    """Find a module imported."""
    assert name in sys.modules


def compute_for_ever(door: str) -> None:
    """Never return, and wait for nothing."""
    with open(door, "w"):
        pass
    while True:
        pass


class Counts:
    """Leaves a file for each process that comes by, and ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, call: Call) -> Any:
        if call.index == 0:
            self.folder.joinpath(str(os.getpid())).touch()
            die()
        return rows_of(call)


_THE_SAME = ValueError("always the same")


def the_same() -> BaseException:
    return _THE_SAME


class Closed:
    """A stream that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


# ---- Odd chunks, of the columns of `fetches`


class Gives:
    """Gives something else at one call."""

    def __init__(self, give: Callable[[], Any], index: int) -> None:
        self.give = give
        self.index = index

    def __call__(self, call: Call) -> Any:
        return self.give() if call.index == self.index else rows_of(call)


def _with(**columns: Any) -> Any:
    return {**make_rows(9, 0, 0, 3), **columns}


def objects() -> Any:
    return _with(vector=np.array([None, {}, "x"], object))


def no_array() -> Any:
    return _with(label=[1, 2, 3])


def no_tuple() -> Any:
    return 7


def scalar() -> Any:
    return _with(label=np.float32(1.0))


def uneven() -> Any:
    return _with(label=np.zeros(2, np.uint16))


def masked() -> Any:
    return _with(label=np.ma.masked_array([1, 2, 3], [True, False, True], np.uint16))


def transposed() -> Any:
    return _with(vector=np.arange(9, dtype=np.float32).reshape(3, 3).T)


def read_only() -> Any:
    array = np.arange(3)
    array.flags.writeable = False
    return _with(id=array)


def strided() -> Any:
    return _with(id=np.arange(30)[::-10])


def empty() -> Any:
    return make_rows(9, 0, 0, 0)


def structured() -> Any:
    return _with(label=np.zeros(3, [("a", "u1"), ("b", "f8")]))


def generator() -> Any:
    return (row for row in range(3))


class DeadlyDrawing(Drawing):
    """Ends its process in some calls, once each, after it has drawn."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder = folder

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        at = self.at.get(worker_id, 0)
        chunk = super().__call__(worker_id, batch_size)
        if self.folder is not None and at % 3 == 2 and once(self.folder / f"{worker_id}-{at}"):
            die()
        return chunk


class Held:
    """Never returns from its seventh call."""

    def __call__(self, call: Call) -> Any:
        if call.index == 6:
            threading.Event().wait()
        return rows_of(call, 8)


# ---- Large chunks of one column, in every kind of memory

ROWS = 4
"""Rows of each large chunk, and of a batch: so that a chunk can be passed on as it is."""


def filled(array: np.ndarray, number: int) -> np.ndarray:
    """Fill an array with what no other one has."""
    flat = array.reshape(-1)
    flat[:] = (np.arange(flat.size) * 31 + number * 7919) % 251
    return array


class ManySizes:
    """Gives chunks of many sizes, some made by `call.empty` and some not."""

    def __init__(self, num_calls: int, seed: int) -> None:
        self.num_calls = num_calls
        self.seed = seed

    def __call__(self, call: Call) -> Any:
        if call.index >= self.num_calls:
            raise StopIteration
        dice = random.Random(f"{self.seed} {call.index}")
        # No two sizes in one feed: all rows of a column are alike. Chunks are of many rows instead.
        rows = dice.choice((1, 3, 40, 500, 2000, 6000))
        make = dice.choice((call.empty, np.empty))
        x = make((rows, 512), np.uint8)
        y = make((rows, 8), np.float32)
        filled(x, call.index), filled(y, call.index + 1)
        if dice.random() < 0.2:
            # An array that is kept for a while, and thrown away.
            self.kept = call.empty((rows, 512), np.uint8)
        if dice.random() < 0.2:
            self.kept = None
        return [x, y]


class GivesTwice:
    """Gives each array twice, or parts of it that overlap."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, call: Call) -> Any:
        if call.index >= 6:
            raise StopIteration
        x = filled(call.empty((2 * ROWS, 2**18), np.uint8), call.index)
        match self.how:
            case "the same":
                return [x[:ROWS], x[:ROWS]]
            case "overlap":
                return [x[1 : 1 + ROWS], x[:ROWS]]
            case "halves":
                return [x[ROWS:], x[:ROWS]]
        raise AssertionError(self.how)


class GivesAgain:
    """Keeps each of the three arrays that it has made, and gives each again and again."""

    def __init__(self) -> None:
        self.made: dict[int, np.ndarray] = {}

    def __call__(self, call: Call) -> Any:
        if call.index >= 12:
            raise StopIteration
        number = call.index % 3
        if number not in self.made:
            self.made[number] = filled(call.empty((ROWS, 2**18), np.uint8), number)
        return [self.made[number]]


def warned(call: Call) -> Any:
    """Give a large chunk, and write where a library in C writes its warnings."""
    chunk = Big(6)(call)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"from a library")
    return chunk


class Small:
    """Gives many small chunks."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def __call__(self, call: Call) -> Any:
        if call.index >= self.num_calls:
            raise StopIteration
        return [np.full((8, 1024), call.index % 251, np.uint8)]


class Big:
    """Gives large chunks, which can be passed on as they are."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def __call__(self, call: Call) -> Any:
        if call.index >= self.num_calls:
            raise StopIteration
        return [filled(call.empty((ROWS, 2**18), np.uint8), call.index)]


def take_memory() -> None:
    """Take more memory than there is."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    np.ones(2**31, np.uint8)


class Greedy:
    """Asks for more shared memory than there is."""

    def __call__(self, call: Call) -> Any:
        import resource

        if call.index == 2:
            resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
            return [call.empty((1, 2**31), np.uint8)]
        return [np.full((1, 2**20), call.index, np.uint8)]


def run_out_of_descriptors() -> None:
    """Open no more files from now on, but for those that there are."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def fork_and_die(folder: Path) -> None:
    """Fork a process that lives on, and end this one; once."""
    if any(folder.iterdir()):
        return
    pid = os.fork()
    if not pid:
        print("from nobody's child")
        signal.alarm(60)
        signal.pause()
    folder.joinpath(str(pid)).touch()
    die()
