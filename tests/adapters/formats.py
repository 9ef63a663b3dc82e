"""Files of every format that sources read, by several writers: what their own libraries read.

An input is a file that a seed draws. It is read by its own library and by a source: in order,
shuffled by several threads, resumed, now and then in processes. Then 1 to 8 of its bytes are
changed, again and again: a source gives a named error, the same rows, or what the library gives of
the changed file; never a signal, never other rows if checksums or the library tell of the damage.
The campaign is that of hostile bytes (`fuzz.campaign`), with these formats as its ways in. Polars,
DuckDB and fastparquet write, too, if they are installed; and MosaicML's Streaming, which asks for
an older NumPy than others do, and works without: `pip install --no-deps mosaicml-streaming`.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle  # noqa: TID251  (what a fork of this process has found)
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import xxhash

import feeder
from feeder.errors import FeedError
from feeder.workers import sources
from feeder.workers.sources import RecordError
from fuzz import campaign
from fuzz.entries import Entry
from fuzz.tables import SIMPLE, Rows, a_table, octets, plain, real, rows_of, text, whole

NAMED = (FeedError, RecordError)
DAMAGED = int(os.environ.get("FORMATS_DAMAGED", "7"))
"""How many damaged ones are made of a file."""
_DONE_S = 30
_PROCESSES = 60
"""Of so many files one is read by processes, too: they take a second to start."""


class Format(NamedTuple):
    """A format, or one way to write it."""

    write: Callable[[Random, Path], Any]
    """Writes a file or a folder; returns its rows if no library is there that reads them."""
    theirs: Callable[[Path], Rows] | None
    """What the library reads."""
    ours: Callable[[Path], Any]
    """The source."""
    is_damaged: bool = True
    """Whether a source reads its bytes itself."""


# ---- rows that can be compared


_ROWS: dict[int, str] = {}
"""The rows of this process by their digests, to tell of them."""


def digest(row: Any) -> Any:
    """A row as a number."""
    text = repr(plain(row))
    number = np.int64(xxhash.xxh3_64_intdigest(text.encode()) >> 1)
    _ROWS[int(number)] = text[:300]
    return number


def parting(got: list[int], want: list[int]) -> str:
    """Where two lists of rows part."""
    for i, (one, other) in enumerate(zip(got, want, strict=False)):
        if one != other:
            return f"row {i} is {_ROWS.get(one)}, not {_ROWS.get(other)}"
    return f"{len(got)} rows, not {len(want)}"


def digests(rows: Sequence[Any]) -> list[int]:
    return [int(digest(row)) for row in rows]


def in_order(source: Any) -> list[int]:
    """The rows of a source, one after the other."""
    made = source.map(digest)
    found: list[int] = []
    for start in range(0, len(made), 5):
        order = np.arange(start, min(start + 5, len(made)))
        found += [int(one) for one in made.samples(order, feeder.Call(0, 0, 0, 5, 0))]
    return found


def by_feed(source: Any, rng: Random, **options: Any) -> tuple[list[int], str]:
    """The rows that a feed gives; and what is wrong with those that follow a resume."""
    size, resume = rng.choice([1, 3, 4]), None
    logs: list[list[int]] = []
    for _ in range(2):
        with feeder.init_data_input_workers(
            ["x"], source.map(digest), size, resume=resume, coordinator=feeder.Coordinator(),
            **options,
        ) as made:  # fmt: skip
            batches = [(batch.cut, batch["x"].tolist()) for batch in made["train"]]
        logs.append([one for _, rows in batches for one in rows])
        if resume is None:
            at = rng.randrange(len(batches))
            resume = batches[at][0]
    rest = logs[0][size * (at + 1) :]
    return logs[0], "" if logs[1] == rest else f"resumed after batch {at}: {logs[1]}, not {rest}"


# ---- the check of one file


def check(form: Format, seed: int) -> None:
    """Raise AssertionError where a source differs from the library."""
    rng = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole" / "x"
        path.parent.mkdir()
        rows = form.write(rng, path)
        try:
            want = digests(rows if rows is not None else form.theirs(path))  # type: ignore[misc]
        except pa.ArrowInvalid:
            return  # It cannot read what it has written, as of lists in pages of a byte.
        check_whole(form, path, want, rng)
        for number in range(DAMAGED if want and form.is_damaged else 0):
            there = Path(folder) / str(number)
            told = damage(path.parent, there, rng)
            with limited():
                check_damaged(form, there / "x", want, told)
            shutil.rmtree(there)


def check_whole(form: Format, path: Path, want: list[int], rng: Random) -> None:
    try:
        source = form.ours(path)
    except FeedError as error:
        assert not want and "no" in str(error), f"refused: {error}"
        return
    got = in_order(source)
    assert got == want, f"in order: {parting(got, want)}"
    made, wrong = by_feed(source, rng, num_threads=rng.choice([1, 2]))
    assert made == want and not wrong, f"other rows by a feed: {wrong}"
    shuffled = source.shuffle(seed=rng.randrange(9), window=rng.choice([None, 2, 5]))
    made, wrong = by_feed(shuffled, rng, num_threads=3)
    assert sorted(made) == sorted(want) and not wrong, f"other rows shuffled: {wrong}"
    if not rng.randrange(_PROCESSES):
        again, wrong = by_feed(shuffled, rng, executor=feeder.Processes(2))
        assert sorted(again) == sorted(want) and not wrong, f"other rows in processes: {wrong}"


def damage(whole: Path, there: Path, rng: Random) -> str:
    """Make a copy with bytes changed; returns which."""
    shutil.copytree(whole, there, ignore=shutil.ignore_patterns(".*"))
    files = [file for file in sorted(there.rglob("*")) if file.is_file() and file.stat().st_size]
    file = rng.choices(files, [min(one.stat().st_size, 4096) for one in files])[0]
    data = bytearray(file.read_bytes())
    num, at = rng.randint(1, 8), rng.randrange(len(data))
    places = range(at, min(at + num, len(data)))
    if rng.random() < 0.5:
        places = rng.sample(range(len(data)), min(num, len(data)))  # type: ignore[assignment]
    for place in places:
        data[place] = rng.choice([rng.randrange(256), data[place] ^ 1 << rng.randrange(8), 0, 255])
    file.write_bytes(data)
    return f"{file.relative_to(there)}: {[(place, data[place]) for place in places]}"


def check_damaged(form: Format, path: Path, want: list[int], told: str) -> None:
    try:
        got = in_order(form.ours(path))
    except NAMED as error:
        assert str(error).strip(), f"an error without a word: {error!r} ({told})"
        return
    except Exception as error:
        # Of values that nobody can read, as a letter of NumPy's that is none.
        outcome = apart(lambda: digests(form.theirs(path)))  # type: ignore[misc]
        assert outcome == f"{type(error).__name__}: {error}", told
        return
    if got == want:
        return
    assert form.theirs is not None, f"other rows of a damaged file ({told})"
    outcome = apart(lambda: digests(form.theirs(path)))  # type: ignore[misc]
    if str(outcome).startswith("OverflowError"):
        return  # Times that Python has no objects for, and NumPy has.
    assert outcome == got, (
        f"other rows of a damaged file ({told}): {parting(got, want)}; its library has "
        f"{outcome if isinstance(outcome, str) else parting(outcome, got)!r}"
    )


@contextmanager
def limited() -> Any:
    """End what hangs."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_DONE_S)
    yield
    signal.alarm(0)


def apart(read: Callable[[], Any]) -> Any:
    """What it returns in a fork of this process, which a library may end; or how it failed."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        # Nothing of this process's own may be run at its end.
        with suppress(BaseException):
            try:
                found: Any = read()
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            with open(writing, "wb") as file:
                file.write(pickle.dumps(found))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(data) if data else f"ended with status {status}"


# ---- tables


def retried(rng: Random, write: Callable[[Any], object], **options: Any) -> None:
    """Write a table that the writer has types for."""
    for _ in range(50):
        try:
            return void(write(a_table(rng, **options)))
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, NotImplementedError):
            continue
    raise AssertionError("no table could be written")


def void(_: object) -> None: ...


def write_parquet(rng: Random, path: Path) -> None:
    options = {
        "compression": rng.choice(["none", "snappy", "gzip", "brotli", "lz4", "zstd"]),
        "version": rng.choice(["1.0", "2.4", "2.6"]),
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "use_dictionary": rng.random() < 0.5,
        "row_group_size": rng.choice([1, 2, 5, 100]),
        "data_page_size": rng.choice([1, 1 << 20]),
        "write_page_checksum": True,
    }
    retried(rng, lambda table: pq.write_table(table, path, **options))


def read_parquet(path: Path) -> Rows:
    rows = []
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for i in range(file.num_row_groups):
            table = file.read_row_group(i, use_threads=False)
            table.validate(full=True)
            rows += rows_of(table)
        if len(rows) != file.metadata.num_rows:
            raise pa.ArrowInvalid("another number of rows than it lists")
    return rows


def write_by_others(rng: Random, path: Path) -> None:
    """Parquet of pandas, datasets, and what else is there."""
    writers = ["pandas", "datasets", *filter(find_spec, ("polars", "duckdb", "fastparquet"))]
    name = rng.choice(writers)
    table = a_table(rng, SIMPLE, 0)
    match name:
        case "datasets":
            import datasets

            datasets.Dataset(table).to_parquet(path)
        case "polars":
            import polars  # type: ignore[import-not-found]

            polars.from_arrow(table).write_parquet(path)
        case "duckdb":
            import duckdb  # type: ignore[import-not-found]

            copy = f"COPY (SELECT * FROM given) TO '{path}' (FORMAT parquet)"
            duckdb.connect().register("given", table).execute(copy)
        case _:
            engine = "fastparquet" if name == "fastparquet" else "pyarrow"
            frame = table.to_pandas()
            if rng.random() < 0.3:
                frame.index = [f"row {i}" for i in range(len(frame))]
            frame.to_parquet(path, engine=engine)


def write_arrow(rng: Random, path: Path) -> None:
    kind = rng.choice(["file", "stream", "feather"])
    options = pa.ipc.IpcWriteOptions(compression=rng.choice([None, "lz4", "zstd"]))

    def write(table: Any) -> None:
        if kind == "feather":
            pyarrow.feather.write_feather(table, str(path), chunksize=rng.choice([1, 3, 100]))
            return
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=rng.choice([1, 3, 100]))

    retried(rng, write)


def read_arrow(path: Path) -> Rows:
    data = path.read_bytes()
    opened = pa.ipc.open_file if data[:6] == b"ARROW1" else pa.ipc.open_stream
    table = opened(pa.py_buffer(data)).read_all()
    table.validate(full=True)
    return rows_of(table)


def write_hf(rng: Random, path: Path) -> None:
    import datasets

    table = a_table(rng, [*SIMPLE, pa.list_(pa.int32()), pa.struct([("a", pa.int16())])], 0)
    made = datasets.Dataset(pa.table({name: table[name] for name in table.column_names}))
    datasets.disable_progress_bars()
    made.save_to_disk(path, num_shards=rng.choice([1, min(2, len(made))]))


def read_hf(path: Path) -> Rows:
    import datasets

    made = datasets.load_from_disk(path)
    return rows_of(pa.Table.from_pylist(list(made), made.features.arrow_schema))


# ---- files of records


def packed(rng: Random, path: Path, kinds: Sequence[str] = ("gzip", "zstd", "lz4")) -> None:
    """Compress a file, now and then."""
    if rng.random() < 0.7:
        return
    kind = rng.choice(kinds)
    data = path.read_bytes()
    if kind == "gzip":
        path.write_bytes(gzip.compress(data, mtime=0))
        return
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(data)
    path.write_bytes(sink.getvalue().to_pybytes())


def content(path: Path) -> bytes:
    """What a file holds, decompressed by its library."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    for kind, magic in (("zstd", b"\x28\xb5\x2f\xfd"), ("lz4", b"\x04\x22\x4d\x18")):
        if data[:4] == magic:
            return bytes(pa.CompressedInputStream(pa.BufferReader(data), kind).read())
    return data


KEYS = ["txt", "seg.txt", "cls"]


def write_tar(rng: Random, path: Path) -> None:
    path = path.with_suffix("")
    samples = [
        (rng.choice(["", "a/", "./b/c/", "é" * 60 + "/"]) + f"{'k' * rng.choice([1, 90])}{i}",
         [octets(rng) * rng.choice([1, 40]) for _ in KEYS])
        for i in range(rng.randint(1, 8))
    ]  # fmt: skip
    writer = rng.choice(["tarfile", "GNU tar", "webdataset"])
    if writer == "webdataset":
        import webdataset

        with webdataset.TarWriter(str(path), compress=False) as tar:
            for key, values in samples:
                tar.write({"__key__": key, **dict(zip(KEYS, values, strict=True))})
    elif writer == "tarfile":
        form = rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
        with tarfile.open(path, "w", format=form) as tar:
            for key, values in samples:
                for name, data in zip(KEYS, values, strict=True):
                    info = tarfile.TarInfo(f"{key}.{name}")
                    info.size = len(data)
                    tar.addfile(info, BytesIO(data))
    else:
        with tempfile.TemporaryDirectory() as folder:
            names = []
            for key, values in samples:
                for name, data in zip(KEYS, values, strict=True):
                    file = Path(folder, f"{key}.{name}")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(bytes(4096 * rng.randrange(3)) + data)
                    names.append(f"{key}.{name}")
            form = rng.choice(["gnu", "pax", "gnu --sparse", "pax --sparse"]).split()
            command = ["tar", f"--format={form[0]}", *form[1:], "-C", folder, "-cf", path, "--"]
            subprocess.run([*command, *names], check=True, capture_output=True)
    packed(rng, path)


def read_tar(path: Path) -> Rows:
    import webdataset

    data = content(path)
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(data)
        file.flush()
        made = webdataset.WebDataset(file.name, shardshuffle=False, empty_check=False)
        return [{key: one[key] for key in ("__key__", *KEYS)} for one in made]


def tar_source(path: Path) -> Any:
    return sources.webdataset(path, ["__key__", *KEYS], decoders=dict.fromkeys(KEYS, bytes))


def write_tfrecord(rng: Random, path: Path) -> None:
    import tensorflow as tf

    kinds = {
        "int64_list": lambda: [whole(pa.int64())(rng) for _ in range(rng.randrange(4))],
        "float_list": lambda: [real(4)(rng) for _ in range(rng.randrange(4))],
        "bytes_list": lambda: [octets(rng) for _ in range(rng.randrange(4))],
    }
    compression = rng.choice(["", "", "GZIP"])
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression)) as writer:
        for _ in range(rng.randint(1, 8)):
            features = tf.train.Features()
            for name, kind in zip("abc", rng.choices([*kinds], k=3), strict=True):
                getattr(features.feature[name], kind).value.extend(kinds[kind]())
            writer.write(tf.train.Example(features=features).SerializeToString())


def read_tfrecord(path: Path) -> Rows:
    import tensorflow as tf

    options = tf.io.TFRecordOptions("GZIP" if path.read_bytes()[:2] == b"\x1f\x8b" else "")
    rows = []
    for record in tf.compat.v1.io.tf_record_iterator(str(path), options):
        row: dict[str, Any] = {}
        for name, feature in tf.train.Example.FromString(record).features.feature.items():
            kind = feature.WhichOneof("kind")
            values = [*getattr(feature, kind).value]
            is_one = kind == "bytes_list" and len(values) == 1
            row[name] = values[0] if is_one else np.float32(values) if kind[0] == "f" else values
        rows.append(row)
    return rows


def write_jsonl(rng: Random, path: Path) -> None:
    def value(depth: int) -> Any:
        inner = [lambda: [value(depth - 1) for _ in range(rng.randrange(3))],
                 lambda: {text(rng): value(depth - 1) for _ in range(2)}]  # fmt: skip
        leaves = [lambda: text(rng), lambda: rng.randint(-(10**20), 10**20), lambda: None,
                  lambda: rng.gauss(0, 1), lambda: True]  # fmt: skip
        return rng.choice(leaves + inner * bool(depth))()

    lines = [
        json.dumps({"x": value(2)}, ensure_ascii=rng.random() < 0.5)
        for _ in range(rng.randint(1, 9))
    ]
    end = rng.choice(["\n", "\r\n", "\n\n", "\n \n"])
    path.write_text(end.join(lines) + end * rng.randrange(2), newline="")
    packed(rng, path)


def read_jsonl(path: Path) -> Rows:
    lines = content(path).split(b"\n")
    return [json.loads(line) for line in lines if line.strip(b" \t\r\n")]


def write_by_streaming(rng: Random, path: Path) -> Rows:
    """By MosaicML's writer, whose library reads it, too."""
    from streaming import LocalDataset, MDSWriter  # type: ignore[import-not-found]

    kinds: dict[str, Callable[[], Any]] = {
        "int": lambda: whole(pa.int64())(rng), "str": lambda: text(rng),
        "bytes": lambda: octets(rng), "uint8": lambda: np.uint8(rng.randrange(256)),
        "float32": lambda: np.float32(rng.gauss(0, 9)), "float64": lambda: np.float64(rng.random()),
        "str_int": lambda: rng.randint(-(10**30), 10**30),
        "json": lambda: {"a": [text(rng), 1, None]},
        "ndarray": lambda: np.full(rng.choices([1, 2, 3], k=2), rng.randrange(9), "i4"),
        "ndarray:int16:2,3": lambda: np.full((2, 3), rng.randrange(9), "i2"),
    }  # fmt: skip
    columns = dict(zip("abc", rng.sample([*kinds], 3), strict=True))
    rows: Rows = [
        {n: kinds[kind]() for n, kind in columns.items()} for _ in range(rng.randint(1, 9))
    ]
    packed = rng.choice([None, None, "zstd", "gz", "bz2"])
    with MDSWriter(
        out=str(path), columns=columns, compression=packed, size_limit=rng.choice([600, 2**20]),
        hashes=["sha1", "xxh64"],
    ) as writer:  # fmt: skip
        for row in rows:
            writer.write(row)
    if packed is None:
        made = LocalDataset(str(path))
        assert digests([made[i] for i in range(len(made))]) == digests(rows)
    return rows


def write_mds(rng: Random, path: Path) -> Rows:
    """As MosaicML's writer does, whose library need not be here."""
    path.mkdir()
    rows: Rows = [
        {"n": rng.randint(-(2**63), 2**63 - 1), "t": text(rng), "u": np.uint16(rng.randrange(9)),
         "b": octets(rng)} for _ in range(rng.randint(1, 9))
    ]  # fmt: skip
    names, kinds = ["b", "n", "t", "u"], ["bytes", "int", "str", "uint16"]
    entries, at, is_packed = [], 0, rng.random() < 0.4
    while at < len(rows):
        part = rows[at : at + rng.choice([1, 3, 9])]
        samples = []
        for row in part:
            values = [row["b"], row["n"].to_bytes(8, "little", signed=True), row["t"].encode(),
                      row["u"].tobytes()]  # fmt: skip
            samples.append(struct.pack("<2I", len(values[0]), len(values[2])) + b"".join(values))
        config = {"format": "mds", "version": 2, "column_names": names, "column_encodings": kinds,
                  "column_sizes": [None, 8, None, 2]}  # fmt: skip
        head = json.dumps(config).encode()
        start = 4 + 4 * (len(part) + 1) + len(head)
        ends = np.cumsum([start, *map(len, samples)]).astype("<u4").tobytes()
        data = struct.pack("<I", len(part)) + ends + head + b"".join(samples)
        name = f"shard.{len(entries):05}.mds"
        hashes = {"xxh64": xxhash.xxh64_hexdigest(data)}
        entry = {**config, "samples": len(part), "compression": None, "zip_data": None,
                 "raw_data": {"basename": name, "bytes": len(data), "hashes": hashes}}  # fmt: skip
        if is_packed:
            data = gzip.compress(data, mtime=0)
            told = {"xxh64": xxhash.xxh64_hexdigest(data)}
            name += ".gz"
            entry["zip_data"] = {"basename": name, "bytes": len(data), "hashes": told}
        (path / name).write_bytes(data)
        entries.append(entry)
        at += len(part)
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return rows


# ---- images, arrays, LMDBs


def write_images(rng: Random, path: Path) -> None:
    from PIL import Image

    for i in range(rng.randint(1, 4)):
        folder = path / rng.choice(["cat", "dog/deep", "é"])
        folder.mkdir(parents=True, exist_ok=True)
        mode = rng.choice(["RGB", "L", "P", "RGBA", "1"])
        pixels = np.random.default_rng(rng.randrange(99)).integers(0, 256, (9, 7, 3), np.uint8)
        ending = rng.choice(["png", "bmp", "PNG"] + ["jpg", "JPEG"] * (mode in ("RGB", "L")))
        if ending == "bmp" and mode == "RGBA":
            mode = "RGB"
        Image.fromarray(pixels).convert(mode).save(folder / f"{i}.{ending}")


def read_images(path: Path) -> Rows:
    from PIL import Image

    rows = []
    classes = sorted((one.name for one in path.iterdir()), key=os.fsencode)
    for folder, folders, names in os.walk(path):
        folders.sort(key=os.fsencode)
        label = classes.index(Path(folder).relative_to(path).parts[0]) if folder != str(path) else 0
        for name in sorted(names, key=os.fsencode):
            with Image.open(Path(folder, name)) as image:
                rows.append({"image": np.asarray(image.convert("RGB")), "label": label})
    return [(row["image"], row["label"]) for row in rows]


def write_npy(rng: Random, path: Path) -> None:
    dtype = rng.choice(["u1", "<i8", ">f4", "f2", "?", "S3", "<U2", "c8", "M8[s]"])
    shape = (rng.randint(1, 9), *rng.choices([0, 1, 3], k=rng.randrange(3)))
    data = np.frombuffer(rng.randbytes(8 * 9 * 9), "u1") & 1
    array = np.resize(data, shape).astype("u1").astype(np.dtype(dtype))
    array = np.asfortranarray(array) if rng.random() < 0.3 else array
    with open(path.with_suffix(".npy"), "wb") as file:
        np.save(file, array)


def read_npy(path: Path) -> Rows:
    return list(np.load(path.with_suffix(".npy"), mmap_mode="r"))


def write_tokens(rng: Random, path: Path) -> None:
    tokens = np.array([rng.randrange(60000) for _ in range(rng.randint(4, 30))], np.uint16)
    with open(path, "wb") as file:
        if rng.random() < 0.5:
            np.save(file, tokens)
        else:
            head = np.zeros(256, np.int32)
            head[:3] = 20240520, 1, len(tokens)
            file.write(head.tobytes() + tokens.tobytes())


def read_tokens(path: Path) -> Rows:
    data = path.read_bytes()
    if data[:6] == b"\x93NUMPY":
        tokens = np.load(BytesIO(data))
    else:
        magic, version, num = np.frombuffer(data, "<i4", 3).tolist()
        if (magic, version, 1024 + 2 * num) != (20240520, 1, len(data)):
            tokens = np.frombuffer(data, "<u2")
        else:
            tokens = np.frombuffer(data, "<u2", offset=1024)
    assert tokens.dtype == np.uint16 and tokens.ndim == 1
    return list(tokens[: len(tokens) // 4 * 4].reshape(-1, 4))


def write_lmdb(rng: Random, path: Path) -> None:
    from protos import Datum
    from stores import write_lmdb as write

    write(path, (
        Datum(channels=1, height=2, width=3, data=rng.randbytes(6), label=rng.randrange(-9, 9),
              encoded=False).SerializeToString() for _ in range(rng.randint(1, 9))
    ))  # fmt: skip
    (path / "lock.mdb").unlink()


def read_lmdb(path: Path) -> Rows:
    import lmdb

    from protos import Datum

    with lmdb.open(str(path), readonly=True, lock=False) as made, made.begin() as transaction:
        rows = [Datum.FromString(bytes(value)) for _, value in transaction.cursor()]
    return [
        (np.frombuffer(row.data, "u1").reshape(row.height, row.width, row.channels), row.label)
        for row in rows
    ]


FORMATS = {
    "parquet": Format(write_parquet, read_parquet, lambda p: sources.parquet(p, verify=True)),
    "parquet of others": Format(write_by_others, read_parquet, sources.parquet),
    "arrow": Format(write_arrow, read_arrow, sources.arrow),
    "tar": Format(write_tar, read_tar, tar_source),
    "tfrecord": Format(write_tfrecord, read_tfrecord, lambda p: sources.tfrecord(p, verify=True)),
    "jsonl": Format(write_jsonl, read_jsonl, sources.jsonl),
    "mds": Format(write_mds, None, lambda p: sources.mds(p, verify=True)),
    "images": Format(write_images, read_images,
                     lambda p: sources.image_folder(p, decoder="pillow")),
    "npy": Format(write_npy, read_npy, lambda p: sources.arrays(p.with_suffix(".npy"))),
    "tokens": Format(write_tokens, read_tokens, lambda p: sources.tokens(p, 4, "uint16")),
    "lmdb": Format(write_lmdb, read_lmdb, lambda p: sources.caffe_lmdb(p, verify=True)),
    "hf": Format(write_hf, read_hf, lambda p: sources.hf(load_hf(p)), is_damaged=False),
}  # fmt: skip
if find_spec("streaming"):
    FORMATS["mds of streaming"] = FORMATS["mds"]._replace(write=write_by_streaming)


def load_hf(path: Path) -> Any:
    import datasets

    return datasets.load_from_disk(path)


def entry(name: str) -> Entry:
    """A format as a way in: an input is the seed of a file."""
    return Entry(
        lambda chance: chance.randbytes(6),
        lambda data: check(FORMATS[name], int.from_bytes(data, "little")),
        (),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    warnings.simplefilter("ignore")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # Before children are forked: each would import them.
    import datasets  # noqa: F401
    import tensorflow  # noqa: F401
    import webdataset  # noqa: F401

    campaign.ENTRIES.clear()
    campaign.ENTRIES.update({name: entry(name) for name in FORMATS})
    campaign.IN_A_CHILD.update(dict.fromkeys(FORMATS, 25))
    campaign.MEMORY_BYTES = 64 * 2**30  # TensorFlow's addresses count
    status = campaign.main(argv, "formats")
    print(f"of each file {DAMAGED} damaged ones")
    if "mds of streaming" not in FORMATS:
        print("not installed, so left out: streaming (mosaicml-streaming)")
    return status


if __name__ == "__main__":
    # Under its own name: processes import what they call by it.
    from adapters import formats

    sys.exit(formats.main())
