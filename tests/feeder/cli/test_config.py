"""`feeder config` and `feeder serve --config`: what is served, shown, advised, and refused."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import feeder
from commands import end, read_line, started, told
from feeder import cli
from feedfiles import FEED, folder
from project import ROOT

__all__ = ["folder"]

SERVED = FEED + 'fetch = "filed_feeds:fetch"\nmax_buffered_bytes = 1000000\n'


@pytest.fixture(autouse=True)
def config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration, and a private directory of sockets."""
    (folder / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = folder / "feed.toml"
    path.write_text("[server]\nqueues = 1\n" + SERVED)
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that is told where a command is refused."""
    assert cli.main(words) == 2
    return told(capsys)


@contextmanager
def served(*words: str) -> Iterator[str]:
    """A server in a process of its own, its line; it ends well."""
    with started("serve", *words) as process:
        yield read_line(process)
        assert end(process, signal.SIGTERM) == ""


# ---- serving


@pytest.mark.process
@pytest.mark.parametrize("by", ["flag", "variable"])
def test_what_a_configuration_says_is_served(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config", "feed.toml"]
    if by == "variable":
        monkeypatch.setenv("FEEDER_CONFIG", "feed.toml")
        words = []
    with served(*words, "--queues=2") as line:
        assert line.startswith("serving feed 'train', 2 queues, at ")
        with feeder.connect(queue=0) as left, feeder.connect(queue=1) as right:
            rows = [next(left)["x"][:, 0].tolist(), next(right)["x"][:, 0].tolist()]
    assert rows == [[0] * 4 + [1] * 4, [2] * 4]


@pytest.mark.process
def test_what_was_used_is_stored_and_gone_on_from(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(SERVED + "epochs = 2\n[checkpoint]\nurl = 'kept'\nresume = 'latest'\n")
    seen = []
    for limit in ("2", "9"):
        with served("--config", "feed.toml"):
            assert cli.main(["consume", f"--limit={limit}", "--every=1"]) == 0
            seen.append(re.findall(r"^step (\d+)", capsys.readouterr().out, re.MULTILINE))
    # Each epoch has 12 rows, in batches of 8.
    assert seen == [["0", "1"], ["2", "3"]]


@pytest.mark.served
def test_a_port_in_use_is_told_with_its_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f"[server]\nlease = 3\naddresses = {address!r}\n{SERVED}")
        line = refused(capsys, "serve", "--config", "feed.toml")
        why = f"cannot listen at {address!r} (address already in use): give a free port"
        assert line.startswith(f"feed.toml:3: {why}")
        line = refused(capsys, "serve", "--config", "feed.toml", "--bind", address)
        assert line.startswith(f"--bind: {why}")


# ---- config


def test_check_says_what_is_fed_and_advises(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "check", "feed.toml"]) == 0
    feed, call = capsys.readouterr().out.splitlines()
    assert feed == "feed 'train': x in batches of 8 rows"
    assert re.fullmatch(
        r"  its first call took [\d.]+ .?s and gave 4 rows of x int64 \(2,\), 64 B", call
    )
    config.write_text(config.read_text().replace("1000000", "10_000_000_000_000"))
    assert cli.main(["config", "check", "feed.toml"]) == 0
    assert "advice: max_buffered_bytes comes to 10000 GB, and there are " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("lease = 0", "feed.toml:2: lease is 0.0 s, expected more than 0"),
        ("queues = 5000", "feed.toml:2: queues is 5000, expected a whole number from 1 to 4096"),
        ("exit_when = 'later'", "feed.toml:2: exit_when is 'later', expected 'never' or"),
        ("addresses = 'udp://x'", "feed.toml:2: 'udp://x' is no address: expected 'tcp://"),
        ("addresses = ['ipc://a', 'ipc://a']", "feed.toml:2: address 'ipc://"),
        ("addresses = ['tcp://0.0.0.0:0']", "feed.toml:2: address 'tcp://0.0.0.0:0' can be reach"),
        ("keys = 'nowhere'", "feed.toml:2: "),
    ],
)
def test_check_refuses_what_serve_would(
    server: str, says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"[server]\n{server}\n{SERVED}")
    checked = refused(capsys, "config", "check", "feed.toml")
    assert checked.startswith(says)
    assert refused(capsys, "serve", "--config", "feed.toml") == checked


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        (
            "serve filed_feeds:make --config feed.toml",
            SERVED,
            "'filed_feeds:make' is given, and the config",
        ),
        (
            "serve --config feed.toml",
            "",
            "there is nothing to serve: give MODULE:ATTR, or --config FILE wi",
        ),
        ("config check feed.toml", "", "feed.toml: there is no feed: give it a table [feeds.NAME]"),
        (
            "config check feed.toml",
            SERVED + "order = 'arrival'\n",
            "feed.toml:2: feed 'train' has order='ar",
        ),
    ],
)
def test_a_configuration_that_cannot_be_served_is_told(
    words: str, text: str, says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"[server]\nqueues = 2\n{text}")
    assert refused(capsys, *words.split()).startswith(says)


def test_show_tells_who_gave_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEEDER_FEEDS_TRAIN_SEED", "3")
    assert cli.main(["config", "show", "feed.toml", "--lease=9", "--insecure"]) == 0
    lines = {line.partition(" = ")[0]: line for line in capsys.readouterr().out.splitlines()}
    told = {
        "insecure": "--insecure",
        "lease": "--lease",
        "queues": "feed.toml:2",
        "seed": "FEEDER_FEEDS_TRAIN_SEED",
        "batch_size": "feed.toml:6",
        "timeout": "default",
    }
    assert {key: lines[key].rpartition("# ")[2] for key in told} == told
