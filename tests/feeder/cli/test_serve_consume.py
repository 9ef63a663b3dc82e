"""The commands `feeder serve`, `feeder consume` and `feeder doctor ADDR`, in processes of their
own and here."""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import feeder
from feeder import cli
from feeder.cli import doctor, meter, serve
from feeder.state.snapshot import Snapshot

pytestmark = pytest.mark.process

READY_S = 10.0
END_S = 20.0

FEEDS = '''
import threading
import numpy as np
import feeder

NUM_CHUNKS = 40


def fetch(call):
    if call.index >= NUM_CHUNKS:
        raise StopIteration
    rows = 1 + call.index % 7
    first = np.full((rows, 3), call.index + 1, np.float32)
    return [first, np.arange(rows) + 100 * call.epoch]


def make():
    return feeder.init_data_input_workers(
        ["x", "y"], fetch, 8, epochs=2, coordinator=feeder.Coordinator()
    )


def make_slow():
    """Three batches, and then none, for ever."""
    def wait(call):
        if call.index >= 3:
            threading.Event().wait()
        return [np.full((8, 3), call.index, np.float32), np.arange(8)]

    return feeder.init_data_input_workers(
        ["x", "y"], wait, 8, num_worker_threads=1, coordinator=feeder.Coordinator()
    )


def make_two():
    coordinator = make()
    return feeder.init_data_input_workers(
        ["x"], lambda call: [np.ones((8, 1))], 8, input_source_name="more", epochs=None,
        coordinator=coordinator,
    )


def make_bad():
    def fail(call):
        if call.index >= 2:
            raise OSError("no more disk")
        return fetch(call)

    return feeder.init_data_input_workers(["x", "y"], fail, 8, coordinator=feeder.Coordinator())


def make_for_ever():
    print("being made", flush=True)
    threading.Event().wait()


def make_nothing():
    return 3


def make_wrongly():
    raise OSError("no\\ndisk")


coordinator = make()
number = 7
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of feeds, and a private directory of sockets in it."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "served_feeds.py").write_text(FEEDS)
    (tmp_path / "served_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(Path(feeder.__file__).parent.parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "feeder", *words]


def run_unread(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command whose output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            command(*words), stdout=writing, stderr=subprocess.PIPE, timeout=END_S, check=False
        )
    finally:
        os.close(writing)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=END_S, check=False
    )


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, killed and reaped at the end."""
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of stdout; to be called where it is the only one."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], READY_S)[0], "no line came"
    return process.stdout.readline()


@contextmanager
def serving(target: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its line."""
    with started("serve", f"served_feeds:{target}", *words) as process:
        yield process, read_line(process)


def in_process(name: str = "make") -> list[feeder.Batch]:
    """The batches of the feed 'train', from a feed in this process."""
    scope: dict[str, Any] = {}
    exec(FEEDS, scope)
    with scope[name]() as coordinator:
        return list(coordinator["train"])


def digest(batches: list[feeder.Batch]) -> str:
    whole = xxhash.xxh3_128()
    for batch in batches:
        for array in batch.values():
            whole.update(array.tobytes())
    return whole.hexdigest()


def digest_in(done: subprocess.CompletedProcess[str]) -> str:
    """The digest that a consumer printed last."""
    assert done.returncode == 0, done.stdout + done.stderr
    word, told = done.stdout.splitlines()[-1].split()
    assert word == "xxh3"
    return told


# ---- serve


def test_serve_says_where_and_ends_with_0_at_a_signal(folder: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with serving("make", "--queues=2") as (process, line):
            default = f"ipc://{folder}/runtime/feeder/default.sock"
            assert line == f"serving feed 'train', 2 queues, at {default}\n"
            began = time.monotonic()
            process.send_signal(number)
            assert process.wait(END_S) == 0
            assert time.monotonic() - began < 5.0
            assert process.stderr is not None
            assert process.stderr.read() == ""


def blocks(task: Path, number: signal.Signals) -> bool:
    """Whether a thread blocks a signal."""
    (mask,) = re.findall(r"^SigBlk:\s*(\w+)$", (task / "status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_serve_ends_whatever_thread_the_signal_comes_to() -> None:
    """The system chooses one; under a debugger it is not the main thread."""
    with serving("make") as (process, _):
        tasks = Path(f"/proc/{process.pid}/task")
        # Threads of ZeroMQ block all signals: one that is sent to such a thread alone waits there.
        others = [
            int(task.name)
            for task in tasks.iterdir()
            if int(task.name) != process.pid and not blocks(task, signal.SIGTERM)
        ]
        assert ctypes.CDLL(None).tgkill(process.pid, others[0], signal.SIGTERM) == 0
        assert process.wait(END_S) == 0


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_serve_ends_at_a_signal_while_it_starts(number: signal.Signals, status: int) -> None:
    with started("serve", "served_feeds:make_for_ever") as process:
        assert read_line(process) == "being made\n"
        process.send_signal(number)
        assert process.wait(END_S) == status
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("kind", ["a file", "abstract"])
def test_serve_tells_systemd_when_it_is_ready_and_when_it_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = str(folder / "notify") if kind == "a file" else f"@feeder-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(place.replace("@", "\0"))
        told.settimeout(READY_S)
        monkeypatch.setenv("NOTIFY_SOCKET", place)
        with serving("make") as (process, _):
            assert told.recv(100) == b"READY=1"
            process.terminate()
            assert told.recv(100) == b"STOPPING=1"
            assert process.wait(END_S) == 0


def test_serve_listens_at_every_address() -> None:
    binds = ["--bind", "ipc://first", "--bind", "tcp://127.0.0.1:0"]
    with started("serve", "served_feeds:make_two", *binds) as process:
        assert process.stdout is not None
        lines = [read_line(process), process.stdout.readline()]
        assert all(
            line.startswith("serving feeds 'more', 1 queue; 'train', 1 queue, at ")
            for line in lines
        )
        addresses = [line.split()[-1] for line in lines]
        assert addresses[0].endswith("/runtime/feeder/first.sock")
        digests = {
            digest_in(run("consume", address, "--feed=more", "--limit=3")) for address in addresses
        }
        assert len(digests) == 1


def test_serve_takes_a_coordinator() -> None:
    with serving("coordinator"):
        assert digest_in(run("consume")) == digest(in_process())


def test_serve_stops_while_a_consumer_reads() -> None:
    """The consumer looks for a server again, until it is told to stop, too."""
    with (
        serving("make_two") as (process, _),
        started("consume", "--feed=more", "--every=1", "--limit=100000000") as consumer,
    ):
        assert read_line(consumer).startswith("step 0  xxh3 ")
        process.terminate()
        assert process.wait(END_S) == 0
        consumer.send_signal(signal.SIGINT)
        out, err = consumer.communicate(timeout=END_S)
    assert consumer.returncode == 0
    assert re.fullmatch("xxh3 [0-9a-f]{32}", out.splitlines()[-1])
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_consume_saves_its_position_however_it_is_told_to_end(
    folder: Path, number: signal.Signals
) -> None:
    words = ("--feed=more", "--every=1", "--limit=100000000", f"--save={folder}/position")
    with serving("make_two"), started("consume", *words) as consumer:
        assert consumer.stdout is not None and consumer.stderr is not None
        lines = [read_line(consumer)]
        consumer.send_signal(number)
        # The reader has read ahead of that line.
        lines += consumer.stdout.read().splitlines()
        assert f"position saved: {folder}/position" in consumer.stderr.read()
        assert consumer.wait(END_S) == 0
    assert re.fullmatch("xxh3 [0-9a-f]{32}", lines[-1])
    steps = [line.split()[1] for line in lines if line.startswith("step")]
    assert Snapshot.read(folder / "position").states[0].summary[2] == int(steps[-1]) + 1


def test_serve_tells_a_fetch_function_that_hangs() -> None:
    with serving("make_slow") as (process, _):
        assert digest_in(run("consume", "--limit=2"))
        process.terminate()
        began = time.monotonic()
        assert process.wait(END_S) == 1
        assert time.monotonic() - began < 7.0
        assert process.stderr is not None
        assert "threading.Event().wait()" in process.stderr.read()


def test_serve_ends_by_itself_where_everything_was_used() -> None:
    with serving("make", "--exit-when=acknowledged") as (process, _):
        assert digest_in(run("consume")) == digest(in_process())
        assert process.wait(END_S) == 0


def test_serve_logs_a_feed_that_fails_and_ends_with_1_where_it_ends_by_itself() -> None:
    with serving("make_bad", "--exit-when=acknowledged") as (process, _):
        assert run("consume").returncode == 1
        assert process.wait(END_S) == 1
        assert process.stderr is not None
        told = process.stderr.read()
    assert told.startswith("feed 'train' has failed: worker ")
    assert told.count("Traceback") == told.count('raise OSError("no more disk")') == 1


def test_serve_goes_on_after_a_feed_has_failed() -> None:
    with serving("make_bad") as (process, _):
        for _ in range(2):
            assert run("consume").returncode == 1
        process.terminate()
        assert process.wait(END_S) == 0
        assert process.stderr is not None
        assert process.stderr.read().count("Traceback") == 2


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such_module:make", "no module 'no_such_module'"),
        ("served_feeds.inner:make", "no module 'served_feeds.inner'"),
        ("served_feeds:nothing", "no attribute 'nothing'"),
        ("served_feeds:number", "'served_feeds:number' is int, expected a function"),
        ("served_feeds:fetch", "cannot be called without arguments"),
        ("served_feeds:make_nothing", "'make_nothing' returned int"),
        ("served_feeds:make_wrongly", "'served_feeds:make_wrongly' raised OSError: no disk, at /"),
        ("", "there is nothing to serve: give MODULE:ATTR, or --config FILE"),
    ],
)
def test_serve_tells_what_it_cannot_serve(target: str, says: str) -> None:
    done = run("serve", *filter(None, [target]))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("feeder: ")
    assert says in line


def test_serve_looks_in_the_current_folder_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an installed command: Python itself has not put the folder on the path."""
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name != ""])
    monkeypatch.delitem(sys.modules, "served_feeds", raising=False)
    made = serve.load("served_feeds", "make")
    assert made.__code__.co_filename == str(folder / "served_feeds.py")
    monkeypatch.delitem(sys.modules, "served_feeds")


def test_serve_shows_where_a_module_fails(folder: Path) -> None:
    done = run("serve", "served_broken:make")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    error = "ModuleNotFoundError: No module named 'no_such_module_at_all'"
    where = f"{folder}/served_broken.py:1"
    assert line.startswith(
        f"feeder: module 'served_broken' cannot be imported: {error}, at {where}; modules are in "
    )
    assert repr(str(folder)) in line


def test_a_command_that_is_interrupted_says_no_more(folder: Path) -> None:
    """A module that is imported for ever, and tells that it has begun."""
    (folder / "served_waiting.py").write_text(
        "import threading\nprint('here', flush=True)\nthreading.Event().wait()\n"
    )
    words = command("serve", "served_waiting:make")
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], READY_S)[0], "it did not begin"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=END_S)
            assert (out.strip(), err) == ("here", "")
        finally:
            process.kill()
    assert process.returncode == 130


def test_serve_shows_a_traceback_where_it_is_asked_to() -> None:
    done = run("serve", "served_broken:make", "--debug")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback ")
    assert "import no_such_module_at_all" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("feeder: module 'served_broken' cannot be ")


@pytest.mark.parametrize(
    "words",
    [
        ["served_feeds"],
        ["served_feeds:"],
        [":make"],
        ["a b:make"],
        ["served_feeds:make", "--queues=0"],
        ["served_feeds:make", "--queues=x"],
        ["served_feeds:make", "--lease=0"],
        ["served_feeds:make", "--lease=nan"],
        ["served_feeds:make", "--bind=udp://x"],
        ["served_feeds:make", "--exit-when=later"],
    ],
    ids=" ".join,
)
def test_serve_with_wrong_usage_is_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", *words])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("usage: feeder serve")


def test_serve_does_not_take_an_address_from_another() -> None:
    with serving("make") as (process, _):
        done = run("serve", "served_feeds:make")
        assert done.returncode == 2
        assert f"is held by process {process.pid}" in done.stderr
        assert digest_in(run("consume", "--limit=1")) == digest(in_process()[:1])


def test_serve_refuses_other_hosts_without_keys() -> None:
    done = run("serve", "served_feeds:make", "--bind=tcp://0.0.0.0:0")
    assert done.returncode == 2
    assert "--insecure" in done.stderr
    with serving("make", "--bind=tcp://0.0.0.0:0", "--insecure") as (_, line):
        port = line.rpartition(":")[2].strip()
        assert digest_in(run("consume", f"tcp://127.0.0.1:{port}")) == digest(in_process())


def test_serve_lets_in_clients_with_keys_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 10.0)
    assert cli.main(["keygen", "keys"]) == 0
    with serving("make", "--bind=tcp://127.0.0.1:0", "--keys=keys") as (_, line):
        address = line.split()[-1]
        assert digest_in(run("consume", address, "--keys=keys")) == digest(in_process())
        done = run("consume", address)
        assert done.returncode == 1
        assert f"the server at '{address}' refuses: " in done.stderr
        capsys.readouterr()
        assert cli.main(["doctor", address, "--keys=keys"]) == 0
        assert f"a server answers at '{address}'" in capsys.readouterr().out
        assert cli.main(["doctor", address]) == 1
        assert "give keys to both or to neither" in capsys.readouterr().out


def test_keys_are_read_again_when_they_change_and_at_sighup(folder: Path) -> None:
    assert cli.main(["keygen", "keys", "--name=first"]) == 0
    with serving("make", "--bind=tcp://127.0.0.1:0", "--keys=keys") as (process, line):
        address = line.split()[-1]
        shutil.copytree("keys", "late")
        assert cli.main(["keygen", "late", "--name=second"]) == 0
        os.unlink("late/first.key_secret")
        done = run("consume", address, "--keys=late")
        assert done.returncode == 1
        assert "it does not know this client's key" in done.stderr
        shutil.copy("late/clients/second.key", "keys/clients")
        assert digest_in(run("consume", address, "--keys=late")) == digest(in_process())
        os.unlink("keys/clients/second.key")
        assert run("consume", address, "--keys=late").returncode == 1
        # A list that nobody could connect with is not taken.
        os.rename("keys/clients", "keys/away")
        process.send_signal(signal.SIGHUP)
        assert run("consume", address, "--keys=keys").returncode == 0
        process.terminate()
        assert process.wait(END_S) == 0
    with serving("make") as (process, _):
        process.send_signal(signal.SIGHUP)
        assert process.wait(END_S) == 0


@pytest.mark.parametrize("which", ["keys", "keys/clients"])
def test_a_key_folder_that_anybody_may_write_to_is_refused(folder: Path, which: str) -> None:
    assert cli.main(["keygen", "keys"]) == 0
    os.chmod(which, 0o777)
    done = run("serve", "served_feeds:make", "--bind=tcp://127.0.0.1:0", "--keys=keys")
    assert done.returncode == 2
    assert f"key folder '{which}' has mode 0777: anybody on this host may let" in done.stderr


def test_what_killed_servers_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # A short path: of a long one the socket would lie in /tmp, among those of other servers.
    with tempfile.TemporaryDirectory(prefix="fd") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        for name in ("first", "second"):
            with serving("make", f"--bind=ipc://{name}") as (process, _):
                process.kill()
                process.wait(END_S)
        old, new = sorted(Path(runtime, "feeder").glob("*.arenas"))
        os.utime(old, (1, 1))
        with serving("make", "--bind=ipc://third") as (process, _):
            # The young one may be of a server that is about to listen.
            assert (old.exists(), new.exists()) == (False, True)
            process.terminate()
            assert process.wait(END_S) == 0


def test_serve_is_ready_soon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes not much longer than Python with what every server imports: twice as long where
    the machine does nothing else. What is compiled is kept, as where the library is installed."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(folder / "compiled"))
    bare, times = [], []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import numpy, zmq, msgspec"], check=True)
        bare.append(time.monotonic() - began)
        began = time.monotonic()
        with serving("make"):
            times.append(time.monotonic() - began)
    assert min(times) < 5 * min(bare)


# ---- consume


def test_consume_has_the_digest_of_the_feed_in_process() -> None:
    expected = in_process()
    with serving("make", "--bind=ipc://a", "--bind=tcp://127.0.0.1:0") as (process, _):
        assert process.stdout is not None
        tcp = process.stdout.readline().split()[-1]
        for words in (
            ["ipc://a"],
            ["ipc://a", "--plane=frames", "--credit=2"],
            [tcp, "--plane=frames", "--checksum=full"],
            ["ipc://nobody", "ipc://a", "--queue=0", "--feed=train"],
        ):
            done = run("consume", *words)
            assert digest_in(done) == digest(expected), words
            plane = "frames" if "--plane=frames" in words else "shared"
            rows = sum(batch.rows for batch in expected)
            size = sum(array.nbytes for batch in expected for array in batch.values())
            told = f"{len(expected)} batches, {rows} rows, {meter.size(size)} in "
            assert done.stdout.startswith(told)
            assert f" over {plane}: " in done.stdout
            assert done.stderr == ""


def test_consume_every_prints_the_running_digest() -> None:
    expected = in_process()
    with serving("make"):
        done = run("consume", "--every=5", "--limit=12")
    assert done.stdout.splitlines()[:2] == [
        f"step 4  xxh3 {digest(expected[:5])}",
        f"step 9  xxh3 {digest(expected[:10])}",
    ]
    assert digest_in(done) == digest(expected[:12])


def test_consume_goes_on_from_what_it_saved(folder: Path) -> None:
    expected = in_process()
    with serving("make"):
        done = run("consume", "--limit=7", "--save=position")
        assert digest_in(done) == digest(expected[:7])
        assert done.stderr == "position saved: position\n"
        done = run("consume", "--resume=position", "--save=position")
        assert digest_in(done) == digest(expected[7:])
        done = run("consume", "--resume=position")
        assert done.stdout.startswith("0 batches")
    assert Snapshot.read(folder / "position").describe().startswith("train[0]: ")


def test_consume_ends_with_its_summary_at_sigint(folder: Path) -> None:
    """Interrupted while it waits for a batch that does not come."""
    with serving("make_slow"), started("consume", "--every=1", "--save=position") as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[1] for _ in range(3)] == ["0", "1", "2"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=END_S)
    assert process.returncode == 0
    assert out.startswith("3 batches, 24 rows, ")
    assert err == "position saved: position\n"
    assert Snapshot.read(folder / "position").states


def test_consume_ends_at_sigint_before_the_first_batch() -> None:
    """It waits, since the other queue has no consumer; the terminal tells that it has begun."""
    master, slave = os.openpty()
    with (
        serving("make", "--queues=2"),
        subprocess.Popen(
            command("consume", "--queue=1"), stdout=subprocess.PIPE, stderr=slave, text=True
        ) as process,
    ):
        os.close(slave)
        assert select.select([master], [], [], READY_S)[0], "nothing was shown"
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=END_S)
        finally:
            process.kill()
            os.close(master)
    assert process.returncode == 0
    assert out.startswith("0 batches, 0 rows, 0 B in ")


@pytest.mark.parametrize(
    "words", [["consume"], ["consume", "--feed=more", "--every=1"], ["checkpoint", "list", "."]],
    ids=" ".join,
)  # fmt: skip
def test_a_command_whose_output_nobody_reads_ends_without_a_word(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that writes into a buffer, and is at its end by then."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with serving("make_two" if "--feed=more" in words else "make"):
        done = run_unread(*words)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_command_without_an_output_ends_as_it_would_with_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys; os.close(1); os.execv(sys.executable, "
         "[sys.executable, '-m', 'feeder', 'checkpoint', 'list', '.'])"],
        stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_consume_tells_an_error_of_the_feed_and_saves() -> None:
    with serving("make_bad"):
        done = run("consume", "--save=position")
    assert done.returncode == 1
    assert "no more disk" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("feeder: ")
    assert "\nxxh3 " in done.stdout
    assert os.path.exists("position")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--feed=other"], 2, "other"),
        (["--queue=5"], 2, "queue is 5"),
        (["--resume=missing"], 2, "--resume is 'missing', which is not there"),
        (["--save=no/such/folder"], 2, "whose folder is missing"),
        (["--save=/dev/null"], 2, "is there and no file"),
        (["--resume=/dev/zero"], 1, "are no snapshot"),
        (["--keys=nowhere"], 2, "nowhere"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_consume_tells_what_it_cannot_have(words: list[str], status: int, says: str) -> None:
    with serving("make"):
        done = run("consume", *words)
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert line.startswith("feeder: ")
    assert says in line


def test_serve_with_a_missing_resume_is_status_2(folder: Path) -> None:
    done = run("serve", "served_feeds:make", "--resume=missing")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--resume is 'missing', which is not there" in done.stderr


def test_serve_tells_in_a_line_how_many_descriptors_it_needs(folder: Path) -> None:
    words = command("serve", "served_feeds:make", "--queues=9")
    done = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 40; ulimit -Hn 40; exec "$@"', "sh", *words],
        capture_output=True, text=True, timeout=END_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    told = re.search(r"may have 40 descriptors, and a server for 9 consumers needs (\d+):", line)
    assert told is not None, line
    limit = told[1]
    with (
        subprocess.Popen(
            ["sh", "-c", f'ulimit -Sn {limit}; ulimit -Hn {limit}; exec "$@"', "sh", *words],
            stdout=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            assert read_line(process).startswith("serving feed")
        finally:
            process.kill()


@pytest.mark.parametrize("word", ["nonsense", "--limit=0", "--plane=air", "--credit=9999"])
def test_consume_with_wrong_usage_is_status_2(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["consume", word])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("usage: feeder consume")


@pytest.mark.parametrize("draw", ["rich", "plain"])
def test_consume_shows_rates_on_a_terminal(draw: str) -> None:
    """On a pseudo-terminal: a line of rates, and the digest nevertheless."""
    if draw == "rich":
        pytest.importorskip("rich")
    code = (
        "import sys; from feeder.cli import main, meter\n"
        f"meter.progress_line = meter.{draw}_line\n"
        "sys.exit(main(['consume']))"
    )
    with serving("make"):
        master, slave = os.openpty()
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env=os.environ | {"COLUMNS": "80", "TERM": "xterm"},
        ) as process:
            os.close(slave)
            out, _ = process.communicate(timeout=END_S)
        shown = os.read(master, 1 << 16).decode()
        os.close(master)
    assert process.returncode == 0
    assert digest(in_process()) in out
    assert "batches/s" in shown
    assert "waited" in shown


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


def test_doctor_finds_a_server_and_takes_no_queue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 10.0)
    with serving("make", "--bind=ipc://a") as (_, line):
        address = line.split()[-1]
        for _ in range(2):
            assert cli.main(["doctor", "ipc://a"]) == 0
        assert capsys.readouterr().out.endswith("ok       a server answers at 'ipc://a'\n")
        assert digest_in(run("consume", address)) == digest(in_process())


def test_doctor_tells_silence_and_strangers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        addresses = ["ipc://nobody", f"tcp://127.0.0.1:{port}", "tcp://*:5"]
        assert cli.main(["doctor", *addresses]) == 1
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert all(line.startswith("problem ") for line in lines)
    assert "nobody listens there (1 s waited)" in lines[0]
    assert "somebody listens there, but does not answer" in lines[1]
    assert "one to listen at" in lines[2]
