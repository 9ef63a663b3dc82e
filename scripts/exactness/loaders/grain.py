"""Grain's datasets, with worker processes and the state of their iterator."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain

from exactness.loader import Base, Given, Records


class Loader(Base):
    name = "Grain"
    package = "grain"
    state = True

    def __init__(self, given: Given) -> None:
        self.given, self.iterator, self.loaded = given, None, None

    def _iterator(self, number: int) -> Any:
        given = self.given
        records = grain.MapDataset.source(Records(given)).seed(given.seed + number).shuffle()
        batches = records[given.rank :: given.ranks].batch(given.batch_size).to_iter_dataset()
        return iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=given.workers)))

    def epoch(self, number: int) -> Iterator[list[int]]:
        if self.iterator is not None:
            self.iterator.close()
        self.iterator = self._iterator(number)
        if self.loaded is not None:
            self.iterator.set_state(self.loaded)
            self.loaded = None
        for batch in self.iterator:
            yield batch.tolist()

    def save(self, path: Path) -> None:
        state = self.loaded if self.iterator is None else self.iterator.get_state()
        path.write_text(json.dumps(state))

    def load(self, path: Path) -> None:
        self.loaded = json.loads(path.read_text())

    def close(self) -> None:
        if self.iterator is not None:
            self.iterator.close()
