"""Interpreters that tests start are forked from one that is warm.

To start an interpreter and to import numpy, pyzmq and feeder takes half a second of CPU, and the
tests start thousands. So each process that runs tests has a zygote, as Android has one for its
programs, and `multiprocessing` a fork server: an interpreter with one thread that has imported all
that, and forks when it is asked. `subprocess.Popen` takes a fork of it where the command is this
interpreter and asks for nothing that only a start can give; else it starts the command. A test
marked `fresh` is about starting itself, and gets no forks.

A fork is a child of the process that asked, not of the zygote (CLONE_PARENT): that waits for it,
signals it and is its parent as of any other. All that `exec` would have given it is set in
`_become`. Then it leaves `main` upwards, so that the interpreter ends it as it ends each: with its
exit status and its traceback, its threads joined, its functions of atexit called.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import platform
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any, TextIO

PRELOAD = ("numpy", "zmq", "msgspec", "msgpack", "xxhash", "feeder")
NOT_PRELOADED = ("feeder.adapters", "feeder.__main__")
FEEDER = os.path.join(os.path.dirname(sys.executable), "feeder")

_CLONE = {"x86_64": (56, 3), "aarch64": (220, 4)}
"""Of each machine the number of the system call, and which of its arguments is the place where the
kernel writes the thread's number."""
_CLONE_PARENT, _CLEAR_TID, _SET_TID = 0x8000, 0x200000, 0x1000000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_READ_AT_START = ("LANG", "LC_", "LD_", "GLIBC_", "MALLOC_", "PYTHON", "TZ", "FEEDER_FAULT")
"""What variables begin with that are read once, when an interpreter starts or imports feeder."""
_MOST_BYTES = 100_000
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ})
_STAYS = {*sys.stdlib_module_names, "__main__", "zygote"}
_libc = ctypes.PyDLL(None)
_libc.pthread_self.restype = ctypes.c_void_p
_Popen = subprocess.Popen
_ARGUMENTS = tuple(inspect.signature(_Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
_PLAIN = {
    "executable": None, "preexec_fn": None, "close_fds": True, "shell": False, "startupinfo": None,
    "restore_signals": True, "gid": None, "gids": None, "uid": None, "umask": -1,
}  # fmt: skip


# What the tests' process does.


class Zygote:
    """The zygote, as the process of the tests has it. Owner: its lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._state = _handed_on()
        self._environment = _read_at_start(os.environ)
        self._socket, there = socket.socketpair(type=socket.SOCK_SEQPACKET)
        path = [os.path.dirname(os.path.abspath(__file__)), *sys.path]
        code = f"import sys; sys.path.insert(0, {path[0]!r}); import zygote; zygote.main()"
        with there:
            self._popen = _Popen(
                [sys.executable, "-c", code, str(there.fileno()), json.dumps(path)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[there.fileno()],
                # With more threads it would be no zygote.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""},
            )  # fmt: skip
        told = json.loads(self._socket.recv(_MOST_BYTES))
        self._path, self._modules, self._root = told["path"], set(told["modules"]), told["root"]
        self.pid = self._popen.pid
        self.is_on = True

    def close(self) -> None:
        self._socket.close()
        self._popen.wait()

    def start(self, command: dict[str, Any], descriptors: list[int]) -> int | None:
        """Return the id of a new process, or None where this takes a start."""
        if not (self.is_on and os.getpid() == self._owner and self._is_same(command)):
            return None
        message = json.dumps(command).encode()
        if len(message) > _MOST_BYTES:
            return None
        with self._lock:
            socket.send_fds(self._socket, [message], descriptors)
            return int(self._socket.recv(_MOST_BYTES))

    def _is_same(self, command: dict[str, Any]) -> bool:
        """Complete the command's path, and return whether what it imports, and what a process gets
        from its parent, are what the zygote has."""
        cwd, first = command["cwd"], command["path"]
        more = filter(None, command["env"].get("PYTHONPATH", "").split(os.pathsep))
        rest = dict.fromkeys([*(os.path.join(cwd, entry) for entry in more), *self._path])
        command["path"] = [*first, *rest]
        places = [os.path.join(cwd, entry) for entry in command["path"]]
        roots = [place for place in places if os.path.isdir(os.path.join(place, "feeder"))]
        return (
            os.path.isdir(cwd)
            and bool(roots)
            and self._is_root(roots[0])
            and not any(map(self._hides, places[: len(places) - len(self._path)]))
            and _read_at_start(command["env"]) == self._environment
            and _handed_on() == self._state
        )

    def _is_root(self, folder: str) -> bool:
        return os.path.realpath(folder) == self._root

    def _hides(self, folder: str) -> bool:
        """Return whether a folder has a module of its own by a name that the zygote imported."""
        if self._is_root(folder):
            return False
        try:
            entries = list(os.scandir(folder))
        except OSError:
            return os.path.exists(folder)
        return any(
            entry.name.partition(".")[0] in self._modules
            and (not entry.is_dir() if "." in entry.name else _is_package(entry.path))
            for entry in entries
        )


zygote: Zygote | None = None
"""That of this process, once it is installed."""


def install() -> None:
    """Start the zygote, and have `subprocess` take forks of it, from now on. The main thread."""
    global zygote
    if zygote is None and platform.machine() in _CLONE:
        zygote = Zygote()
        subprocess.Popen = Popen  # type: ignore[misc]


def close() -> None:
    """End the zygote. What was forked from it lives on."""
    global zygote
    if zygote:
        subprocess.Popen = _Popen  # type: ignore[misc]
        zygote.close()
        zygote = None


def pid() -> int:
    """Return the process id of the zygote, 0 where there is none."""
    return zygote.pid if zygote else 0


@contextmanager
def paused() -> Iterator[None]:
    """Have commands started, and not forked."""
    if zygote:
        zygote.is_on = False
    yield
    if zygote:
        zygote.is_on = True


class Popen(_Popen):  # type: ignore[type-arg]
    """A process, which may be forked from the zygote."""

    def _execute_child(self, *given: Any) -> None:
        asked = dict(zip(_ARGUMENTS, given, strict=True))
        if not (zygote and self._fork(asked)):
            super()._execute_child(*given)  # type: ignore[misc]

    def _fork(self, asked: dict[str, Any]) -> bool:
        environ = os.environ if asked["env"] is None else asked["env"]
        env = {os.fsdecode(key): os.fsdecode(value) for key, value in environ.items()}
        cwd = os.path.abspath(os.fsdecode(asked["cwd"] or os.getcwd()))
        command = _parse(asked["args"], cwd, env)
        if not command or any(asked[name] != plain for name, plain in _PLAIN.items()):
            return False
        files = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        descriptors = [own if one == -1 else one for own, one in enumerate(files)]
        command |= {
            "env": env,
            "cwd": cwd,
            "numbers": [0, 1, 2, *asked["pass_fds"]],
            "limits": [resource.getrlimit(one) for one in _LIMITS],
            "has_session": asked["start_new_session"],
            "group": asked["process_group"],
            "ignored": [one for one in _SIGNALS if signal.getsignal(one) is signal.SIG_IGN],
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }
        pid = zygote.start(command, [*descriptors, *asked["pass_fds"]])
        if pid is None:
            return False
        sys.audit("subprocess.Popen", sys.executable, asked["args"], asked["cwd"], env)
        self.pid, self._child_created = pid, True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]
        return True


def _parse(args: Any, cwd: str, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a command runs; None where it is not one of this interpreter's that it knows."""
    words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
    program, *rest = map(os.fsdecode, words)
    program = shutil.which(program, path=env.get("PATH")) or program
    command: dict[str, Any] = {
        "words": [program, *rest],
        "warnings": [],
        "is_unbuffered": bool(env.get("PYTHONUNBUFFERED")),
    }
    is_safe = False
    if program == FEEDER:
        rest = [program, *rest]
    elif program != sys.executable:
        return None
    while rest:
        match rest:
            case ["-B", *rest] if sys.dont_write_bytecode:
                pass
            case ["-P", *rest]:
                is_safe = True
            case ["-u", *rest]:
                command["is_unbuffered"] = True
            case ["-W", what, *rest]:
                command["warnings"].append(what)
            case ["-c", code, *rest]:
                return {**command, "code": code, "argv": ["-c", *rest], "path": [""][is_safe:]}
            case ["-m", name, *rest]:
                return {**command, "module": name, "argv": ["-m", *rest], "path": ["."][is_safe:]}
            case [file, *_] if file == FEEDER or (file.endswith(".py") and os.sep in file):
                file = os.path.join(cwd, file)
                folder = os.path.dirname(os.path.realpath(file))
                return {**command, "file": file, "argv": rest, "path": [folder][is_safe:]}
            case _:
                return None
    return None


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in env.items()
        if key.startswith(_READ_AT_START) and key != "PYTHONPATH"
    }


def _handed_on() -> list[Any]:
    """Return what a process gets from its parent that a fork does not get from the zygote."""
    return [os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)]


def _is_package(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "__init__.py"))


# What the zygote does.


def main() -> None:
    """The body of the zygote: its socket, and the path to import by. Returns in a fork, once that
    has run."""
    control, path = socket.socket(fileno=int(sys.argv[1])), sys.path[2:]
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # It is the terminal's, for the tests.
    kept: list[str] = []
    atexit.register(_keep_modules, kept)
    sys.path[:] = json.loads(sys.argv[2])
    for name in PRELOAD:
        importlib.import_module(name)
    for found in pkgutil.walk_packages(sys.modules["feeder"].__path__, "feeder."):
        if not found.name.startswith(NOT_PRELOADED):
            importlib.import_module(found.name)
    sys.path[:] = path
    kept += [name for name in sys.modules if name.partition(".")[0] not in _STAYS]
    names = sorted({name.partition(".")[0] for name in sys.modules} - {"__main__", "zygote"})
    root = os.path.dirname(os.path.dirname(sys.modules["feeder"].__file__ or ""))
    told = {"path": path, "modules": names, "root": os.path.realpath(root)}
    control.send(json.dumps(told).encode())
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 2 * _MOST_BYTES, 256)
        if not message:
            os._exit(0)
        if _fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    command = json.loads(message)
    _become(command, descriptors, control)
    _run(command)


def _keep_modules(kept) -> None:
    """Called at the end of a fork: taking apart what the zygote imported would take longer than all
    else, and what a fork imported is taken apart nevertheless."""
    modules = [sys.modules.pop(name) for name in kept if name in sys.modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))


def _fork() -> int:
    """Fork as `os.fork` does, a child of this process's parent."""
    call, place = _CLONE[platform.machine()]
    arguments = [_CLONE_PARENT | _SET_TID | _CLEAR_TID | signal.SIGCHLD, 0, 0, 0, 0]
    arguments[place] = _tid_place()
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(call, *map(ctypes.c_long, arguments))
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def _become(command: dict[str, Any], descriptors: list[int], control: socket.socket) -> None:
    """Take over what the command asks for, and tell that it lives."""
    numbers = command["numbers"]
    above = max(numbers) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, above) for one in [*descriptors, control.fileno()]]
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in moved:
            with contextlib.suppress(OSError):
                os.close(int(name))
    control.detach()
    for one, number in zip(moved, numbers, strict=False):
        os.dup2(one, number)
        os.close(one)
    for one, limits in zip(_LIMITS, command["limits"], strict=True):
        resource.setrlimit(one, tuple(limits))
    os.chdir(command["cwd"])
    if command["has_session"]:
        os.setsid()
    elif command["group"] >= 0:
        os.setpgid(0, command["group"])
    for one in _SIGNALS:
        if one in command["ignored"]:
            signal.signal(one, signal.SIG_IGN)
        elif one == signal.SIGINT:
            signal.signal(one, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, command["blocked"])
    os.environ.clear()
    os.environ.update(command["env"])
    sys.orig_argv[:] = command["words"]
    sys.argv[:] = command["argv"]
    sys.path[:] = [os.getcwd() if entry == "." else entry for entry in command["path"]]
    importlib.invalidate_caches()
    sys.warnoptions.extend(command["warnings"])
    warnings._processoptions(command["warnings"])  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    is_unbuffered = command["is_unbuffered"]
    sys.stdin = sys.__stdin__ = _standard(0, sys.stdin, "r")
    sys.stdout = sys.__stdout__ = _standard(1, sys.stdout, "w", is_unbuffered)
    sys.stderr = sys.__stderr__ = _standard(2, sys.stderr, "w", is_unbuffered)
    with socket.socket(fileno=moved[-1]) as told:
        told.send(str(os.getpid()).encode())


def _standard(descriptor: int, old: TextIO, mode: str, is_unbuffered: bool = False) -> TextIO:
    """Return a standard file, as the interpreter makes it."""
    raw = io.FileIO(descriptor, mode, closefd=False)
    raw.name = old.name
    file = raw if is_unbuffered else (io.BufferedReader if mode == "r" else io.BufferedWriter)(raw)
    made = io.TextIOWrapper(
        file, old.encoding, old.errors, newline="\n" if mode == "w" else None,
        line_buffering=mode == "w" and (descriptor == 2 or os.isatty(descriptor)),
        write_through=is_unbuffered,
    )  # fmt: skip
    made.mode = mode
    return made


def _run(command: dict[str, Any]) -> None:
    """Run it as `__main__`."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    del sys.modules["zygote"]
    module.__dict__.update(__builtins__=builtins, __loader__=BuiltinImporter, __annotations__={})
    try:
        if "module" in command:
            runpy._run_module_as_main(command["module"])  # type: ignore[attr-defined]
        elif "code" in command:
            exec(compile(command["code"], "<string>", "exec"), module.__dict__)
        else:
            name = command["file"]
            loader = SourceFileLoader("__main__", name)
            module.__dict__.update(__file__=name, __cached__=None, __loader__=loader)
            with open(name, "rb") as file:
                code = compile(file.read(), name, "exec")
            exec(code, module.__dict__)
    except BaseException as error:
        # What is told begins with the command's own frames.
        hook, shown = sys.excepthook, error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook = lambda kind, error, _: hook(kind, error.with_traceback(shown), shown)
        raise


def _tid_place() -> int:
    """Return the address at which the C library keeps the number of this thread: the kernel writes
    a child's there, as it does for `fork`."""
    thread = _libc.pthread_self()
    numbers = (ctypes.c_int32 * 512).from_address(thread)
    return thread + 4 * list(numbers).index(os.getpid())
