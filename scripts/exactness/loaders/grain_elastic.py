"""Grain's ElasticIterator (experimental), whose state any number of ranks can load."""

from typing import Any

import grain

from exactness.loader import Records
from exactness.loaders import grain as plain


class Loader(plain.Loader):
    name = "Grain `ElasticIterator`"
    offers = frozenset({"ranks"})

    def _iterator(self, number: int) -> Any:
        given = self.given
        records = grain.MapDataset.source(Records(given)).seed(given.seed + number).shuffle()
        return iter(
            grain.experimental.ElasticIterator(
                records, given.batch_size * given.ranks,
                grain.sharding.ShardOptions(given.rank, given.ranks),
                multiprocessing_options=grain.MultiprocessingOptions(num_workers=given.workers),
            )
        )  # fmt: skip
