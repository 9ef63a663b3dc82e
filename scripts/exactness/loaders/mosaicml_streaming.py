"""MosaicML Streaming: shards of its own, and its loader with a state of any number of ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from exactness.loader import Base, Given, read


class Numbers(StreamingDataset):
    def __getitem__(self, at: int) -> int:
        return read(super().__getitem__(at)["number"])


class Loader(Base):
    name = "MosaicML Streaming"
    package = "mosaicml-streaming"
    state = True
    offers = frozenset({"ranks"})

    @staticmethod
    def prepare(folder: Path, numbers: range) -> None:
        with MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=300) as out:
            for number in numbers:
                out.write({"number": number})

    def __init__(self, given: Given) -> None:
        if given.ranks == 1:
            clean_stale_shared_memory()  # As its documents say, before a run after a killed one.
        data = Numbers(
            local=str(given.folder), shuffle=True, shuffle_seed=given.seed,
            batch_size=given.batch_size,
        )  # fmt: skip
        self.loader: Any = StreamingDataLoader(data, given.batch_size, num_workers=given.workers)

    def epoch(self, number: int) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch.tolist()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.loader.state_dict()))

    def load(self, path: Path) -> None:
        self.loader.load_state_dict(json.loads(path.read_text()))
