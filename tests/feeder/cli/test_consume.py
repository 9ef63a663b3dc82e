"""`feeder consume`, and `feeder doctor ADDR`: here, but for signals and outputs that are closed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import feeder
import served_feeds
from commands import END_S, command, end, folder, serving, started, status, told
from feeder.cli import NO_THREAD, doctor, meter
from feeder.service.net.keys import make_keys
from feeder.state.snapshot import Snapshot

__all__ = ["folder"]
pytestmark = [pytest.mark.served, pytest.mark.usefixtures("folder")]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def expected() -> list[feeder.Batch]:
    """The batches of the feed that is served, without a server."""
    with served_feeds.make() as coordinator:
        return list(coordinator["train"])


@pytest.fixture
def addresses(folder: Path) -> Iterator[tuple[str, ...]]:
    """Those of a server that is here. The server itself would be held until it is too late."""
    with feeder.serve(served_feeds.make, ["ipc://a", "tcp://127.0.0.1:0"]) as server:
        yield server.addresses


def digest(batches: list[feeder.Batch]) -> str:
    whole = xxhash.xxh3_128()
    for batch in batches:
        for array in batch.values():
            whole.update(array.tobytes())
    return f"xxh3 {whole.hexdigest()}"


def consumed(capsys: Capture, *words: str, ends: int = 0) -> tuple[list[str], str]:
    """Run `feeder consume` to its end; its lines, the digest last, and what it said of errors."""
    assert status("consume", *words) == ends
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_consume_has_the_digest_of_the_feed_in_process(
    addresses: tuple[str, ...], expected: list[feeder.Batch], capsys: Capture
) -> None:
    rows = sum(batch.rows for batch in expected)
    size = sum(array.nbytes for batch in expected for array in batch.values())
    for words in (
        ["ipc://a"],
        ["ipc://a", "--plane=frames", "--credit=2"],
        [addresses[1], "--plane=frames", "--checksum=full"],
        ["ipc://nobody", "ipc://a", "--queue=0", "--feed=train"],
    ):
        (summary, last), err = consumed(capsys, *words)
        assert (last, err) == (digest(expected), ""), words
        plane = "frames" if "--plane=frames" in words else "shared"
        assert summary.startswith(f"{len(expected)} batches, {rows} rows, {meter.size(size)} in ")
        assert f" over {plane}: " in summary


def test_consume_every_prints_the_running_digest(
    addresses: tuple[str, ...], expected: list[feeder.Batch], capsys: Capture
) -> None:
    lines, _ = consumed(capsys, "ipc://a", "--every=5", "--limit=12")
    assert lines[:2] == [f"step {i}  {digest(expected[: i + 1])}" for i in (4, 9)]
    assert lines[-1] == digest(expected[:12])


def test_consume_goes_on_from_what_it_saved(
    addresses: tuple[str, ...], expected: list[feeder.Batch], capsys: Capture
) -> None:
    saved = "position saved: position\n"
    lines, err = consumed(capsys, "ipc://a", "--limit=7", "--save=position")
    assert (lines[-1], err) == (digest(expected[:7]), saved)
    lines, err = consumed(capsys, "ipc://a", "--resume=position", "--save=position")
    assert (lines[-1], err) == (digest(expected[7:]), saved)
    assert consumed(capsys, "ipc://a", "--resume=position")[0][0].startswith("0 batches")
    assert Snapshot.read("position").describe().startswith("train[0]: ")


def test_consume_tells_an_error_of_the_feed_and_saves(folder: Path, capsys: Capture) -> None:
    with feeder.serve(served_feeds.make_bad):
        lines, err = consumed(capsys, "--save=position", ends=1)
    last = err.splitlines()[-1]
    assert last.startswith("feeder: ") and "no more disk" in last
    assert lines[-1].startswith("xxh3 ")
    assert os.path.exists("position")


@pytest.mark.parametrize(
    ("word", "ends", "says"),
    [
        ("--feed=other", 2, "other"),
        ("--queue=5", 2, "queue is 5"),
        ("--resume=missing", 2, "--resume is 'missing', which is not there"),
        ("--save=no/such/folder", 2, "whose folder is missing"),
        ("--save=runtime", 2, "is there and no file"),
        ("--resume=/dev/zero", 1, "are no snapshot"),
        ("--keys=nowhere", 2, "nowhere"),
    ],
)
def test_consume_tells_what_it_cannot_have(
    word: str, ends: int, says: str, addresses: tuple[str, ...], capsys: Capture
) -> None:
    assert status("consume", "ipc://a", word) == ends
    assert says in told(capsys)


def test_consume_without_room_for_a_thread_says_so_in_a_line(
    addresses: tuple[str, ...], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    _, err = consumed(capsys, addresses[0], ends=1)
    assert err == f"feeder: {NO_THREAD}\n"
    with pytest.raises(RuntimeError, match="new thread"):
        status("consume", addresses[0], "--debug")


def test_every_user_of_this_host_may_come_to_a_port_without_keys(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(folder / "keys")
    for address, settings, warns in (
        ("tcp://127.0.0.1:0", {}, True),
        ("tcp://127.0.0.1:0", {"insecure": True}, False),
        ("tcp://127.0.0.1:0", {"keys": folder / "keys"}, False),
        ("ipc://a", {}, False),
    ):
        caplog.clear()
        feeder.serve(served_feeds.make, address, **settings).close()
        told = [one.getMessage() for one in caplog.records]
        open_to_all = f"every user of this host may connect at {address}, read the batches"
        assert [one.startswith(open_to_all) for one in told].count(True) == warns


def test_clients_with_keys_alone_are_let_in(
    expected: list[feeder.Batch], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 10.0)
    assert status("keygen", "keys") == 0
    capsys.readouterr()
    with feeder.serve(served_feeds.make, "tcp://127.0.0.1:0", keys="keys") as server:
        address = server.addresses[0]
        assert consumed(capsys, address, "--keys=keys")[0][-1] == digest(expected)
        assert f"the server at '{address}' refuses: " in consumed(capsys, address, ends=1)[1]
        assert status("doctor", address, "--keys=keys") == 0
        assert f"a server answers at '{address}'" in capsys.readouterr().out
        assert status("doctor", address) == 1
        assert "give keys to both or to neither" in capsys.readouterr().out


@pytest.mark.parametrize("line", [meter.rich_line, meter.plain_line])
def test_consume_shows_rates_on_a_terminal(
    line: Any, addresses: tuple[str, ...], expected: list[feeder.Batch], capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On a pseudo-terminal: a line of rates, and the digest nevertheless."""
    monkeypatch.setattr(meter, "progress_line", line)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with open(slave, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        lines, _ = consumed(capsys, "ipc://a")
        terminal.flush()
        shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert lines[-1] == digest(expected)
    assert "batches/s" in shown and "waited" in shown


# ---- in a process


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_consume_saves_its_position_however_it_is_told_to_end(
    number: signal.Signals, folder: Path
) -> None:
    """While it waits for a batch that does not come."""
    with serving("make_slow"), started("consume", "--every=1", "--save=position") as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[1] for _ in range(3)] == ["0", "1", "2"]
        assert end(process, number) == "position saved: position\n"
        summary, last = process.stdout.read().splitlines()
    assert summary.startswith("3 batches, 24 rows, ")
    assert last.startswith("xxh3 ")
    assert Snapshot.read(folder / "position").states[0].summary[2] == 3


@pytest.mark.process
@pytest.mark.parametrize(
    "words", [["consume"], ["consume", "--feed=more", "--every=1"], ["checkpoint", "list", "."]],
    ids=" ".join,
)  # fmt: skip
def test_a_command_whose_output_nobody_reads_ends_without_a_word(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that writes into a buffer, and is at its end by then."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reading, writing = os.pipe()
    os.close(reading)
    with feeder.serve(served_feeds.make_two if "--feed=more" in words else served_feeds.make):
        done = subprocess.run(
            command(*words), stdout=writing, stderr=subprocess.PIPE, timeout=END_S, check=False
        )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.process
def test_a_command_without_an_output_ends_as_it_would_with_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys; os.close(1); os.execv(sys.executable, "
         "[sys.executable, '-m', 'feeder', 'checkpoint', 'list', '.'])"],
        stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


# ---- the meter


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (19_800_000, "19.8 MB"), (999_999_999, "1 GB"),
     (1.5e9, "1.5 GB"), (5e12, "5000 GB")],
)  # fmt: skip
def test_sizes_have_the_unit_that_fits(num_bytes: float, text: str) -> None:
    assert meter.size(num_bytes) == text


def test_rates_are_of_the_time_between_two_samples() -> None:
    before, after = meter.Sample(1.0, 10, 1000, 0.5), meter.Sample(3.0, 30, 5000, 1.0)
    assert before.rates(after) == "10 batches/s, 2 kB/s, waited 25%"


def test_meter_digests_arrays_of_every_layout() -> None:
    class Fake:
        columns = (
            np.arange(12).reshape(3, 4).T,
            np.array(["2020-01-01", "2021-01-01"], "datetime64[D]"),
            np.zeros((0, 3), np.float32),
        )
        rows = 4

    seen = meter.Meter()
    seen.add(Fake())  # type: ignore[arg-type]
    whole = b"".join(array.tobytes() for array in Fake.columns)
    assert seen.hexdigest() == xxhash.xxh3_128_hexdigest(whole)
    assert (seen.bytes, seen.rows, seen.batches) == (len(whole), 4, 1)


# ---- doctor ADDR


def test_doctor_tells_silence_and_strangers(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        assert status("doctor", "ipc://nobody", f"tcp://127.0.0.1:{port}", "tcp://*:5") == 1
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert all(line.startswith("problem ") for line in lines)
    assert "nobody listens there (0.3 s waited)" in lines[0]
    assert "somebody listens there, but does not answer" in lines[1]
    assert "one to listen at" in lines[2]
