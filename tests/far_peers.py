"""Reads the same samples of a store by MosaicML Streaming, LitData and feeder: `-m far_peers`.

The store (moto, an S3 server) lies behind a link that answers after `--latency` seconds, brings
`--mb` MB a second and fails `--errors` of all requests. Samples of 32 KiB lie in shards of 16 MiB.
Each loader reads two epochs in a process of its own, shards in random order and the samples of each
(of LitData within 256), with room for all ("cold", "warm"), and for half of them, of which "half"
is the second epoch. Seconds are those from making the loader, or the end of the epoch before, to
the last sample; bytes and requests are those that came over the link.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

import feeder
from far_server import FarServer, _Handler, far_server

WHAT = ("cold", "warm", "half")
SAMPLE, SHARD, BATCH, WORKERS = 32 << 10, 16 << 20, 32, 2
Told = tuple[float, int, int]
Epochs = Iterator[Iterable[list[int]]]
"""The batches of each epoch, as the numbers of their samples."""


class Through(_Handler):
    """Sends requests on to the store, and its answers back over the link."""

    store, errors, draw = "", 0.0, random.Random(1)

    def do_GET(self) -> None:
        far = self.server.far
        far.given_up.wait(far.latency_s)
        there = HTTPConnection(self.store)
        there.request(self.command, self.path, headers=dict(self.headers))
        answer = there.getresponse()
        body = answer.read()
        there.close()
        if fails := self.draw.random() < self.errors:
            body = b""
        far.note(self.path, (0, len(body)))
        if fails:
            return self._refuse(500)
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        return far.send(self.wfile.write, body)

    do_HEAD = do_GET


def read_streaming(folder: str, max_bytes: int) -> Epochs:
    streaming, torch = map(importlib.import_module, ("streaming", "torch.utils.data"))
    importlib.import_module("streaming.base.util").clean_stale_shared_memory()
    yield []  # what comes is timed
    dataset = streaming.StreamingDataset(
        remote="s3://bucket/mds", local=folder, batch_size=BATCH, cache_limit=max_bytes,
        shuffle=True, shuffle_algo="py1s", num_canonical_nodes=1, predownload=2 * SHARD // SAMPLE,
    )  # fmt: skip
    yield from of_torch(torch.DataLoader, dataset)


def read_litdata(folder: str, max_bytes: int) -> Epochs:
    litdata, downloader = map(importlib.import_module, ("litdata", "litdata.streaming.downloader"))
    # It has no option for a store without TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    yield []
    dataset = litdata.StreamingDataset(
        "s3://bucket/litdata", folder, shuffle=True, max_cache_size=max_bytes
    )
    yield from of_torch(litdata.StreamingDataLoader, dataset)


def of_torch(loader: Any, dataset: Any) -> Epochs:
    made = loader(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=together, persistent_workers=True
    )
    for _ in range(2):
        yield (numbers for numbers, _ in made)


def together(rows: Any) -> tuple[list[int], list[bytes]]:
    # What LitData gives is a view, which does not cross from a process.
    return [row["number"] for row in rows], [bytes(row["data"]) for row in rows]


def read_mds(folder: str, max_bytes: int) -> Epochs:
    yield []
    source = feeder.sources.mds("s3://bucket/mds", cache=feeder.Cache(folder, max_bytes)).map(
        lambda row: np.frombuffer(row["data"], np.uint8)
    )
    yield from of_feeder(source)


def read_fixed(folder: str, max_bytes: int) -> Epochs:
    yield []
    cache = feeder.Cache(folder, max_bytes)
    yield from of_feeder(
        feeder.sources.tokens("s3://bucket/fixed/", SAMPLE, "uint8", offset=0, cache=cache)
    )


def of_feeder(source: Any) -> Epochs:
    shuffled = source.shuffle(window=SHARD // SAMPLE)
    feeds = feeder.init_data_input_workers(["data"], shuffled, BATCH, epochs=2, num_threads=WORKERS)
    with feeds:
        for epoch in feeds["train"].epochs():
            yield (batch["data"][:, :8].copy().view("<i8")[:, 0].tolist() for batch in epoch)


LOADERS: dict[str, Callable[[str, int], Epochs]] = {
    "MosaicML Streaming": read_streaming, "LitData": read_litdata,
    "feeder, `mds` of the same shards": read_mds, "feeder, `tokens` of fixed size": read_fixed,
}  # fmt: skip


def write(folder: Path, num: int) -> None:
    """The samples in each format."""
    litdata, streaming = map(importlib.import_module, ("litdata.streaming.cache", "streaming"))
    draw, lit = random.Random(1), litdata.Cache(str(folder / "litdata"), chunk_bytes=SHARD)
    (folder / "fixed").mkdir()
    columns = {"number": "int", "data": "bytes"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=SHARD) as mds:
        for number in range(num):
            data = number.to_bytes(8, "little") + draw.randbytes(SAMPLE - 8)
            mds.write(sample := {"number": number, "data": data})
            lit[number] = sample
            with open(folder / "fixed" / f"{number * SAMPLE // SHARD:05}.bin", "ab") as file:
                file.write(data)
    lit.done()
    lit.merge()


def child(name: str, folder: str, max_bytes: str, num: str) -> None:
    """Read two epochs, and say when each is over."""
    epochs = LOADERS[name](folder, int(max_bytes))
    next(epochs)
    began = time.monotonic()
    for epoch in epochs:
        seen = sorted(number for batch in epoch for number in batch)
        now = time.monotonic()
        assert seen == [*range(int(num))], f"{name}: {len(seen)} samples of {num}"
        print(now - began, flush=True)
        began = now


def measure(far: FarServer, name: str, max_bytes: int, num: int) -> list[Told]:
    """Of each epoch its seconds, bytes and requests."""
    told, at = [], len(far.asked)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "far_peers", "--child", name, folder]
        command += [str(max_bytes), str(num)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                asked, at = far.asked[at:], len(far.asked)
                told.append((float(line), sum(span[1] for _, span in asked if span), len(asked)))
    assert len(told) == 2, f"{name} failed"
    return told


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in ("latency", 0.05), ("mb", 100.0), ("mib", 512), ("errors", 0.01):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size, num = options.mib << 20, (options.mib << 20) // SAMPLE
    found: dict[tuple[str, str], list[Told]] = {}
    server, pipe = [sys.executable, "-m", "objects.server"], subprocess.PIPE
    with (
        far_server() as far, tempfile.TemporaryDirectory() as given,
        subprocess.Popen(server, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as moto,
    ):  # fmt: skip
        assert moto.stdout is not None and moto.stdin is not None
        Through.store = ":".join(moto.stdout.readline().decode().split())
        far._http.RequestHandlerClass = Through
        folder = Path(given)
        write(folder, num)
        for path in (folder, *folder.glob("*/*.*")):
            address = f"http://{Through.store}/bucket/{path.relative_to(folder)}".rstrip("./")
            data = b"" if path == folder else path.read_bytes()
            urlopen(Request(address, data, {"Content-Type": "bytes"}, method="PUT")).close()
        os.environ |= dict.fromkeys(("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"), far.address)
        os.environ |= dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1")
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        os.environ["AWS_ALLOW_HTTP"] = "true"
        far.latency_s, far.bytes_per_s = options.latency, options.mb * 1e6
        Through.errors = options.errors
        for name in [*LOADERS] * options.rounds:
            three = *measure(far, name, 2 * size, num), measure(far, name, size // 2, num)[1]
            print(name, three, file=sys.stderr, flush=True)
            for what, told in zip(WHAT, three, strict=True):
                found.setdefault((name, what), []).append(told)
        moto.stdin.close()
    print(*(f"{name} {version(name)}" for name in ("mosaicml-streaming", "litdata")), sep=", ")
    print(f"the link: {options.mb * 1e6 / SAMPLE:,.0f} samples a second\n")
    print("| | " + " | ".join(f"{what}: samples/s, MB, requests" for what in WHAT) + " |")
    print("|---" * (1 + len(WHAT)) + "|")
    for name in LOADERS:
        row = [map(statistics.median, zip(*found[name, what], strict=True)) for what in WHAT]
        cells = (f"{num / took:,.0f}, {sent / 1e6:,.0f}, {asked:,.0f}" for took, sent, asked in row)
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
