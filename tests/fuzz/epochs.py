"""The files of a job's epochs: manifests, parts of both kinds, and what says that a run saves.

Of an LMDB what feeder reads is hostile: its keys and values, the file's digest and length. Pages
that were changed under a digest that fits are left out: liblmdb trusts its pages, and a stranger's
may end the process (docs/jobs.md says so). A file with changed pages is given in as well, but under
a digest that does not fit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import lmdb
import msgpack
import numpy as np
import xxhash

from feeder.checkpoint.format import encode
from feeder.checkpoint.store import CheckpointStore
from feeder.errors import CheckpointError
from feeder.job import MultiNodeCheckpointManager, Reader
from feeder.job.checkpoints.databases import DB_TYPES, open_database
from feeder.job.checkpoints.epochs import Epochs, jobs_in, read_manifests, verify_parts
from feeder.job.checkpoints.locations import CheckpointLocation
from feeder.job.checkpoints.manifest import Manifest, Part
from feeder.job.checkpoints.parts import LoadPart, SavePart, load_part, save_part
from feeder.job.workspace import Workspace
from feeder.state import codec
from fuzz.files import folder, run_command, sealed, try_all
from fuzz.inputs import mutated, nested, reshaped

_NODES = ["a", "b"]
_EPOCHS = (1, 2)
_STEPS = {"train[0]": 3}
_STATE = codec.pack(Reader(range(10)).state_dict())
_ENTRIES = {
    "x": np.arange(6, dtype=np.int16).reshape(2, 3),
    "s": np.zeros(2, [("a", "<f4"), ("b", "<i2", (2,))]),
    "state/reader": _STATE,
}
_PART, _MANIFEST = "a.2", "manifests/a.g1.2"
_NAMES = (_PART, _MANIFEST, "manifests/a.g1.1", "manifests/b.g2.2", "runs/a.0000000001",
          "feed.00000001")  # fmt: skip
BESIDE = bytes((0, len(_NAMES) - 1))
"""What an input of a checkpoint begins with that lies beside the epochs, of a feed's own."""
_CHECKPOINT_DIGEST = slice(28, 44)
_CHECKPOINT_AT = 44
_TRAILER_BYTES = 24


def _location(db_type: str, place: str = "epochs") -> CheckpointLocation:
    return CheckpointLocation(url=str(folder(f"{place}-{db_type}")), db_type=db_type)


def _manifest(epoch: int, digests: Mapping[str, bytes]) -> Manifest:
    parts = {
        node: Part(digest=digest, num_bytes=1, steps=_STEPS) for node, digest in digests.items()
    }
    return Manifest(generation=1, epoch=epoch, finished_by="", parts=parts)


def _save(db_type: str) -> dict[str, bytes]:
    """Save epochs as a job does; returns the bytes of each file."""
    location = _location(db_type, "saved")
    for epoch in _EPOCHS:
        digests = {}
        for node in _NODES:
            request = SavePart(
                url=location.url, db_type=db_type, name=location.part_name(node, epoch),
                writer=node, meta={"node": node, "epoch": epoch, "generation": 1},
            )  # fmt: skip
            digests[node] = save_part(request, _ENTRIES, _STEPS).digest
        Epochs(location, _NODES).commit(_manifest(epoch, digests))
    Epochs(location, _NODES).note_run(1, "run")
    root = Path(location.url)
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("[!.]*")
        if path.is_file()
    }
    shutil.rmtree(root)
    return files


_FILES = {db_type: _save(db_type) for db_type in DB_TYPES}
_DIGESTS = {
    db_type: {
        "a": b"",
        "b": files["b.2"][_CHECKPOINT_DIGEST] if db_type == "file" else files["b.2"][-16:],
    }
    for db_type, files in _FILES.items()
}


def _header(name: str) -> bytes:
    """The header of a file that is a checkpoint."""
    data = _FILES["file"][name]
    return data[_CHECKPOINT_AT:][: int.from_bytes(data[12:20], "little")]


def _hostile(chance: Random, example: bytes) -> bytes:
    """A value as the codec writes it that is another than it was."""
    kind = chance.random()
    if kind < 0.2:
        return nested(chance)
    if kind < 0.45:
        return mutated(chance, [example])
    return reshaped(chance, msgpack.unpackb(example, strict_map_key=False))


def _values(part: bytes) -> dict[bytes, bytes]:
    """The keys and values of a part that is an LMDB."""
    with _in_memory() as (file, path):
        os.pwrite(file, part[:-_TRAILER_BYTES], 0)
        with (
            lmdb.open(path, subdir=False, lock=False, readonly=True) as env,
            env.begin() as reading,
        ):
            return dict(reading.cursor())


def _as_lmdb(values: Mapping[bytes, bytes]) -> bytes:
    """A part with such keys and values, whose digest fits."""
    with _in_memory() as (file, path):
        with (
            lmdb.open(path, subdir=False, lock=False, sync=False, map_size=1 << 24) as env,
            env.begin(write=True) as writing,
        ):
            for key, value in values.items():
                writing.put(key, value)
        pages = os.pread(file, os.fstat(file).st_size, 0)
    return pages + b"FEEDLMDB" + xxhash.xxh3_128_digest(pages)


@contextlib.contextmanager
def _in_memory() -> Any:
    file = os.memfd_create("fuzz")
    try:
        yield file, f"/proc/self/fd/{file}"
    finally:
        os.close(file)


_VALUES = _values(_FILES["lmdb"][_PART])
_ABOUT = b"\0feeder"
_KEYS = (b"x", b"s", b"state/reader", b"\0", b"\xff", b"k" * 511)


def _make_lmdb(chance: Random) -> bytes:
    values = dict(_VALUES)
    kind = chance.random()
    if kind < 0.7:
        values[_ABOUT] = _hostile(chance, values[_ABOUT])
    if kind > 0.6:
        key = chance.choice(_KEYS)
        values[key] = mutated(chance, [values.get(key, b"")])
    if kind > 0.9:
        values.pop(chance.choice(list(values)))
    if chance.random() < 0.2:
        values[b"state/reader"] = _hostile(chance, _STATE)
    return _as_lmdb(values)


def _make_file(chance: Random, name: str) -> bytes:
    """A file of the store under a name; where that is an epoch's it says of itself what it did."""
    if name == _PART and chance.random() < 0.3:
        state = _hostile(chance, _STATE)
        return _as_file({**_ENTRIES, "state/reader": state}, {"steps": _STEPS})
    data = _FILES["file"][name][_CHECKPOINT_AT + len(_header(name)) :]
    return sealed(_hostile(chance, _header(name)), data)


def _as_file(entries: Mapping[str, Any], meta: Mapping[str, Any]) -> bytes:
    return b"".join(map(bytes, encode(entries, meta)[0]))


def make(chance: Random) -> bytes:
    """Two bytes that say which file of an epoch it is, and its bytes."""
    is_lmdb, which = chance.random() < 0.3, chance.randrange(len(_NAMES) - 1)
    name = _NAMES[which]
    example = _FILES["lmdb" if is_lmdb else "file"].get(name, _FILES["file"][_MANIFEST])
    if chance.random() < 0.15:
        content = mutated(chance, [example])
    elif is_lmdb and name == _PART:
        content = _make_lmdb(chance)
    else:
        content = _make_file(chance, name if name in _FILES["file"] else _MANIFEST)
    return bytes((is_lmdb, which)) + content


def make_part(chance: Random) -> bytes:
    """An LMDB alone."""
    return mutated(chance, [_FILES["lmdb"][_PART]]) if chance.random() < 0.1 else _make_lmdb(chance)


# ---- given in


def take_part(data: bytes) -> None:
    """Read a part that is an LMDB."""
    location = _location("lmdb", "part")
    (Path(location.url) / "a.2").write_bytes(data)
    database = open_database("lmdb", location.url, "nobody")
    database.exists("a.2")
    digest = database.digest_of("a.2")
    with contextlib.suppress(CheckpointError):
        database.get("a.2", ["x", "state/reader"])
    receipt = database.verify("a.2")
    assert (receipt.digest, receipt.num_bytes) == (digest, len(data))
    assert database.entry_names("a.2") == list(database.get("a.2").entries)


def _put(data: bytes, db_type: str, name: str) -> tuple[CheckpointLocation, Path]:
    """Put a hostile file beside sound ones."""
    location = _location(db_type)
    root = Path(location.url)
    if not root.joinpath("manifests").exists():
        for path, content in _FILES[db_type].items():
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(content)
    (root / name).write_bytes(data)
    if name == _PART:
        # The manifest means it: else nobody would read it.
        own = data[_CHECKPOINT_DIGEST] if db_type == "file" else data[-16:]
        meta = _manifest(2, {**_DIGESTS[db_type], "a": own}).meta()
        (root / _MANIFEST).write_bytes(sealed(codec.pack([[], meta])))
    return location, root


def _put_back(root: Path, db_type: str, name: str) -> None:
    for path in {name, _MANIFEST}:
        if path in _FILES[db_type]:
            (root / path).write_bytes(_FILES[db_type][path])
        else:
            (root / path).unlink()


def _load(location: CheckpointLocation) -> None:
    """What a job that goes on from an epoch reads."""
    manager = MultiNodeCheckpointManager(location.url, location.db_type)
    manager.init(_NODES)
    manager.get_resume_from_epoch_id()
    manager.exists(2)
    manager.finished_by(2)
    operation, answers = manager.load(2), {}
    for node, request in operation.requests.items():
        assert isinstance(request, LoadPart)
        loaded, answers[node] = load_part(request)
        Workspace({"reader": lambda: Reader(range(10))}).load(loaded.entries)
    operation.settle(answers)


def _load_some(location: CheckpointLocation) -> None:
    manager = MultiNodeCheckpointManager(location.url, location.db_type)
    session = SimpleNamespace(workspace={})
    if manager.load_blobs_locally(_NODES, ["a/x", "b/s"], 2, session):
        assert sorted(session.workspace) == ["a/x", "b/s"]


def _look(location: CheckpointLocation, name: str) -> None:
    """What a command and a manager ask about epochs."""
    epochs, store = Epochs(location, _NODES), CheckpointStore(location.url)
    try_all((
        epochs.newest, lambda: epochs.find(2), lambda: epochs.is_complete(2),
        lambda: epochs.before(2), lambda: epochs.is_newest(2), epochs.generations, epochs.runs,
        epochs.check_others, lambda: read_manifests(location, 2),
        lambda: [job.newest() for job in jobs_in(store)], lambda: verify_parts(store, name),
    ))  # fmt: skip


def take(data: bytes) -> None:
    """Read epochs of which one file is hostile."""
    db_type, name = DB_TYPES[data[0] % 2], _NAMES[data[1] % len(_NAMES)]
    location, root = _put(data[2:], db_type, name)
    try:
        try_all((
            lambda: _look(location, name),
            lambda: _load(location),
            lambda: _load_some(location),
        ))  # fmt: skip
    finally:
        _put_back(root, db_type, name)


def take_by_command(data: bytes) -> None:
    """`feeder checkpoint` over a folder in which one file is hostile."""
    db_type, name = DB_TYPES[data[0] % 2], _NAMES[data[1] % len(_NAMES)]
    _, root = _put(data[2:], db_type, name)
    try:
        for words in (["list"], ["verify"], ["show"]):
            run_command("checkpoint", words[0], str(root))
        run_command("checkpoint", "verify", str(root), name)
        run_command("checkpoint", "show", str(root), name)
    finally:
        _put_back(root, db_type, name)
