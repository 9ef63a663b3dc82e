"""Settings that are wrong: a ConfigError that names the setting and its value; nothing is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
from small import Counted, Pure, make

ORIGINALS = [
    "input_blob_names", "fetch_fun", "batch_size", "num_worker_threads", "input_source_name",
    "max_buffered_batches", "init_fun", "external_loggers", "dont_rebatch", "batch_columns",
    "timeout",
]  # fmt: skip
"""The arguments of the original, in its order, without its net."""

COUNTS = ["batch_size", "num_worker_threads", "max_buffered_batches", "epochs"]
NO_COUNT = [0, -1, 2.0, "2", True, (5,), [5], np.array([3, 4]), np.array([3]), np.float64(2)]


def refuse(fetch: Callable[..., Any] | None = None, **settings: Any) -> str:
    """Return what the ConfigError says; see that it is a ValueError and that no feed was added."""
    coordinator = feeder.Coordinator()
    names = settings.pop("input_blob_names", ["id"])
    with pytest.raises(feeder.ConfigError) as caught:
        feeder.init_data_input_workers(
            names, fetch or Counted(), **{"batch_size": 4, "coordinator": coordinator, **settings}
        )
    assert isinstance(caught.value, ValueError)
    assert len(coordinator) == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("collate_fn", list, "feeder.sources.records(dataset, collate=...)"),
        ("num_workers", 4, "num_threads=n, or executor=feeder.Processes(n)"),
        ("shuffle", True, "sources have random_shuffle=True"),
    ],
)
def test_an_argument_of_dataloader_names_what_is_here_in_its_place(
    name: str, value: Any, instead: str
) -> None:
    said = refuse(**{name: value})
    assert said.startswith(f"{name} is {value!r}: init_data_input_workers has no {name}; ")
    assert instead in said


def test_any_other_argument_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_thread'"):
        feeder.init_data_input_workers(["id"], Counted(), 4, num_thread=2)


@pytest.mark.parametrize("value", NO_COUNT, ids=repr)
@pytest.mark.parametrize("name", [*COUNTS, "max_buffered_bytes"])
def test_a_count_is_a_whole_number_of_at_least_one(name: str, value: Any) -> None:
    assert refuse(**{name: value}) == f"{name} is {value!r}, expected a whole number >= 1"


@pytest.mark.parametrize("value", NO_COUNT[1:], ids=repr)
def test_there_may_be_no_thread(value: Any) -> None:
    said = refuse(num_threads=value)
    assert said == f"num_threads is {value!r}, expected a whole number >= 0"


@pytest.mark.parametrize("name", ["batch_size", "num_worker_threads", "max_buffered_batches"])
def test_a_count_that_must_be_there_may_not_be_none(name: str) -> None:
    assert refuse(**{name: None}) == f"{name} is None, expected a whole number >= 1"


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_may_be_a_numpy_integer(name: str) -> None:
    with make(Counted(), **{name: np.int32(2)}) as coordinator:
        assert sum(len(batch["id"]) for batch in coordinator["train"]) in (30, 60)


SECONDS = "expected a number of seconds"
MOST = "<= 1000000000"

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"seed": -1}, "seed is -1, expected a whole number >= 0"),
    ({"seed": 2**64}, f"seed is {2**64}, expected a whole number <= {2**64 - 1}"),
    ({"retries": -1}, "retries is -1, expected a whole number >= 0"),
    ({"timeout": 0}, f"timeout is 0, {SECONDS} > 0 and {MOST}"),
    ({"timeout": None}, f"timeout is None, {SECONDS} > 0 and {MOST}"),
    ({"timeout": float("nan")}, f"timeout is nan, {SECONDS} > 0 and {MOST}"),
    ({"retry_backoff_s": -0.5}, f"retry_backoff_s is -0.5, {SECONDS} >= 0 and {MOST}"),
    ({"last_batch": "rest"},
     "last_batch is 'rest', expected one of ('keep', 'drop', 'pad', 'carry')"),
    ({"rounds": "batch"}, "rounds is 'batch', expected one of ('stream', 'epoch')"),
    (
        {"rounds": "epoch", "last_batch": "carry"},
        "rounds is 'epoch': with last_batch='carry' rows flow from one epoch into the next, so "
        "that no round begins with an epoch; use another last_batch, or rounds='stream'",
    ),
    (
        {"global_batch_size": 8},
        "batch_size is 4 and global_batch_size is 8, expected one of the two: the first follows "
        "from the second",
    ),
    (
        {"batch_size": None, "global_batch_size": 8, "devices": 3},
        "global_batch_size is 8, expected a multiple of the 3 devices",
    ),
    (
        {"batch_size": None, "global_batch_size": 8, "dont_rebatch": True},
        "global_batch_size is 8: with dont_rebatch every chunk is a batch, of whatever size; give "
        "batch_size",
    ),
    ({"skip": -1}, "skip is -1, expected a whole number >= 0"),
    ({"last_round": None}, "last_round is None, expected one of ('uneven', 'drop', 'pad')"),
    ({"order": "random"}, "order is 'random', expected one of ('ticket', 'arrival')"),
    ({"dont_rebatch": 1}, "dont_rebatch is 1, expected True or False"),
    ({"repeatable": None}, "repeatable is None, expected True or False"),
    ({"writable": "yes"}, "writable is 'yes', expected True or False"),
    ({"version": 3}, "version is 3, expected a string"),
    ({"input_source_name": ""}, "input_source_name is '', expected a string"),
    ({"input_source_name": ["train"]}, "input_source_name is ['train'], expected a string"),
    ({"init_fun": 3}, "init_fun is 3, expected a function, or None"),
    ({"external_loggers": [3]}, "external_loggers is [3], expected objects with log(dict)"),
    ({"external_loggers": 3}, "external_loggers is 3, expected objects with log(dict)"),
    ({"input_blob_names": []}, "input_blob_names is [], expected at least one name, none twice"),
    ({"input_blob_names": ["a", "a"]},
     "input_blob_names is ['a', 'a'], expected at least one name, none twice"),
    ({"input_blob_names": "id"},
     "input_blob_names is 'id', expected a list of names in first place"),
    ({"input_blob_names": [1]},
     "input_blob_names is [1], expected a list of names in first place"),
    ({"batch_columns": [0, 1]}, "batch_columns has 2 axes, expected 1: one per input name"),
    ({"batch_columns": 1}, "batch_columns is 1, expected one axis per input name"),
    ({"batch_columns": [-1]}, "batch_columns is [-1], expected one axis per input name"),
    ({"devices": 0}, "devices is 0, expected names such as ('cpu',), or a number"),
    ({"devices": ()}, "devices is (), expected names such as ('cpu',), or a number"),
    ({"devices": ("gpu",)},
     "device is 'gpu', expected 'cpu', 'cpu:<number>', 'cuda:<number>' or 'torch:<number>'"),
    ({"devices": ("cpu:one",)},
     "device is 'cpu:one', expected 'cpu', 'cpu:<number>', 'cuda:<number>' or 'torch:<number>'"),
    ({"devices": ("cpu:1", "cpu:1")}, "devices is ('cpu:1', 'cpu:1'), expected none of them twice"),
    ({"resume": 5},
     "resume is int, expected a Snapshot, its bytes, a token, a state dict or a path"),
    ({"dont_rebatch": True, "last_batch": "pad"},
     "last_batch is 'pad': with dont_rebatch every chunk is a batch, so nothing is left at the end "
     "of an epoch; leave it at 'keep'"),
    ({"repeatable": False},
     "repeatable is False, and the fetch function can only be put back by calls that are made "
     "again, so its feed could never be resumed; give it cursor(worker_id) and seek(worker_id, "
     "cursor), use fetch(call), or leave repeatable at True"),
    ({"retries": 2},
     "retries is 2: a call can only be made again by a pure fetch(call), or where the fetch "
     "function has cursor(worker_id) and seek(worker_id, cursor)"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "told"), SETTINGS, ids=lambda value: str(value)[:40])
def test_a_wrong_setting_is_named_with_what_was_expected(
    settings: dict[str, Any], told: str
) -> None:
    assert refuse(**settings) == told


def test_a_coordinator_is_one_of_ours() -> None:
    with pytest.raises(feeder.ConfigError, match=r"^coordinator is 5, expected a Coordinator"):
        feeder.init_data_input_workers(["id"], Counted(), 4, coordinator=5)


WRONG_FORMS = "expected fetch(worker_id, batch_size) or fetch(call)"


class CursorAlone(Counted):
    def cursor(self, worker_id: int) -> int:
        return 0


class SeekAlone(Counted):
    def seek(self, worker_id: int, cursor: int) -> None:
        pass


@pytest.mark.parametrize(
    ("fetch", "told"),
    [
        ("fetch", "fetch_fun is 'fetch', expected a function fetch(worker_id, batch_size) or "
                  "fetch(call)"),
        (lambda: None, f"fetch_fun takes 0 arguments, {WRONG_FORMS}"),
        (lambda a, b, c: None, f"fetch_fun takes 3 arguments, {WRONG_FORMS}"),
        (CursorAlone(), "fetch_fun has cursor alone; to be resumed at a cursor it needs both "
                        "cursor(worker_id) and seek(worker_id, cursor)"),
        (SeekAlone(), "fetch_fun has seek alone; to be resumed at a cursor it needs both "
                      "cursor(worker_id) and seek(worker_id, cursor)"),
    ],
    ids=["no function", "no argument", "three arguments", "cursor alone", "seek alone"],
)  # fmt: skip
def test_a_fetch_function_of_no_form_is_refused(fetch: Any, told: str) -> None:
    assert refuse(fetch) == told


def with_an_option(worker_id: int, batch_size: int, flip: bool = False) -> Any:
    raise StopIteration


@pytest.mark.parametrize(
    ("fetch", "form"),
    [
        (Counted(), "replay"),
        (Pure(), "pure"),
        (with_an_option, "replay"),
        (lambda call, flip=False: None, "pure"),
        (lambda *args: None, "replay"),
    ],
    ids=["two", "one", "two and an option", "one and an option", "any number"],
)
def test_the_form_is_told_by_the_number_of_arguments(fetch: Any, form: str) -> None:
    (stream,) = make(fetch)["train"].streams
    assert stream.config.fingerprint()["form"] == form


def test_a_second_feed_on_the_same_device_is_refused() -> None:
    coordinator = make(Counted(), devices=("cpu:0",))
    with pytest.raises(feeder.ConfigError) as caught:
        make(Counted(), devices=("cpu:1", "cpu:0"), coordinator=coordinator)
    assert str(caught.value) == (
        "there is a feed 'train' already, which is not started: to replace it, as where a "
        "notebook's cell is run again, call coordinator.stop('train') before; else give the new "
        "one another input_source_name, or coordinator=feeder.Coordinator()"
    )
    assert coordinator["train"].devices == ("cpu:0",)
    make(Counted(), devices=("cpu:0",), input_source_name="val", coordinator=coordinator)
    assert coordinator["val"].devices == ("cpu:0",)
    coordinator.stop("train")
    make(Counted(), devices=("cpu:1", "cpu:0"), coordinator=coordinator)
    assert coordinator["train"].devices == ("cpu:1", "cpu:0")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_threads": 10**7}, {"num_worker_threads": 10**7}, {"num_worker_threads": 5000},
        {"devices": 10**7},
    ],
    ids=str,
)  # fmt: skip
def test_absurd_counts_are_refused_before_they_take_memory(settings: Any) -> None:
    with pytest.raises(feeder.ConfigError, match=r"expected (at most|a whole number <=) \d+"):
        make(Pure(), **settings)
    make(Pure(), num_worker_threads=5000, num_threads=8)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (list(range(1000)), "what has __len__ and __getitem__ is fed by feeder.sources.records"),
        (np.zeros(1000), "arrays are fed by feeder.sources.arrays"),
        ({"x": np.zeros(1000)}, "arrays are fed by feeder.sources.arrays"),
    ],
    ids=["a list", "an array", "a mapping"],
)
def test_of_data_in_place_of_a_fetch_function_the_source_is_named(data: Any, told: str) -> None:
    with pytest.raises(feeder.ConfigError) as caught:
        make(data)
    assert str(caught.value).endswith(f"fetch(worker_id, batch_size) or fetch(call); {told}(...)")
    assert len(str(caught.value)) < 250


def test_the_originals_come_first_in_their_order() -> None:
    parameters = inspect.signature(feeder.init_data_input_workers).parameters
    assert list(parameters)[: len(ORIGINALS)] == ORIGINALS
    kinds = [parameter.kind for parameter in parameters.values()]
    assert set(kinds[: len(ORIGINALS)]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(kinds[len(ORIGINALS) :]) == {inspect.Parameter.KEYWORD_ONLY}
