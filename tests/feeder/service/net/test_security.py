"""Keys, sockets' limits, and who comes in: over real sockets on loopback."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

from feeder.errors import AuthError, ConfigError
from feeder.service.net import security as security_module
from feeder.service.net.addresses import Address, default_address, parse
from feeder.service.net.keys import (
    AllowedClients,
    ClientKeys,
    ServerKeys,
    make_keys,
    read_allowed,
    read_public,
    read_secret,
)
from feeder.service.net.security import (
    Event,
    Security,
    Socket,
    bind,
    check_zmq,
    connect,
    read_event,
    refusal_of,
    unwatch,
    watch,
)

pytestmark = pytest.mark.served

LOOPBACK = parse("tcp://127.0.0.1:0")
TOLD_MS = 6000
"""How soon a refusal must be told."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a server and of two clients, the second of whom is not on the list."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    make_keys(folder, "stranger")
    (folder / "clients" / "stranger.key").unlink()
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Security]:
    with Security(ServerKeys.from_directory(folder)) as security:
        yield security


def events_of(monitor: Socket, timeout_ms: int = TOLD_MS) -> Iterator[Event]:
    """Yield a socket's events as they come, for so long at most."""
    end = time.monotonic() + timeout_ms / 1000
    while monitor.poll(max(0, end - time.monotonic()) * 1000):
        if (event := read_event(monitor)) is not None:
            yield event


def refusal(keys: ClientKeys | None, address: Address) -> str | None:
    """Connect with these keys; return what the refusal says, None where the client comes in."""
    with Security(keys) as client:
        dealer = client.make_dealer(4, max_message_bytes=1 << 20, curve=keys is not None)
        monitor = watch(dealer)
        try:
            connect(dealer, address)
            for event in events_of(monitor):
                if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return None
                if (error := refusal_of(event)) is not None:
                    return str(error)
        finally:
            unwatch(dealer, monitor)
    pytest.fail(f"nothing was told within {TOLD_MS} ms")


def test_a_client_off_the_list_is_told(server: Security, folder: Path) -> None:
    """As is one that expects another server, and one without keys."""
    address = bind(server.make_router(4, curve=True), LOOPBACK)
    own, stranger = (ClientKeys.from_directory(folder, name) for name in ("client", "stranger"))
    text = refusal(stranger, address)
    assert text is not None and "does not know this client's key" in text
    assert str(address) in text
    other = ClientKeys(public=own.public, secret=own.secret, server=zmq.curve_keypair()[0])
    text = refusal(other, address)
    assert text is not None and "server.key" in text
    assert refusal(None, address) is not None
    assert refusal(own, address) is None
    with Security(is_server=True) as plain:
        address = bind(plain.make_router(4), LOOPBACK)
        assert refusal(own, address) is not None, "that server has no keys"
        assert refusal(None, address) is None


def test_keys_guard_tcp_and_the_kernel_guards_unix_sockets(server: Security) -> None:
    assert server.encrypts(LOOPBACK)
    assert not server.encrypts(default_address())
    with Security(is_server=True) as plain:
        assert not plain.encrypts(LOOPBACK)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (zmq.Event.HANDSHAKE_FAILED_AUTH, 400, "does not know this client's key"),
        (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, 0x11000002, "one side has keys"),
        (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, 0x11000001, "does not match"),
        (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, 0x10000001, "does not speak as"),
        (zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, 32, "ended the handshake"),
        (zmq.Event.HANDSHAKE_SUCCEEDED, 0, None),
        (zmq.Event.CONNECTED, 7, None),
        (zmq.Event.DISCONNECTED, 7, None),
        (zmq.Event.CONNECT_RETRIED, 10, None),
    ],
)
def test_what_an_event_means(kind: zmq.Event, value: int, says: str | None) -> None:
    error = refusal_of(Event(kind=kind, value=value, endpoint="tcp://data0:5570"))
    if says is None:
        assert error is None
    else:
        assert isinstance(error, AuthError)
        assert says in str(error) and "'tcp://data0:5570'" in str(error)


def test_events_nobody_reads_do_not_stop_the_server() -> None:
    """ZeroMQ's I/O thread stands still where a monitor is full, by default after 2,000 events."""
    with Security(is_server=True) as security:
        router = security.make_router(4)
        monitor = watch(router)
        assert monitor.rcvhwm == 0, "a bound after which it stands still"
        address = bind(router, LOOPBACK)
        for _ in range(100):
            socket.create_connection((address.host, address.port), 10).close()
        assert refusal(None, address) is None
        assert sum(1 for _ in events_of(monitor, 0)) > 100
        unwatch(router, monitor)


def test_a_port_that_is_taken_is_told() -> None:
    with Security() as security:
        router = security.make_router(4)
        address = bind(router, LOOPBACK)
        assert address.port > 0
        other = security.make_router(4)
        with pytest.raises(ConfigError, match=rf"{address.port}' \(address already in use\)"):
            bind(other, address)
        with pytest.raises(ConfigError, match=r"cannot listen at 'tcp://nowhere\.invalid:0'"):
            bind(other, parse("tcp://nowhere.invalid:0"))


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on loopback")
def test_an_ipv6_address_can_be_bound_and_reached() -> None:
    with Security(is_server=True) as security:
        router = security.make_router(4)
        address = bind(router, parse("tcp://[::1]:0"))
        assert address.port > 0
        assert refusal(None, address) is None


def test_an_old_libzmq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_zmq(curve=True)
    monkeypatch.setattr(security_module.zmq, "zmq_version_info", lambda: (4, 3, 4))
    with pytest.raises(ConfigError, match=r"libzmq is 4\.3\.4, expected 4\.3\.5"):
        check_zmq()


def test_keys_without_curve_are_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(security_module.zmq, "has", lambda name: name != "curve")
    check_zmq()
    with pytest.raises(ConfigError, match="built without CURVE"):
        Security(ServerKeys.from_directory(folder))


def test_keys_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = make_keys(tmp_path / "keys", "trainer")
    server, client = (
        ServerKeys.from_directory(tmp_path / "keys"),
        ClientKeys.from_directory(tmp_path / "keys"),
    )
    assert server.allowed == {client.public}
    assert client.server == server.public
    assert zmq.curve_public(server.secret) == server.public
    assert server.secret.decode() not in repr(server)
    assert client.secret.decode() not in repr(client)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in written}
    assert modes["server.key_secret"] == modes["trainer.key_secret"] == 0o600
    assert zmq.auth.load_certificate(written[0]) == (server.public, server.secret)


def test_the_allow_list_takes_files_and_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_keys(tmp_path, name)
    one = read_allowed(tmp_path / "clients" / "a.key")
    assert len(one) == 1
    assert read_allowed(tmp_path / "clients") > one
    assert ServerKeys.from_directory(tmp_path).allowed == read_allowed(tmp_path / "clients")
    (tmp_path / "server.key").unlink()
    with pytest.raises(ConfigError, match="nobody could connect"):
        read_allowed(tmp_path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path)
    (tmp_path / "server.key_secret").chmod(mode)
    with pytest.raises(ConfigError, match=f"server.key_secret' has mode {mode:04o}"):
        ServerKeys.from_directory(tmp_path)
    ClientKeys.from_directory(tmp_path)


def test_a_secret_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path)
    if os.geteuid() == 0:
        os.chown(tmp_path / "server.key_secret", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to uid"):
        ServerKeys.from_directory(tmp_path)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def for_anybody(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def somebodys(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (pipe, "is no regular file"),
        (unix_socket, "cannot be read"),
        (Path.mkdir, "cannot be read"),
        (for_anybody, r"has mode 0666: anybody .* may let a client in; .* chmod o-w"),
        pytest.param(
            somebodys, r"belongs to uid 12345, expected 0 or root",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)  # fmt: skip
def test_what_is_no_key_file_of_this_user_is_refused_without_hanging(
    make: Callable[[Path], object], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At a start, and by a server that runs: its other clients may connect."""
    make_keys(tmp_path)
    known = read_public(tmp_path / "clients/client.key")
    allowed = AllowedClients(ServerKeys.from_directory(tmp_path))
    make(path := tmp_path / "clients/x.key")
    with pytest.raises(ConfigError, match=f"x.key' {says}"):
        ServerKeys.from_directory(tmp_path)
    assert allowed.get(known)
    (told,) = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert str(path) in told
    (tmp_path / "server.key").unlink()
    path.rename(tmp_path / "server.key")
    with pytest.raises(ConfigError, match=f"server.key' {says}"):
        ClientKeys.from_directory(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path)
    os.chown(tmp_path / "clients", 12345, -1)
    with pytest.raises(ConfigError, match=r"key folder '.*clients' belongs to uid 12345"):
        ServerKeys.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no public key"),
        ('public-key = "short"', "expected 40 characters"),
        (f'public-key = "{"é" * 20}"', "expected 40 characters"),
        (f'public-key = "{"~" * 40}"', "expected 40 characters"),
        (f'public-key = "{"0" * 40}"', "no secret key"),
        (f'public-key = "{"0" * 40}"\nsecret-key = "{"1" * 40}"', "no pair"),
    ],
)
def test_a_damaged_key_file_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "server.key_secret"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_secret(path)


def test_a_missing_key_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*feeder keygen"):
        ServerKeys.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="has keys of none"):
        ClientKeys.from_directory(tmp_path)
    make_keys(tmp_path, "a")
    make_keys(tmp_path, "b")
    with pytest.raises(ConfigError, match="keys of 'a' and 'b'"):
        ClientKeys.from_directory(tmp_path)


def test_a_client_is_kept_out_whose_key_is_gone_also_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        make_keys(tmp_path, name)
    folder = tmp_path / "clients"
    first, second = (read_public(folder / f"{name}.key") for name in ("first", "second"))
    allowed = AllowedClients(ServerKeys.from_directory(tmp_path))
    assert allowed.get(first)
    assert allowed.get(second)
    # One that cannot be read keeps out its own client alone.
    (folder / "first.key").write_text("nonsense")
    assert not allowed.get(first)
    assert allowed.get(second)
    assert "a client may not connect, since its key cannot be read" in caplog.text
    # Into a folder that anybody may write nobody comes, but those still go.
    os.chmod(folder, 0o777)
    make_keys(tmp_path, "third")
    assert not allowed.get(read_public(folder / "third.key"))
    assert allowed.get(second)
    for path in folder.iterdir():
        path.unlink()
    assert not allowed.get(second)
