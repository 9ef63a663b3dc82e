"""Map-style datasets of Hugging Face as a source: the rows that their own library gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, hf, iterable
from needs import needs_framework

needs_framework("datasets", "pyarrow")

import pyarrow as pa

# The library pickles what it digests, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their thread would outlive the test."""
    import tqdm

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


NUM = 50
TABLE = pa.table({
    "n": pa.array(range(NUM), pa.int32()),
    "x": pa.array([i / 2 for i in range(NUM)], pa.float32()),
    "v": pa.array([[i, -i] for i in range(NUM)], pa.list_(pa.int64(), 2)),
    "t": pa.array(["é" * (i % 3) for i in range(NUM)]),
})  # fmt: skip


def test_its_rows_in_its_order(tmp_path: Path) -> None:
    import datasets

    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_stream(
        file, TABLE.schema
    ) as stream:  # fmt: skip
        stream.write_table(TABLE, max_chunksize=10)
    whole = datasets.Dataset.from_file(str(tmp_path / "x.arrow"))
    for dataset in (
        whole,
        whole.shuffle(seed=1, keep_in_memory=True),
        whole.select([5, 3, 40, 41, 2]),
        whole.select(range(10, 20)).rename_column("n", "number"),
    ):
        source = hf(dataset.select_columns([dataset.column_names[0], "x", "v"]))
        assert len(source) == len(dataset)
        (columns,) = epoch_of(source, NUM)
        assert list(columns)[1:] == ["x", "v"]
        for name, column in columns.items():
            assert column.tolist() == list(dataset[name])
    formatted = hf(whole.select_columns(["n", "x"]).with_format("numpy"), random_shuffle=True)
    assert sorted(formatted(call(0, NUM))["n"].tolist()) == list(range(NUM))
    assert hf(whole).describe() != hf(whole.select([1])).describe()
    with pytest.raises(ConfigError, match=r"one that streams is for sources\.iterable"):
        hf(whole.to_iterable_dataset())


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    import datasets

    words, path = pa.array(["aa", "bbb", "cccc", "ddddd"]), tmp_path / "x.arrow"
    table = pa.table({"x": words})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    offsets, beyond = (np.array([0, 2, n, 9, 14], np.int32).tobytes() for n in (5, 2**30))
    path.write_bytes(path.read_bytes().replace(offsets, beyond))
    source = hf(datasets.Dataset.from_file(str(path))).map(lambda row: len(row["x"]))
    told = r"batch 0 of the dataset in '.*x\.arrow': the file is damaged: .*; write or copy it anew"
    with pytest.raises(RecordError, match=told):
        source(call(0, 4))


def test_items_where_a_column_has_no_array() -> None:
    import datasets

    lists = {"x": [[[1], [2, 3]], [], [[4]]], "t": [["a", "bc"], [], ["d"]]}
    whole = datasets.Dataset.from_dict(lists)
    sizes = hf(whole).map(lambda row: (sum(map(len, row["x"])), len("".join(row["t"]))))
    assert [c.tolist() for c in sizes(call(0, 3))] == [[3, 0, 1], [3, 0, 1]]
    squares = datasets.Dataset.from_dict(
        {"x": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]},
        features=datasets.Features({"x": datasets.Array2D((2, 2), "int32")}),
    )
    assert hf(squares)(call(0, 2))["x"].tolist() == squares["x"][:]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_that_streams_resumes_by_its_state(workers: int) -> None:
    import datasets

    whole = datasets.Dataset(TABLE).select_columns(["n", "x"]).to_iterable_dataset(num_shards=4)

    def part(worker_id: int, epoch: int) -> Any:
        return whole.shard(num_shards=workers, index=worker_id)

    def taken(resume: Any = None) -> list[tuple[Any, bytes]]:
        with feeder.init_data_input_workers(
            ["n", "x"], iterable(part), 4, workers, epochs=2, resume=resume,
            coordinator=feeder.Coordinator(),
        ) as made:  # fmt: skip
            return [
                ((batch.epoch, batch["n"].tolist(), batch["x"].tolist()), batch.cut.token())
                for batch in made["train"]
            ]

    begun = taken()
    for epoch in range(2):
        rows = [n for (e, numbers, _), _ in begun if e == epoch for n in numbers]
        assert sorted(rows) == list(range(NUM))
    for i, (_, token) in enumerate(begun, 1):
        assert [batch for batch, _ in taken(token)] == [batch for batch, _ in begun[i:]]
