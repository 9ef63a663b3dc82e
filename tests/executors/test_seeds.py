"""Functions that draw from generators of the whole process give the same in each run."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from feeder import Processes
from feeder.workers import sources
from feeds import Record, assert_same, drain, note, running
from project import TESTS
from remote import Drawing, DrawingSeek, draw_for, draw_half, drawing, drawn_sample

pytestmark = pytest.mark.process

SETTINGS: dict[str, Any] = {
    "input_blob_names": ["x"], "batch_size": 3, "epochs": 3, "num_worker_threads": 3,
}  # fmt: skip
FORMS = {"pure": lambda: drawing, "seek": DrawingSeek, "replay": Drawing}


def cut(fetch: Any, at: int, **settings: Any) -> tuple[list[Record], bytes]:
    """Return the first batches, and the position after them."""
    with running(fetch, **settings) as (_, feed):
        batches = list(islice(feed, at))
    return [note(batch) for batch in batches], batches[-1].cut.token()


@pytest.mark.parametrize("form", FORMS)
def test_runs_and_a_resumed_one_are_equal(form: str) -> None:
    make = FORMS[form]
    whole = drain(make(), executor=Processes(1), **SETTINGS)
    # Draws of all calls, workers and epochs differ.
    assert len({record[4] for record in whole}) == len(whole) > 9
    random.seed(3)
    np.random.seed(3)
    head, token = cut(make(), 4, executor=Processes(3), **SETTINGS)
    assert_same(head, whole[:4])
    rest = drain(make(), resume=token, executor=Processes(2), **SETTINGS)
    assert_same(rest, whole[4:])
    other = drain(make(), executor=Processes(2), seed=1, **SETTINGS)
    assert not {record[4] for record in whole} & {record[4] for record in other}


def test_the_trainer_s_own_generators_are_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    wanted = random.random(), np.random.random_sample()
    random.seed(1)
    np.random.seed(1)
    drain(drawing, executor=Processes(2), **SETTINGS)
    assert (random.random(), np.random.random_sample()) == wanted


def test_without_seeds_each_process_draws_its_own() -> None:
    executor = Processes(1, seed_globals=False)
    first, second = (drain(drawing, executor=executor, **SETTINGS) for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    ("order", "last_batch"), (({}, "keep"), ({"random_shuffle": True}, "carry"))
)
def test_draws_belong_to_the_record(order: dict[str, Any], last_batch: str) -> None:
    settings = {**SETTINGS, "input_blob_names": ["i", "x", "y"], "last_batch": last_batch}

    def source() -> Any:
        return sources.samples(drawn_sample, 23, **order)

    whole = drain(source(), executor=Processes(1), **settings)
    assert_same(drain(source(), executor=Processes(3), **settings), whole)
    _, token = cut(source(), 7, executor=Processes(2), **settings)
    assert_same(drain(source(), resume=token, executor=Processes(2), **settings), whole[7:])
    # Batches of another size have the same draws of each record.
    other = drain(source(), executor=Processes(2), **{**settings, "batch_size": 5})
    assert draws_of(other) == draws_of(whole)
    assert len(set(draws_of(whole))) == 3 * 23


def draws_of(stream: list[Record]) -> list[tuple[int, float, float]]:
    """Return what was drawn for each record of all epochs, sorted."""
    columns = [[np.frombuffer(data, dtype) for dtype, _, data in record[4]] for record in stream]
    return sorted(row for batch in columns for row in zip(*map(list, batch), strict=True))


def filtered(folder: Path) -> Any:
    return sources.arrays(np.arange(40)).filter(draw_half)


def filtered_twice(folder: Path) -> Any:
    return filtered(folder).filter(draw_half)


def lines(folder: Path) -> Any:
    (folder / "x.jsonl").write_text("1\n" * 23)
    return sources.jsonl(folder / "x.jsonl", decode=draw_for)


def members(folder: Path) -> Any:
    with tarfile.open(folder / "x.tar", "w") as tar:
        for i in range(23):
            tar.addfile(tarfile.TarInfo(f"{i}.bin"))
    return sources.webdataset(folder / "x.tar", decoders={"bin": draw_for})


def shards(folder: Path) -> Any:
    return sources.mds(TESTS / "oracles/mds", ["raw"], decoders={"raw": draw_for})


def pictures(folder: Path) -> Any:
    (folder / "class").mkdir(exist_ok=True)
    for i in range(23):
        PIL.Image.new("RGB", (2, 2)).save(folder / "class" / f"{i}.png")
    return sources.image_folder(folder, transform=draw_for)


@pytest.mark.parametrize("make", (filtered_twice, lines, members, shards, pictures))
def test_draws_of_every_function_of_a_record_belong_to_the_record(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    def rows(**settings: Any) -> list[Any]:
        names = {pictures: ["image", "label"], members: ["bin"], shards: ["raw"]}.get(make, ["x"])
        stream = drain(
            make(tmp_path), executor=Processes(2), input_blob_names=names, epochs=2, **settings
        )
        columns = [np.frombuffer(r[4][0][2], r[4][0][0]).reshape(r[4][0][1]) for r in stream]
        return sorted(np.concatenate(columns).tolist())

    whole = rows(batch_size=3)
    assert whole == rows(batch_size=5)
    assert len(whole) > 10


def test_two_filters_draw_from_different_generators(tmp_path: Path) -> None:
    once, twice = (
        sum(
            r[4][0][1][0]
            for r in drain(
                make(tmp_path), executor=Processes(1), input_blob_names=["x"], batch_size=8
            )
        )
        for make in (filtered, filtered_twice)
    )
    assert 0 < twice < once < 40
