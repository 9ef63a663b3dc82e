"""Actors change not one byte: not their number, nor the way of chunks, nor what was before."""

from __future__ import annotations

from itertools import cycle, islice, product
from typing import Any

import pytest

import parts
import remote
from executors.test_streams import LAST_BATCH
from feeder import RayActors
from feeder.executors.actors import DATA
from feeds import Record, assert_same, drain, expected
from fetches import FORMS, NEED_TWO_WORKERS, PATTERNS, make_fetch
from parts import few

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.process]

WAYS = ("mapped", "frames")
FORMS_AND_WAYS = list(product(FORMS, WAYS) if parts.is_full else zip(FORMS, cycle(WAYS)))
WAIT_S = 60.0
"""Actors that come on a busy machine take seconds."""


def on_actors(fetch: Any, *, num: Any = 2, **settings: Any) -> list[Record]:
    """The stream of a feed on actors."""
    return drain(fetch, executor=RayActors(num), timeout=WAIT_S, **settings)


@pytest.mark.parametrize(("form", "way"), FORMS_AND_WAYS)
def test_the_stream_is_the_naive_one(form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes show more of it (`executors.test_streams`): here chunks have other ways."""
    monkeypatch.setenv(DATA, way)
    axes = tuple(PATTERNS), LAST_BATCH, (2, 3, 5), (1, 2), (2, 3, 1)
    ways = islice(few((form, way), *axes), None if parts.is_full else 2)
    for pattern, last_batch, workers, devices, num in ways:
        if form != "pure" and pattern in NEED_TWO_WORKERS:
            workers = 4
        settings: dict[str, Any] = {"epochs": 3, "last_batch": last_batch}
        stream = expected(
            make_fetch(form, pattern), pure=form == "pure", num_workers=workers,
            num_devices=devices, **settings,
        )  # fmt: skip
        got = on_actors(
            make_fetch(form, pattern), num=num, num_worker_threads=workers, devices=devices,
            **settings,
        )  # fmt: skip
        assert_same(got, stream, pattern, last_batch, workers, devices, num)


@pytest.mark.parametrize("way", WAYS)
def test_large_chunks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA, way)
    settings: dict[str, Any] = {"input_blob_names": ["x", "y"], "batch_size": 900, "epochs": 1}
    stream = drain(remote.ManySizes(20, 1), **settings)
    assert_same(on_actors(remote.ManySizes(20, 1), **settings), stream)
    assert_same(on_actors(remote.ManySizes(20, 1), writable=True, **settings), stream)


def test_what_is_printed_and_logged_comes_here(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for way in WAYS:
        monkeypatch.setenv(DATA, way)
        with caplog.at_level("INFO"):
            on_actors(remote.At(3, remote.speak), epochs=1)
        said = capsys.readouterr()
        assert "printed" in said.out and "in bytes: ü" in said.out and "to stderr" in said.err
        assert "logged here" in caplog.text
        caplog.clear()
