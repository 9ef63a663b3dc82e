"""Sources put together: how soon they resume far out, how well and how fast they pack, and Parquet
and tar shards against their own readers."""

from __future__ import annotations

import importlib.util
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from itertools import cycle
from typing import Any

import numpy as np

import feeder
from contenders import FEED, Contender, Take, timed
from feeder import sources
from fetches import Array
from folders import make_folder
from harness import Measures, Settings, Spread, interleave, time_of
from jpegs import photographs
from report import Goal, Report, spread

ASKED_MS = 10
ASKED_LOST = 0.03
HUGE = 10**12
SEQ_LEN, WINDOW = 2048, 1024
NUM_DOCUMENTS = 32 * WINDOW
PARQUET_ROWS, GROUP_ROWS, ROW_BYTES = 65_536, 4096, 1024
BATCH_SIZE = 256
IMAGES = 16
PACKED = ("tokens", "segment_ids", "positions", "loss_mask")


# ---- resume


def short_document(info: sources.SampleInfo) -> Array:
    """A document of 1 to 64 tokens."""
    return np.full(info.idx_in_epoch % 64 + 1, info.idx_in_epoch % 50_000, np.int32)


def number(info: sources.SampleInfo) -> int:
    """The record's own number."""
    record: int = info.idx_in_epoch
    return record


def with_noise(record: Any, rng: np.random.Generator) -> tuple[Any, float]:
    """A record and a draw."""
    return record, rng.random()


def packed_mixture() -> sources.Source:
    """Three sources without end, mixed and packed."""
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    parts = {
        name: (sources.samples(short_document, HUGE, random_shuffle=True), weight)
        for name, weight in weights.items()
    }
    return sources.pack(sources.mix(parts), SEQ_LEN, WINDOW)


def mapped() -> sources.Source:
    """Numbers shuffled within windows, each with a draw."""
    return sources.samples(number, 2 * HUGE).shuffle(window=GROUP_ROWS).map(with_noise)


@cache
def _table() -> str:
    """A Parquet file of a million numbers and more."""
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    path = str(make_folder() / "numbers.parquet")
    pq.write_table(pa.table({"x": np.arange(2**20)}), path, row_group_size=GROUP_ROWS)
    return path


def number_with_noise(record: Any, rng: np.random.Generator) -> tuple[Any, float]:
    """A row of the table and a draw."""
    return record["x"], rng.random()


def mapped_table() -> sources.Source:
    """Rows of a file shuffled within windows of a row group, each with a draw."""
    return sources.parquet(_table()).shuffle(window=GROUP_ROWS).map(number_with_noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Far:
    """A source, and the records that it is resumed at."""

    name: str
    make: Callable[[], sources.Source]
    columns: tuple[str, ...]
    records_of_call: int
    records: tuple[int, ...] = (0, 10**3, 10**6, 10**12)
    """Where it is resumed."""


FAR: tuple[Far, ...] = (
    Far(name="mix of 3, packed", make=packed_mixture, columns=PACKED, records_of_call=WINDOW),
    Far(name="shuffle, map", make=mapped, columns=("x", "u"), records_of_call=BATCH_SIZE),
)
if importlib.util.find_spec("pyarrow"):
    FAR += (
        Far(name="parquet, shuffle, map", make=mapped_table, columns=("x", "u"),
            records_of_call=BATCH_SIZE, records=(0, 10**3, 10**6)),
    )  # fmt: skip


def _coordinator(far: Far, token: bytes | None) -> feeder.Coordinator:
    return feeder.init_data_input_workers(
        far.columns, far.make(), BATCH_SIZE, 2, FEED, epochs=None, resume=token,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip


def _token(far: Far, index: int) -> bytes | None:
    """The token of a feed whose next call is this one."""
    if not index:
        return None
    (stream,) = _coordinator(far, None)[FEED].streams
    cut = stream.pipeline.start_cut
    position = cut.position._replace(epoch=0, calls=(index,))
    token: bytes = stream.positions.id.encode(
        replace(cut, index=index, step=index, position=position)
    )
    return token


def _started(far: Far, records: int) -> Callable[[], Measures]:
    index = -(-records // far.records_of_call)
    token = _token(far, index)
    first = far.make()(feeder.Call(index, 0, 0, BATCH_SIZE, 0))
    wanted = first[0] if isinstance(first, tuple) else next(iter(first.values()))

    def measure() -> Measures:
        coordinators, found = [], []

        def start() -> None:
            coordinators.append(_coordinator(far, token))
            coordinators[0].start()
            found.append(next(coordinators[0][FEED])[far.columns[0]])

        elapsed = time_of(start)
        coordinators[0].stop()
        rows = min(len(wanted), BATCH_SIZE)
        if not np.array_equal(found[0][:rows], wanted[:rows]):
            raise RuntimeError(f"{far.name}: the first batch is not the one that was to come")
        return {f"{far.name}: {records:.0e}": elapsed * 1e3}

    return measure


def resuming(settings: Settings) -> Report:
    """From making the feed to its first batch, which is compared."""
    starts = [_started(far, records) for far in FAR for records in far.records]
    times = interleave(starts, settings.repetitions * settings.tries)
    return Report(
        case="steps-resume",
        title="from the call of init to the first batch, in ms",
        head=("start", "ms"),
        rows=tuple((name, spread(time)) for name, time in times.items()),
        measures=times,
        goals=tuple(
            Goal(
                what=f"resume: {far.name} at record {records:.0e}, beyond a fresh start",
                asked=ASKED_MS, unit="ms", at_most=True,
                measured=times[f"{far.name}: {records:.0e}"].minus(times[f"{far.name}: {0:.0e}"]),
            )
            for far in FAR
            for records in far.records[1:]
        ),
        notes=("every first batch was the right one",),
    )  # fmt: skip


# ---- packing


@cache
def _documents() -> list[Array]:
    """Documents of log-normal length, as those of the web are, of 665 tokens on average."""
    lengths = np.exp(np.random.default_rng(0).normal(6, 1, NUM_DOCUMENTS)).astype(int) + 1
    tokens = np.random.default_rng(1).integers(1, 50_000, int(lengths.max()), np.int32)
    return [tokens[:length] for length in lengths]


def _feeder_packing() -> Contender:
    @contextmanager
    def running() -> Iterator[Take]:
        source = sources.pack(sources.records(_documents()), SEQ_LEN, WINDOW)
        coordinator = feeder.init_data_input_workers(
            PACKED, source, 64, 2, FEED, epochs=None, coordinator=feeder.Coordinator()
        )
        with coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)["tokens"]

    return running


def _grain_packing() -> Contender:
    """Grain's first fit into 64 open rows, whose documents were cut to rows before."""
    grain = importlib.import_module("grain")
    packing = importlib.import_module("grain.experimental")
    pieces = [d[i : i + SEQ_LEN] for d in _documents() for i in range(0, len(d), SEQ_LEN)]

    @contextmanager
    def running() -> Iterator[Take]:
        of = grain.MapDataset.source(pieces).repeat().map(lambda d: {"tokens": d})
        packed = packing.FirstFitPackIterDataset(
            of.to_iter_dataset(grain.ReadOptions(num_threads=0)),
            length_struct={"tokens": SEQ_LEN}, num_packing_bins=64,
        ).batch(64)  # fmt: skip
        iterator = iter(packed)
        yield lambda: next(iterator)["tokens"]

    return running


def _first_fit(pieces: list[int], seq_len: int) -> float:
    """The share of tokens in rows that first fit makes of all pieces together."""
    # The first row with room is found in a tree of the most room below each node.
    size = 1 << (len(pieces) - 1).bit_length()
    room = [seq_len] * (2 * size)
    used = 0
    for length in pieces:
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        used = max(used, node - size + 1)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return sum(pieces) / (used * seq_len)


def packing(settings: Settings) -> Report:
    """What packing loses to padding, and how fast it is."""
    lengths = [len(document) for document in _documents()]
    pieces = [min(SEQ_LEN, n - at) for n in lengths for at in range(0, n, SEQ_LEN)]
    lost = {
        f"best fit, window {window:,}": 1 - sources.packing_efficiency(lengths, SEQ_LEN, window)
        for window in (64, 256, WINDOW, 4096)
    } | {"first fit over all": 1 - _first_fit(pieces, SEQ_LEN)}
    contenders = {"feeder": _feeder_packing()}
    if importlib.util.find_spec("grain"):
        contenders["grain"] = _grain_packing()
    rates = interleave(
        [timed(name, contender, settings) for name, contender in contenders.items()],
        settings.repetitions,
    )
    goals = [
        Goal(
            what="packing: lost to padding at a window of 1,024", asked=ASKED_LOST, at_most=True,
            measured=Spread(samples=(lost[f"best fit, window {WINDOW:,}"],)),
        )
    ]  # fmt: skip
    if "grain" in rates:
        goals.append(
            Goal(what="packing: against Grain", asked=2, unit="×",
                 measured=rates["feeder"].per(rates["grain"]))
        )  # fmt: skip
    return Report(
        case="packing",
        title=f"{NUM_DOCUMENTS:,} documents of log-normal length into rows of {SEQ_LEN:,}",
        head=("packing", "lost", "million tokens/s"),
        rows=(
            *((name, f"{share:.2%}", "") for name, share in lost.items()),
            *(
                (name, "", spread(rate.times(64 * SEQ_LEN / 1e6)))
                for name, rate in rates.items()
            ),
        ),
        measures=rates,
        goals=tuple(goals),
        notes=("places of rows, padding included",) if "grain" in rates else (
            "places of rows, padding included; Grain is not installed",
        ),
    )  # fmt: skip


# ---- Parquet


@cache
def _parquet_file() -> str:
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    values = np.random.default_rng(0).random(PARQUET_ROWS * ROW_BYTES // 4, np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values), ROW_BYTES // 4)
    path = str(make_folder() / "rows.parquet")
    table = pa.table({"n": np.arange(PARQUET_ROWS), "v": column})
    pq.write_table(table, path, row_group_size=GROUP_ROWS)
    return path


def _feeder_parquet(shuffled: bool) -> Contender:
    @contextmanager
    def running() -> Iterator[Take]:
        source = sources.parquet(_parquet_file())
        source = source.shuffle(window=GROUP_ROWS) if shuffled else source
        coordinator = feeder.init_data_input_workers(
            ("n", "v"), source, BATCH_SIZE, 2, FEED, epochs=None, coordinator=feeder.Coordinator()
        )
        with coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)["v"]

    return running


def _scan() -> Contender:
    """pyarrow's own scan, as arrays of NumPy."""
    pq = importlib.import_module("pyarrow.parquet")

    def batches() -> Iterator[Array]:
        for _ in cycle((0,)):
            for batch in pq.ParquetFile(_parquet_file()).iter_batches(BATCH_SIZE):
                flat = batch.column(1).flatten().to_numpy()
                batch.column(0).to_numpy().copy()
                yield flat.reshape(len(batch), -1).copy()

    made = batches()
    return lambda: nullcontext(lambda: next(made))


def _hugging_face() -> Contender:
    """A shuffled map-style dataset, batch by batch, as arrays of NumPy."""
    datasets = importlib.import_module("datasets")
    folder = str(make_folder() / "hf")
    dataset = datasets.Dataset.from_parquet(_parquet_file(), cache_dir=folder)
    dataset = dataset.shuffle(seed=0).with_format("numpy")
    starts = cycle(range(0, PARQUET_ROWS, BATCH_SIZE))

    def take() -> Array:
        start = next(starts)
        rows: Array = dataset[start : start + BATCH_SIZE]["v"]
        return rows

    return lambda: nullcontext(take)


def parquet(settings: Settings) -> Report:
    """Rows of 1 KiB, in order and shuffled within windows of a row group."""
    if not importlib.util.find_spec("pyarrow"):
        raise SystemExit("the case parquet needs pyarrow: pip install 'feedworks[arrow]'")
    contenders = {
        "pyarrow, in order": _scan(),
        "feeder, in order": _feeder_parquet(False),
        "feeder, shuffled": _feeder_parquet(True),
    }
    if importlib.util.find_spec("datasets"):
        contenders["datasets, shuffled"] = _hugging_face()
    rates = interleave(
        [timed(name, contender, settings) for name, contender in contenders.items()],
        settings.repetitions,
    )
    asked = [("feeder, in order", "pyarrow, in order", 0.6), ("feeder, shuffled",
             "datasets, shuffled", 2)]  # fmt: skip
    return Report(
        case="parquet",
        title=f"batches of {BATCH_SIZE} rows of {ROW_BYTES} bytes, row groups of {GROUP_ROWS:,}",
        head=("contender", "batches/s"),
        rows=tuple((name, spread(rate)) for name, rate in rates.items()),
        measures=rates,
        goals=tuple(
            Goal(what=f"parquet: {ours} against {theirs}", asked=least, unit="×",
                 measured=rates[ours].per(rates[theirs]))
            for ours, theirs, least in asked
            if theirs in rates
        ),
    )  # fmt: skip


# ---- tar shards


@cache
def _shards() -> list[str]:
    """Two shards of the photographs of `jpegs`, 512 samples in each."""
    files = sorted(photographs().glob("class/*.jpg"))
    paths = [str(make_folder() / f"{number}.tar") for number in range(2)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for i in range(512):
                tar.add(files[i % len(files)], f"{number}{i:04}.jpg")
                label = tarfile.TarInfo(f"{number}{i:04}.cls")
                label.size = 1
                tar.addfile(label, BytesIO(b"%d" % (i % 10)))
    return paths


def _feeder_shards() -> Contender:
    @contextmanager
    def running() -> Iterator[Take]:
        coordinator = feeder.init_data_input_workers(
            ("jpg", "cls"), sources.webdataset(_shards(), random_shuffle=True), IMAGES, 2, FEED, 8,
            epochs=None, coordinator=feeder.Coordinator(),
        )  # fmt: skip
        with coordinator:
            feed = coordinator[FEED]
            yield lambda: next(feed)["jpg"]

    return running


def _webdataset() -> Contender:
    """The library's own pipeline, shuffled, in a DataLoader with two workers."""
    library, data = (
        importlib.import_module("webdataset"),
        importlib.import_module("torch.utils.data"),
    )

    @contextmanager
    def running() -> Iterator[Take]:
        pipeline = (
            library.WebDataset(_shards(), resampled=True)
            .shuffle(256).decode("rgb8").to_tuple("jpg", "cls").batched(IMAGES)
        )  # fmt: skip
        iterator = iter(data.DataLoader(pipeline, batch_size=None, num_workers=2))
        yield lambda: np.asarray(next(iterator)[0])

    return running


def webdataset(settings: Settings) -> Report:
    """JPEGs out of tar shards, decoded."""
    contenders = {"feeder": _feeder_shards()}
    if all(map(importlib.util.find_spec, ("webdataset", "torch"))):
        contenders["webdataset"] = _webdataset()
    rates = interleave(
        [timed(name, contender, settings) for name, contender in contenders.items()],
        settings.repetitions,
    )
    return Report(
        case="webdataset",
        title=f"batches of {IMAGES} JPEGs of 480 × 480 pixels out of tar shards",
        head=("contender", "batches/s"),
        rows=tuple((name, spread(rate)) for name, rate in rates.items()),
        measures=rates,
        goals=tuple(
            Goal(what="webdataset: against webdataset and DataLoader, 2 workers", asked=1.5,
                 unit="×", measured=rates["feeder"].per(rate))
            for name, rate in rates.items()
            if name != "feeder"
        ),
        notes=("feeder decodes with simplejpeg where it is installed, webdataset with Pillow",),
    )  # fmt: skip


CASES = {"steps-resume": resuming, "packing": packing, "parquet": parquet, "webdataset": webdataset}
