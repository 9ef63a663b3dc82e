"""Sources read what a server of S3's API lists and sends, as the environment says where it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import from_url

import feeder
from feeder import sources

# A thread of the library's own opens and closes connections.
pytestmark = [pytest.mark.process, pytest.mark.foreign_sockets]


def test_objects_are_read_through_a_cache_and_named_when_they_change(tmp_path: Path) -> None:
    store = from_url("s3://bucket", client_options={"allow_http": True})
    tokens = np.arange(40_000, dtype="<u2")
    for name, part in (("a b", tokens[:20_000]), ("c+d", tokens[20_000:])):
        obstore.put(store, f"far/{name}.bin", part.tobytes())
    with feeder.Cache(tmp_path / "cache", 64 << 20) as cache:
        source = sources.tokens("s3://bucket/far/", 100, "uint16", cache=cache)
        feeds = feeder.init_data_input_workers(["x"], source, batch_size=25)
        with feeds:
            rows = [batch["x"] for batch in feeds["train"]]
        assert np.array_equal(np.concatenate(rows).reshape(-1), tokens)
        assert cache.stats()["requests"] == 4  # a header and a block of each
    # Nothing is asked for but sizes and tags.
    with feeder.Cache(tmp_path / "cache", 64 << 20) as cache:
        source = sources.tokens("s3://bucket/far/*.bin", 100, "uint16", cache=cache, offset=0)
        assert np.array_equal(source(feeder.Call(0, 0, 0, 5, 0))[0], tokens[:500].reshape(5, 100))
        assert cache.stats()["requests"] == 0
    with feeder.Cache(tmp_path / "other", 64 << 20) as cache:
        source = sources.tokens("s3://bucket/far/*.bin", 100, "uint16", cache=cache, offset=0)
        obstore.put(store, "far/a b.bin", tokens[1:20_001].tobytes())
        with pytest.raises(feeder.StorageError, match=r"far/a b\.bin' has changed"):
            source(feeder.Call(0, 0, 0, 5, 0))
