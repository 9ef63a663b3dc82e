"""WebDataset: tar files, shuffled by a buffer with a seed for each epoch; no state."""

from collections.abc import Iterator
from pathlib import Path

import webdataset as wds

from exactness.loader import Base, Given, read


def look(sample: tuple[bytes]) -> tuple[int]:
    return (read(int(sample[0])),)


class Loader(Base):
    name = "WebDataset"
    package = "webdataset"
    offers = frozenset({"skip"})

    @staticmethod
    def prepare(folder: Path, numbers: range) -> None:
        with wds.ShardWriter(f"{folder}/%02d.tar", maxcount=12, verbose=False) as out:
            for number in numbers:
                out.write({"__key__": f"{number:03d}", "number": str(number).encode()})

    def __init__(self, given: Given) -> None:
        self.given = given

    def epoch(self, number: int) -> Iterator[list[int]]:
        given, seed = self.given, self.given.seed + number
        handler = wds.warn_and_continue if given.skip else wds.reraise_exception
        data = (
            wds.WebDataset(sorted(map(str, given.folder.glob("*.tar"))), shardshuffle=8, seed=seed)
            .shuffle(16, seed=seed)
            .to_tuple("number")
            .map(look, handler=handler)
            .batched(given.batch_size)
        )
        for (batch,) in wds.WebLoader(data, batch_size=None, num_workers=given.workers):
            yield batch.tolist()
