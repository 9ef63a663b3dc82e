"""Map-style datasets of Hugging Face as a source: the rows that their own library gives."""

from __future__ import annotations

import pickle  # noqa: TID251  (a source may be sent to other processes)
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def kinds() -> dict[str, tuple[Any, Any]]:
    """Of each kind of column its feature, and a strategy for values."""
    import datasets

    value = datasets.Value
    bytes_ = st.integers(-128, 127)
    numbers: dict[str, Any] = {
        "int8": bytes_, "uint16": st.integers(0, 2**16 - 1), "bool": st.booleans(),
        "int64": st.integers(-(2**63), 2**63 - 1), "float32": st.floats(width=32, allow_nan=False),
        "string": st.text("aé", max_size=3), "timestamp[us]": st.datetimes(),
    }  # fmt: skip
    made = {name: (value(name), values) for name, values in numbers.items()}
    few = st.lists(bytes_, max_size=3)
    image = st.integers(0, 255).map(lambda n: {"path": None, "bytes": png(n)})
    return made | {
        "list": (datasets.List(value("int8")), few),
        "lists": (datasets.List(datasets.List(value("int16"))), st.lists(few, max_size=3)),
        "square": (
            datasets.Array2D((2, 3), "uint8"),
            st.lists(st.lists(st.integers(0, 255), min_size=3, max_size=3), min_size=2, max_size=2),
        ),
        "struct": ({"a": value("int16")}, st.fixed_dictionaries({"a": bytes_})),
        "chat": (
            datasets.List({"role": value("string"), "n": value("int8")}),
            st.lists(st.fixed_dictionaries({"role": st.text("ab"), "n": bytes_}), max_size=2),
        ),
        "image": (datasets.Image(), image),
        "images": (datasets.List(datasets.Image()), st.lists(image, max_size=2)),
        "picture": (
            {"image": datasets.Image(), "n": value("int16"), "sizes": datasets.List(value("int8"))},
            st.fixed_dictionaries({"image": image, "n": bytes_, "sizes": few}),
        ),
    }  # fmt: skip


def png(number: int) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (2, 3), (number, 1, 2)).save(file, "PNG")
    return file.getvalue()


def plain(value: Any) -> Any:
    """A value without NumPy and Pillow; items of the library's structs are columns of ours."""
    if type(value).__module__.startswith("PIL"):
        return np.asarray(value).tolist()
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


DTYPES = {
    "int8": "i1", "uint16": "u2", "bool": "?", "int64": "i8", "float32": "f4", "list": "i1",
    "lists": "i2", "square": "u1", "struct.a": "i2", "picture.n": "i2", "picture.sizes": "i1",
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans())
def test_columns_are_the_same_whatever_lies_beside_them(data: Any, nulls: bool) -> None:
    import datasets

    given_kinds = kinds()
    names = data.draw(
        st.lists(st.sampled_from([*given_kinds]), min_size=1, max_size=4, unique=True)
    )
    rows = st.fixed_dictionaries({
        # Of an array that is null the library makes one of NaN.
        name: st.none() | given_kinds[name][1] if nulls and name != "square"
        else given_kinds[name][1] for name in names
    })  # fmt: skip
    items = data.draw(st.lists(rows, min_size=1, max_size=5))
    features = datasets.Features({name: given_kinds[name][0] for name in names})
    whole = datasets.Dataset.from_list(items, features=features)
    chosen = data.draw(st.lists(st.integers(0, len(items) - 1), min_size=1, max_size=5))
    dataset = whole.select(chosen)
    seen: list[Any] = []
    source = hf(dataset).map(lambda row: seen.append(row) or 0)  # type: ignore[func-returns-value]
    source(call(0, len(chosen)))
    for row, wanted in zip(seen, dataset, strict=True):
        told = plain(wanted)
        for name in ("struct", "picture"):
            inner = told.pop(name, {})
            # A struct of the table is taken apart, null or not.
            if f"{name}.a" in row:
                told["struct.a"] = None if inner is None else inner["a"]
            elif inner != {}:
                told[name] = inner
        assert plain(row) == told
    try:
        columns = hf(dataset)(call(0, len(chosen)))
    except RecordError:
        return
    assert not any(items[i][name] is None for i in chosen for name in names)
    for name, column in columns.items():
        assert column.dtype == DTYPES.get(name, column.dtype) or not column.size, name


def test_numbers_beside_an_image_in_a_struct_have_their_dtypes() -> None:
    import datasets

    feature, _ = kinds()["picture"]
    row = {"picture": {"image": {"path": None, "bytes": png(1)}, "n": 5, "sizes": [1, 2]}}
    whole = datasets.Dataset.from_list([row] * 2, features=datasets.Features({"picture": feature}))
    for dataset in (whole, whole.add_column("other", [1, 2])):
        source = pickle.loads(pickle.dumps(hf(dataset)))
        columns = source(call(0, 2))
        assert columns["picture.n"].dtype == np.int16
        assert columns["picture.sizes"].dtype == np.int8
        assert columns["picture.image"].shape == (2, 3, 2, 3)


def test_nulls_of_what_the_library_makes_are_for_map() -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"x": [1, None]})
    assert hf(whole, nulls=7)(call(0, 2))["x"].tolist() == [1, 7]
    with pytest.raises(ConfigError, match=r"nulls is given, and the items of this dataset are"):
        hf(whole.with_format("numpy"), nulls=7)


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
