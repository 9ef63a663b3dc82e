"""`feeder edit --address`: a feed that is served goes on otherwise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder import cli, sources
from feeder.service.net.keys import make_keys
from feeder.service.protocol import coding
from feeder.service.protocol.messages import FROM_CONSUMER
from feeder.service.server import io_loop

pytestmark = pytest.mark.served


def feed(web: int, code: int, resume: Any = None, **settings: Any) -> feeder.Coordinator:
    parts = {
        "web": (sources.arrays(np.arange(60)).shuffle(), web),
        "code": (sources.arrays(np.arange(1000, 1060)).shuffle(), code),
    }
    return feeder.init_data_input_workers(
        ["x"], sources.mix(parts), resume=resume, coordinator=feeder.Coordinator(),
        **{"batch_size": 4, **settings},
    )  # fmt: skip


def factory() -> feeder.Coordinator:
    return feed(7, 3)


def rows_of(batches: Any) -> list[Any]:
    return [batch["x"].tolist() for batch in batches]


@pytest.fixture
def edit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(address: str, *words: str) -> Any:
        status = cli.main(["edit", "--address", address, "--why", "it", *words])
        return status, "".join(capsys.readouterr())

    return run


EQUAL = ("--weight", "web=0.5", "--weight", "code=1/2")


@pytest.mark.parametrize("plane", ["frames", "shared"])
def test_the_step_is_told_from_which_on_it_holds(edit: Any, plane: str) -> None:
    with serving(factory) as server, reading(server, plane=plane, credit=4) as consumer:
        came = rows_of(islice(consumer, 5))
        status, told = edit(server.addresses[0], *EQUAL, "--batch-size", "3", "--seed", "5")
        assert status == 0
        step = int(told.splitlines()[0].removeprefix("edited at step "))
        assert "positions before it do not have the edit: a run that goes on from one" in told
        came += rows_of(consumer)
        state = consumer.state_dict()
    with feed(7, 3) as coordinator:
        wanted = rows_of(islice(coordinator["train"], step))
        then = coordinator.state_dict()
    with feed(1, 1, then, edit="it", batch_size=3, seed=5) as coordinator:
        wanted += rows_of(coordinator["train"])
        assert coordinator.state_dict() == state
    assert came == wanted


def test_a_server_with_keys_wants_them(edit: Any, tmp_path: Path) -> None:
    make_keys(tmp_path)
    with serving(factory, "tcp", keys=tmp_path) as server:
        address = server.addresses[0]
        with reading(server, keys=tmp_path, credit=4) as consumer:
            next(consumer)
            assert edit(address, "--keys", str(tmp_path))[0] == 0
            assert edit(address)[0] == 1


BAD: list[tuple[list[str], str]] = [
    (
        ["--weight", "web=1"],
        "weights are of ['web'], and the sources are ['web', 'code']: give one",
    ),
    (["--weight", "web=0", "--weight", "code=0"], "every weight is 0"),
    (["--weight", "web=1", "--weight", "web=2"], "--weight names a source twice"),
    (["--weight", "web=1e99", "--weight", "code=1"], "no server can take this edit"),
    (["--batch-size", "9" * 20], "no server can take this edit"),
    (["--global-batch-size", "8"], "has no global_batch_size, but batch_size 4: edit that"),
    (["--feed", "other"], "feed is 'other', expected one of ['train']"),
    (["--output", "there"], "--address is of a server, and FILE and --output are of a position"),
]


@pytest.mark.parametrize(("words", "told"), BAD)
def test_bad_input_is_told_in_a_line(edit: Any, words: list[str], told: str) -> None:
    with serving(factory) as server, reading(server, credit=4) as consumer:
        first = rows_of(islice(consumer, 1))
        status, text = edit(server.addresses[0], *words)
        assert (status, text.count("\n")) == (2, 1)
        assert told in text
        assert len(first + rows_of(consumer)) == 30
        assert consumer.stats()["reconnects"] == 0


def test_an_edit_without_all_consumers_is_refused(edit: Any) -> None:
    with serving(factory, queues=2) as server, reading(server, queue=0):
        status, told = edit(server.addresses[0], *EQUAL)
        assert status == 1
        assert "waits for queue 0, 1: it can be edited while all its consumers are there" in told


def test_a_server_that_knows_no_edits_refuses_by_name(
    edit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(data: Any, *, from_consumer: bool) -> Any:
        known = {name: kind for name, kind in FROM_CONSUMER.items() if name != "Edit"}
        coding._kind_of(msgpack.unpackb(data), "consumer", known)
        return coding.decode(data, from_consumer=from_consumer)

    monkeypatch.setattr(io_loop, "decode", decode)
    with serving(factory) as server, reading(server, credit=4) as consumer:
        next(consumer)
        status, told = edit(server.addresses[0])
        assert status == 1
        assert "a message of type 'Edit', expected one of Open, Attached" in told
        assert len(list(consumer)) == 29


def test_neither_file_nor_address_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["edit", "--why", "it"]) == 2
    assert "give FILE and --output for a position, or --address for a server" in (
        capsys.readouterr().err
    )
