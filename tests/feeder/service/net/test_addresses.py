"""Addresses: what is one, who may listen there, and that a live one cannot be stolen."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import feeder
from feeder.errors import ConfigError
from feeder.service.net.addresses import (
    MAX_PATH_BYTES,
    Address,
    check_binds,
    check_connects,
    check_private,
    default_address,
    parse,
    private_directory,
    private_file,
    private_path,
)
from feeder.service.net.claims import claim
from small import Pure, make

HOLDER = """
import sys
from feeder.service.net.addresses import parse
from feeder.service.net.claims import claim
with claim(parse(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://data0:5570", Address(scheme="tcp", host="data0", port=5570)),
        ("tcp://LOCALHOST:1", Address(scheme="tcp", host="localhost", port=1)),
        ("tcp://*:5570", Address(scheme="tcp", host="*", port=5570)),
        ("tcp://127.0.0.1:0", Address(scheme="tcp", host="127.0.0.1", port=0)),
        ("tcp://127.0.0.1:*", Address(scheme="tcp", host="127.0.0.1", port=0)),
        ("tcp://[::1]:5570", Address(scheme="tcp", host="::1", port=5570)),
        ("ipc:///run/feed.sock", Address(scheme="ipc", path="/run/feed.sock")),
    ],
)
def test_an_address_is_read(text: str, expected: Address) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("data0:5570", "expected 'tcp://HOST:PORT'"),
        ("inproc://feed", "expected 'tcp://HOST:PORT'"),
        ("tcp://data0", "no port"),
        ("tcp://data0:65536", "port is 65536"),
        ("tcp://data0:http", "port is 'http'"),
        ("tcp://::1:5570", "IPv6 in brackets"),
        ("tcp://[data0]:5570", "no IPv6 address"),
        ("tcp://a b:5570", "host is 'a b'"),
        ("ipc://", "absolute path"),
        ("ipc://@abstract", "absolute path"),
        ("ipc:///run/", "names no file"),
        ("ipc:///run/a\0b", "names no file"),
        ("ipc:///" + "x" * MAX_PATH_BYTES, "has 108 bytes"),
        ("ipc:///" + "é" * 54, "has 109 bytes"),
    ],
)
def test_what_is_no_address_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="is no address") as raised:
        parse(text)
    assert why in str(raised.value)


def test_a_plain_name_lies_in_the_private_directory(runtime: Path) -> None:
    assert parse("ipc://eval").path == f"{runtime}/feeder/eval.sock"
    assert parse("ipc://eval.sock") == parse("ipc://eval")
    assert default_address() == parse("ipc://default")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),
        ("localhost", True),
        ("*", False),
        ("0.0.0.0", False),
        ("[::]", False),
        ("localhost.example", False),
    ],
)
def test_loopback_is_told_from_what_others_reach(host: str, loopback: bool) -> None:
    address = parse(f"tcp://{host}:5570")
    assert address.is_loopback == loopback
    if loopback:
        check_binds([address], curve=False)
    else:
        with pytest.raises(ConfigError, match=r"feeder keygen.*127\.0\.0\.1.*--insecure"):
            check_binds([parse("ipc://default"), address], curve=False)
    check_binds([address], curve=True)
    check_binds([address], curve=False, insecure=True)


def test_binds_are_different_and_at_least_one() -> None:
    same = [parse("tcp://127.0.0.1:5570"), parse("ipc://a"), parse("tcp://127.0.0.1:5570")]
    with pytest.raises(ConfigError, match="given twice"):
        check_binds(same, curve=True)
    with pytest.raises(ConfigError, match="needs an address"):
        check_binds([], curve=True)
    check_binds([parse("tcp://127.0.0.1:0")] * 2, curve=False)


@pytest.mark.parametrize("text", ["tcp://*:5570", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://a:0"])
def test_a_consumer_cannot_connect_to_a_wildcard(text: str) -> None:
    with pytest.raises(ConfigError, match="one to listen at"):
        check_connects([parse(text)])


def test_a_consumer_needs_a_sound_private_directory(runtime: Path) -> None:
    check_connects([default_address()])
    (runtime / "feeder").mkdir()
    (runtime / "feeder").chmod(0o755)
    check_connects([parse("tcp://data0:5570"), parse(f"ipc://{runtime}/own.sock")])
    with pytest.raises(ConfigError, match="mode 0755"):
        check_connects([default_address()])
    with pytest.raises(ConfigError, match="expected one at least"):
        check_connects([])


def test_the_private_directory_is_made_for_this_user_alone(runtime: Path) -> None:
    assert private_directory() == private_directory() == runtime / "feeder"
    assert stat.S_IMODE((runtime / "feeder").stat().st_mode) == 0o700


@pytest.mark.parametrize("value", ["", "relative", None])
def test_without_a_runtime_directory_it_has_the_uid(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    if value is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert private_path() == Path(f"/tmp/feeder-{os.geteuid()}")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1700, 0o500])
def test_a_directory_of_another_mode_is_refused(runtime: Path, mode: int) -> None:
    private_directory().chmod(mode)
    with pytest.raises(ConfigError, match=f"{runtime}/feeder' has mode {mode:04o}, expected 0700"):
        private_directory()


def test_a_directory_in_a_volume_with_a_group_of_its_own_is_taken(runtime: Path) -> None:
    runtime.chmod(0o2777)
    assert stat.S_IMODE(private_directory().stat().st_mode) == 0o2700
    assert private_directory() == runtime / "feeder"


def test_a_directory_of_somebody_else_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_directory()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=f"{runtime}/feeder' belongs to uid .*, expected 12345"):
        private_directory()


def test_a_link_or_a_file_is_no_private_directory(runtime: Path) -> None:
    real = runtime / "real"
    real.mkdir(mode=0o700)
    (runtime / "feeder").symlink_to(real)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        private_directory()
    (runtime / "file").touch(0o700)
    with pytest.raises(ConfigError, match="is no directory"):
        check_private(runtime / "file")


def test_a_directory_that_cannot_be_made_is_told(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{runtime}/none")
    with pytest.raises(ConfigError, match="cannot be made"):
        claim(default_address())
    with pytest.raises(ConfigError, match="no directory of sockets"):
        private_directory(create=False)


def test_what_peers_are_told_of_lies_in_tmp_where_there_is_no_runtime_directory(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with sudo or cron; or where its path is too long for a socket."""
    assert private_file("x.arenas") == runtime / "feeder/x.arenas"
    long = runtime / ("l" * 90)
    long.mkdir()
    other = Path(f"/tmp/feeder-{os.geteuid()}/x.arenas")
    for value in (long, runtime / "none"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(value))
        assert private_file("x.arenas") == other
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(Path, "mkdir", lambda *args, **settings: None)
    with pytest.raises(ConfigError, match=r"/tmp/feeder-12345"):
        private_file("x.arenas")


@pytest.mark.served
def test_a_server_with_an_address_of_its_own_needs_no_runtime_directory(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{runtime}/none")
    with (
        feeder.serve(lambda: make(Pure()), f"ipc://{runtime}/own.sock") as server,
        feeder.connect(server.addresses[0]) as consumer,
    ):
        assert (next(consumer).step, consumer.plane) == (0, "shared")


@pytest.mark.process
def test_a_live_address_cannot_be_claimed_by_a_second_process() -> None:
    address = default_address()
    command = [sys.executable, "-c", HOLDER, str(address)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"held by process {holder.pid}"):
            claim(address)
        with claim(parse("ipc://other")):
            pass
        holder.kill()
        holder.wait(10)
    with claim(address), pytest.raises(ConfigError, match="held by this process"):
        claim(address)


def test_what_a_killed_server_left_is_put_away(runtime: Path) -> None:
    address = default_address()
    private_directory()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.path)
    assert os.path.lexists(address.path)
    with claim(address):
        assert not os.path.lexists(address.path)
        assert Path(f"{address.path}.lock").read_text() == f"{os.getpid()}\n"
        assert stat.S_IMODE(os.stat(f"{address.path}.lock").st_mode) == 0o600
    assert os.listdir(runtime / "feeder") == ["default.sock.lock"]
    assert Path(f"{address.path}.lock").read_bytes() == b""


def test_the_socket_is_for_this_user_and_goes_with_the_claim() -> None:
    address = default_address()
    with socket.socket(socket.AF_UNIX) as server, claim(address) as claimed:
        server.bind(address.path)
        os.chmod(address.path, 0o777)
        claimed.protect()
        assert stat.S_IMODE(os.stat(address.path).st_mode) == 0o600
    assert not os.path.lexists(address.path)
    claimed.close()


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    for _ in range(2):
        with pytest.raises(ConfigError, match="no socket"):
            claim(parse(f"ipc://{path}"))
    assert path.read_text() == "data"


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    (tmp_path / "a.sock.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="cannot be opened"):
        claim(parse(f"ipc://{tmp_path}/a.sock"))
    assert (tmp_path / "precious").read_text() == "data"


def test_a_lock_file_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.sock.lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="expected a file of uid 12345"):
        claim(parse(f"ipc://{tmp_path}/a.sock"))


def test_a_directory_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lock file .* cannot be opened \(No such file"):
        claim(parse(f"ipc://{tmp_path}/none/a.sock"))


def test_a_server_whose_lock_file_was_removed_keeps_its_address(tmp_path: Path) -> None:
    address = parse(f"ipc://{tmp_path}/a.sock")
    with socket.socket(socket.AF_UNIX) as server, claim(address):
        server.bind(address.path)
        server.listen()
        os.unlink(f"{address.path}.lock")
        for _ in range(2):
            with pytest.raises(ConfigError, match="held by a living server whose lock file"):
                claim(address)
        assert os.path.exists(address.path)
