"""What comes back from a process as plain values: exceptions and log records."""

from __future__ import annotations

import logging
import pickle  # noqa: TID251  # what is refused
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import feeder
import remote
from feeder import Processes
from feeder.executors import plain
from feeder.executors.lines import Line, unpacked
from feeder.executors.processes import ProcessExecution
from feeder.executors.wire import FULL, Made
from feeder.state import codec
from feeder.workers.errors import MOST_TEXT, in_words
from feeds import assert_same, drain


class Told(ValueError):
    """An exception with an attribute of its own."""

    def __init__(self, text: str, place: tuple[int, str]) -> None:
        super().__init__(text, place)
        self.place = place


def with_notes() -> BaseException:
    error = KeyError(("a", 1), 2.5)
    error.add_note("noted there")
    return error


@pytest.mark.parametrize(
    "error",
    (
        ValueError("text"), Told("there", (3, "row")), OSError(2, "No such file", "/a/b"),
        StopIteration(7), SystemExit(3), with_notes(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        feeder.FetchError("worker 0, call 1: it failed", worker_id=0, call=1),
    ),
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("imports", (False, True))
def test_an_exception_is_made_again(error: BaseException, imports: bool) -> None:
    again = plain.read_error(plain.write_error(error), imports=imports)
    assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
    *before, noted = again.__notes__
    assert before == getattr(error, "__notes__", []) and noted.startswith("in process ")
    of_both = [
        {name: value for name, value in vars(one).items() if name != "__notes__"}
        for one in (again, error)
    ]
    assert of_both[0] == of_both[1]


class Holds(Exception):
    """An exception that holds what is no plain value."""


def of_a_function() -> type[Exception]:
    class Local(Exception):
        """Nobody else can find it."""

    return Local


@pytest.mark.parametrize(
    ("error", "told"),
    ((Holds(object), "Holds: <class 'object'>"), (of_a_function()("gone"), "Local: gone")),
)
def test_in_place_of_one_that_cannot_be_made_its_words_are_told(error: Any, told: str) -> None:
    again = plain.read_error(plain.write_error(error), imports=True)
    assert (type(again), str(again)) == (plain.CallError, told)


def test_an_actors_word_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far_away.py").write_text("class Far(Exception):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import far_away  # type: ignore[import-not-found]

    written = plain.write_error(far_away.Far("there"))
    del sys.modules["far_away"]
    assert type(plain.read_error(written, imports=False)) is plain.CallError
    assert "far_away" not in sys.modules
    assert type(plain.read_error(written, imports=True)).__name__ == "Far"
    del sys.modules["far_away"]


def test_neither_does_a_module_that_loads_others_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ModuleType("late")
    late.__getattr__ = lambda name: pytest.fail(f"{name} was loaded")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "late", late)
    written = codec.pack(("late", "Error", ("there",), [], "words", "a note"))
    assert type(plain.read_error(written, imports=False)) is plain.CallError


@pytest.mark.parametrize("name", ("eval", "len", "object", "no_such_name"))
def test_what_is_no_exception_is_not_called(name: str) -> None:
    written = codec.pack(("builtins", name, ("1/0",), [], "words", "a note"))
    assert type(plain.read_error(written, imports=True)) is plain.CallError


def test_no_pickle_is_taken_from_another_host() -> None:
    made = Made([pickle.dumps([1, 2])], [], FULL, b"", [], [], [], [])
    with pytest.raises(ValueError, match="a pickle came from another host"):
        unpacked(Line(), made, [])


def test_a_log_record_keeps_its_fields_and_what_is_no_plain_value_as_text() -> None:
    record = logging.LogRecord("remote", logging.WARNING, "a.py", 3, "said", None, None)
    record.who, record.where = ("a", 1), Path("b")
    again = plain.read_record(plain.write_record(record))
    # Whoever has set a factory of records, as Ray does, adds attributes of its own.
    assert {name: vars(again)[name] for name in vars(record)} == {**vars(record), "where": "b"}


@pytest.mark.usefixtures("in_threads")
@pytest.mark.served
@pytest.mark.parametrize("is_far", (False, True))
@pytest.mark.parametrize("fetch", (remote.tensors, remote.labelled))
def test_tensors_and_arrays_of_a_subclass_come_as_arrays(
    fetch: Any, is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessExecution, "is_far", is_far)
    assert_same(drain(fetch, executor=Processes(2)), drain(remote.plain))


@pytest.mark.usefixtures("in_threads")
@pytest.mark.served
@pytest.mark.parametrize(
    ("give", "told"),
    (
        (remote.masked, "a tuple of int64, float32, MaskedArray;"),
        (remote.objects, "a tuple of .*object"),
        (remote.no_array, "a tuple of int64, float32, list;"),
        (remote.no_tuple, "an int;"),
        (remote.generator, "a generator;"),
    ),
)
def test_what_is_no_tuple_of_arrays_is_refused_by_an_actor_alone(
    give: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = remote.Gives(give, 5)
    # On this host it is sent, and the merge says what is wrong with it.
    with pytest.raises(feeder.FetchError, match=r"call 5: (?!.*cannot be sent: it is)"):
        drain(fetch, executor=Processes(1))
    monkeypatch.setattr(ProcessExecution, "is_far", True)
    with pytest.raises(feeder.FetchError, match=f"call 5: .*cannot be sent: it is {told}"):
        drain(fetch, executor=Processes(1))


@pytest.mark.parametrize("size", [10_000, 5_000_000])
def test_a_long_text_is_told_by_its_ends(size: int) -> None:
    text = "begins" + "x" * size + "ends"
    for error in (ValueError(text), Told(text, (1, "a")), KeyError(text.encode())):
        written = plain.write_error(error)
        assert len(written) < 1_200_000
        said = repr(plain.read_error(written, imports=False))
        assert "begins" in said
        assert "ends" in said
        words = in_words(error)
        assert ("characters left out" in words) is (size > MOST_TEXT)
        assert len(words) < MOST_TEXT + 100
