"""The commands `feeder keygen`, `feeder doctor` and `feeder inspect`, and how they are found."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commands import status
from feeder.cli import doctor
from feeder.service.net.keys import ClientKeys, ServerKeys


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime


@pytest.mark.parametrize("words", [
    "", "nothing", "keygen", "doctor x", "inspect a b", "--quiet",
    "checkpoint", "checkpoint list", "checkpoint prune x", "checkpoint prune x --keep=0",
    "consume nonsense", "consume --limit=0", "consume --plane=air", "consume --credit=9999",
    "serve served_feeds", "serve served_feeds:", "serve :make", "serve a:b:make",
    "serve x:make --queues=0", "serve x:make --queues=x", "serve x:make --lease=0",
    "serve x:make --lease=nan", "serve x:make --bind=udp://x", "serve x:make --exit-when=later",
    "top nonsense", "top --every 0", "top --every soon", "top a b",
])  # fmt: skip
def test_wrong_usage_is_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*words.split()) == 2
    assert capsys.readouterr().err.startswith("usage: feeder")


def test_inspect_tells_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "snapshot").write_bytes(b"no snapshot")
    for path in (tmp_path / "snapshot", "/dev/zero"):
        assert status("inspect", str(path)) == 2
        assert capsys.readouterr().err.startswith("feeder: ")


def test_keygen_makes_keys_for_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("keygen", str(tmp_path / "a dir")) == 0
    told = capsys.readouterr().out
    assert f"wrote {tmp_path}/a dir/server.key_secret\n" in told
    assert f"scp -p '{tmp_path}/a dir/server.key' '{tmp_path}/a dir/client.key_secret'" in told
    client = ClientKeys.from_directory(tmp_path / "a dir", "client")
    assert ServerKeys.from_directory(tmp_path / "a dir").allowed == {client.public}


def test_whoever_is_let_in_is_said_by_this_user_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0)
    try:
        assert status("keygen", str(tmp_path / "new")) == 0
    finally:
        os.umask(before)
    for folder in (tmp_path / "new/clients", tmp_path / "new"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o777)
        serve = ("serve", "served_feeds:make", "--bind=tcp://127.0.0.1:0")
        assert status(*serve, f"--keys={tmp_path}/new") == 2
        refused = f"key folder '{folder}' has mode 0777: anybody on this host may let"
        assert refused in capsys.readouterr().err


def test_keygen_adds_clients_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("keygen", str(tmp_path), "--name", "a") == 0
    first = ServerKeys.from_directory(tmp_path)
    assert status("keygen", str(tmp_path), "--name", "b") == 0
    second = ServerKeys.from_directory(tmp_path)
    assert (first.public, first.secret) == (second.public, second.secret)
    assert first.allowed < second.allowed and len(second.allowed) == 2
    assert status("keygen", str(tmp_path), "--name", "b") == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert ServerKeys.from_directory(tmp_path) == second


@pytest.mark.parametrize("left", ["server.key", "client.key_secret", "clients/client.key"])
def test_keygen_overwrites_no_half_of_a_pair(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / left).write_text("precious")
    assert status("keygen", str(tmp_path)) == 2
    assert f"{tmp_path / left}' is there" in capsys.readouterr().err
    assert (tmp_path / left).read_text() == "precious"
    assert not (tmp_path / "server.key_secret").exists()


@pytest.mark.parametrize("name", ["server", "", ".hidden", "../up", "a/b", "-x", "a b"])
def test_keygen_takes_plain_names(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("keygen", str(tmp_path), f"--name={name}") == 2
    assert f"client name {name!r}" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["runtime"]


def test_keygen_tells_where_it_cannot_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("keygen", __file__) == 2
    assert "keys cannot be written" in capsys.readouterr().err


def test_doctor_finds_this_machine_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.CHECKS)
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}


def test_doctor_says_where_its_place_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "5", "LOCAL_RANK": "1", "SLURM_NODEID": "2", "SLURM_NNODES": "4"}
    monkeypatch.setattr(doctor.os, "environ", environment)
    text = doctor.check_place().text
    for words in ("queue 1 of", "queue 5 of", "node 2 (from SLURM_NODEID) of 4"):
        assert words in text
    monkeypatch.setenv("FEEDER_QUEUE", "two")
    finding = doctor.check_place()
    assert (finding.level, "FEEDER_QUEUE is 'two'" in finding.text) == ("problem", True)


def test_doctor_ends_with_1_where_there_is_a_problem(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runtime / "feeder").mkdir(mode=0o755)
    assert status("doctor") == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "problem" in line]
    assert "mode 0755, expected 0700" in line


def no_memfd(*_: object) -> int:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize(
    ("check", "target", "name", "value", "level", "says"),
    [
        (doctor.check_python, doctor.sys, "version_info", (3, 10), "problem", "install Python"),
        (doctor.check_python, doctor.sys, "platform", "darwin", "problem", "runs on Linux"),
        (doctor.check_numpy, np, "__version__", "1.26.4", "problem", "numpy>=2.0"),
        (doctor.check_pyzmq, doctor.zmq, "zmq_version_info", lambda: (4, 3, 4), "problem", "wheel"),
        (doctor.check_pyzmq, doctor.zmq, "has", lambda n: n != "ipc", "problem", "without ipc"),
        (doctor.check_pyzmq, doctor.zmq, "has", lambda n: n != "curve", "warning", "without curve"),
        (doctor.check_memfd, os, "memfd_create", no_memfd, "warning", "no shared memory"),
        (doctor.check_memfd, doctor, "FUTURE_WRITE", 1 << 20, "warning", "cannot be sealed"),
        (doctor.check_descriptors, resource, "getrlimit", lambda _: (64, 99), "problem", "99"),
        (doctor.check_descriptors, resource, "getrlimit", lambda _: (500, 9), "warning", "1024"),
        (doctor.check_directory, os, "access", lambda *_: False, "problem", "cannot be made"),
        (doctor.check_cpus, os, "sched_getaffinity", lambda _: {0}, "warning", "take turns"),
        (doctor.check_copy, doctor, "GOOD_COPY_GBS", 1e6, "warning", "GB/s"),
    ],
)
def test_doctor_sees(
    check: Callable[[], doctor.Finding],
    target: object,
    name: str,
    value: object,
    level: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check().level != "problem"
    with monkeypatch.context() as patched:
        patched.setattr(target, name, value)
        finding = check()
    assert finding.level == level
    assert says in str(finding)
