"""What functions make of batches on a real GPU (`on_device=`), beside the same on the host."""

from __future__ import annotations

import importlib
import io
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeds import assert_same, make, note, note_columns, running
from gpu.copying import LateReader, Poisoning
from gpu.test_torch import poisoning
from needs import needs
from standin.making import made
from standin.numbered import ROWS, settings

NUM_BATCHES = 10_000
BATCH_BYTES = 512
SEED = 13
pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.timeout(300)]


def function(asarray: Callable[[np.ndarray], Any], double: Callable[[Any], Any]) -> Any:
    """The function of `standin.making`, for a library."""

    def run(batch: Any, rng: np.random.Generator) -> Any:
        scaled = batch["vector"] * asarray(rng.random(ROWS, np.float32))[:, None] - 1
        return {"id": batch["id"], "scaled": double(scaled + 1), "picked": scaled[:, 1:3]}

    return run


def by_cupy() -> Any:
    cupy = importlib.import_module("cupy")
    return function(cupy.asarray, lambda array: array.astype(np.float64))


def by_torch() -> Any:
    needs("torch")
    torch = importlib.import_module("torch")

    def asarray(values: np.ndarray) -> Any:
        return torch.from_numpy(values).pin_memory().to("cuda:0", non_blocking=True)

    return function(asarray, lambda tensor: tensor.double())


def on_gpu(num_batches: int, on_device: Any, device: str = "cuda:0", **more: Any) -> Any:
    given = {"devices": (device,), "on_device": on_device, "seed": SEED}
    return running(**settings(num_batches, **given) | more)


def note_tensors(batch: feeder.Batch) -> Any:
    columns = [tensor.cpu().numpy() for tensor in batch.arrays()]
    return batch.epoch, batch.index, batch.step, batch.rows, note_columns(columns)


@pytest.mark.parametrize(("depth", "delays"), [(1, 0), (2, 1), (0, 0)])
def test_ten_thousand_batches_are_what_the_host_makes_of_them(
    poisoned: list[Poisoning], depth: int, delays: int
) -> None:
    with on_gpu(NUM_BATCHES, by_cupy(), depth=depth) as (_, feed):
        driver = poisoned[-1]
        stream = driver.make_stream()
        reader = LateReader(driver, stream, NUM_BATCHES * BATCH_BYTES, delays=delays)
        for batch in feed.on(0, stream=stream):
            reader.read(batch)
        assert_same(reader.records(), made(NUM_BATCHES, SEED))


def test_a_consumers_function_makes_what_the_host_makes(poisoned: list[Poisoning]) -> None:
    with (
        serving(lambda: make(**settings(1000, seed=SEED))) as server,
        reading(server, device="cuda:0", credit=3, on_device=by_cupy()) as consumer,
    ):
        assert_same([note(batch) for batch in consumer], made(1000, SEED))


@pytest.mark.parametrize("depth", (1, 3))
def test_ten_thousand_batches_of_tensors_are_what_the_host_makes(depth: int) -> None:
    on_device = by_torch()
    with poisoning(), on_gpu(NUM_BATCHES, on_device, "torch:0", depth=depth) as (_, feed):
        got = [note_tensors(batch) for batch in feed]
    assert_same(got, made(NUM_BATCHES, SEED))


def test_resumed_at_a_hundred_random_batches_draws_are_the_same() -> None:
    """From positions of the GPU, on the GPU and on the host."""
    num, on_device, wanted = 300, by_torch(), made(300, SEED)
    host = function(np.asarray, lambda array: array.astype(np.float64))
    with on_gpu(num, on_device, "torch:0") as (coordinator, feed):
        places = [coordinator.state_dict()]
        for _ in feed:
            places.append(coordinator.state_dict())
    for step in random.Random(7).sample(range(num), 100):
        with on_gpu(num, on_device, "torch:0", resume=places[step]) as (_, feed):
            rest = [note_tensors(batch) for batch in islice(feed, 20)]
        assert_same(rest, wanted[step : step + 20], step)
        with on_gpu(num, host, "cpu", resume=places[step]) as (_, feed):
            rest = [note(batch) for batch in islice(feed, 5)]
        assert_same(rest, wanted[step : step + 5], step)


def jpeg(i: int) -> bytes:
    image, rows = importlib.import_module("PIL.Image"), np.arange(48 * 64 * 3).reshape(48, 64, 3)
    file = io.BytesIO()
    image.fromarray((rows // 93 + 2 * i).astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


class Files:
    """JPEGs as they are, and their numbers."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        return jpeg(i)[: 200 if i == self.broken else None], i


class Pictures(Files):
    """The same, decoded."""

    def __getitem__(self, i: int) -> Any:
        return feeder.sources.decode_image(jpeg(i)), i


def test_ready_made_steps_make_on_the_gpu_what_they_make_on_the_host() -> None:
    """With the same draws; values differ in what is rounded."""
    needs("torch")
    from feeder.adapters.torch import FeedLoader
    from feeder.adapters.torch import device as on

    def hard(batch: Any, rng: Any) -> Any:
        images, shares = on.compose(on.at(0, on.normalize((0,) * 3, (1,) * 3)),
                                    on.mixup(0.4, 64))(batch, rng)  # fmt: skip
        return on.cutmix(0.4, 64)((images, shares.argmax(1)), rng)

    for step in (hard, on.at(0, on.random_resized_crop(32), on.random_flip())):
        with FeedLoader(Pictures(), 16, shuffle=True, on_device=step) as loader:
            wanted = [(images, labels) for images, labels in loader]
        with FeedLoader(Pictures(), 16, shuffle=True, on_device=step, device="cuda:0") as loader:
            for (images, labels), (theirs, their_labels) in zip(loader, wanted, strict=True):
                assert images.device.type == labels.device.type == "cuda"
                assert (images.cpu() - theirs).abs().max() < 1e-3 * theirs.abs().max()
                assert (labels.cpu().float() - their_labels.float()).abs().max() < 1e-5


def test_jpegs_are_decoded_on_the_gpu() -> None:
    for name in ("torch", "torchvision", "PIL"):
        needs(name)
    from feeder.adapters.torch import FeedLoader
    from feeder.adapters.torch import device as on

    step = on.at(0, on.decode_jpeg("cuda:0"))
    with FeedLoader(Files(), 16, on_device=step, device="cuda:0") as loader:
        for images, labels in loader:
            wanted = np.stack([feeder.sources.decode_image(jpeg(i)) for i in labels.tolist()])
            differs = np.abs(images.cpu().numpy().astype(int) - wanted)
            assert images.device.type == "cuda" and differs.max() < 24 and differs.mean() < 2
    with FeedLoader(Files(broken=37), 16, on_device=step, device="cuda:0") as loader:
        with pytest.raises(feeder.DeviceError, match=r"at step 2 .*the image of row 5 cannot be "):
            list(loader)
        assert loader.step == 2
