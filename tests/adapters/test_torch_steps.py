"""Ready-made steps for `on_device=`, each beside plain PyTorch that does it row by row."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from needs import needs_framework

needs_framework("torch")

import torch

import feeder
from feeder.adapters.torch import FeedLoader
from feeder.adapters.torch import device as on
from feeder.workers.sources.pictures import ResizedCrop

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEEDS = range(12)


def drawing(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def images_of(seed: int) -> torch.Tensor:
    """Some images of a size that is drawn."""
    rng = drawing(1000 + seed)
    shape = (int(rng.integers(1, 7)), *map(int, rng.integers(1, 40, 2)), 3)
    return torch.from_numpy(rng.integers(0, 256, shape, np.uint8))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_normalize_is_what_it_is_by_hand(dtype: torch.dtype) -> None:
    for seed in SEEDS:
        images = images_of(seed)
        made = on.normalize(MEAN, STD, dtype)(images)
        wanted = images.permute(0, 3, 1, 2).double() / 255
        wanted = (wanted - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        assert made.dtype == dtype and made.is_contiguous()
        # Half of what the dtype cannot tell apart, but for float32, which rounds in between.
        atol = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert torch.allclose(made.double(), wanted, rtol=0, atol=atol)
    last = on.normalize(MEAN, STD, memory_format=torch.channels_last)(images_of(3))
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_random_flip_mirrors_whom_the_draws_name() -> None:
    for seed in SEEDS:
        images = images_of(seed)
        made = on.random_flip(0.4)(images, drawing(seed))
        for image, flipped, is_one in zip(
            images, made, drawing(seed).random(len(images)) < 0.4, strict=True
        ):
            assert torch.equal(flipped, torch.flip(image, [1]) if is_one else image)


def bilinear(image: np.ndarray, part: tuple[float, ...], size: tuple[int, int]) -> np.ndarray:
    """A part of an image, each new pixel between the four nearest of the image."""
    top, left, high, wide = part
    height, width = image.shape[:2]
    made = np.zeros((*size, 3))
    for y in range(size[0]):
        for x in range(size[1]):
            v = np.clip(top + (y + 0.5) * high / size[0] - 0.5, 0, height - 1)
            u = np.clip(left + (x + 0.5) * wide / size[1] - 0.5, 0, width - 1)
            y0, x0 = int(v), int(u)
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            upper = image[y0, x0] * (1 - u + x0) + image[y0, x1] * (u - x0)
            lower = image[y1, x0] * (1 - u + x0) + image[y1, x1] * (u - x0)
            made[y, x] = upper * (1 - v + y0) + lower * (v - y0)
    return made


@pytest.mark.parametrize("is_list", (False, True))
def test_random_resized_crop_is_bilinear_over_the_part_that_was_drawn(is_list: bool) -> None:
    for seed in SEEDS:
        one = images_of(seed)
        images: Any = [*one, *images_of(seed + 50)] if is_list else one
        size = (int(drawing(seed).integers(1, 9)), 7)
        made = on.random_resized_crop(size)(images, drawing(seed))
        assert made.shape == (len(images), *size, 3) and made.dtype == torch.float32
        shapes = np.array([image.shape[:2] for image in images], float)
        parts = on.draw_parts(shapes, (0.08, 1.0), (3 / 4, 4 / 3), drawing(seed))
        for image, found, *part in zip(images, made, *parts, strict=True):
            wanted = bilinear(image.numpy().astype(float), tuple(part), size)
            assert np.abs(found.numpy() - wanted).max() < 0.02


def test_parts_are_drawn_as_they_are_asked_for() -> None:
    shapes = np.array([(60.0, 80.0), (500.0, 3.0), (3.0, 500.0), (1.0, 1.0)] * 500)
    top, left, high, wide = on.draw_parts(shapes, (0.2, 0.9), (0.5, 2.0), drawing(1))
    heights, widths = shapes.T
    assert (top >= 0).all() and (top + high <= heights).all() and (high >= 1).all()
    assert (left >= 0).all() and (left + wide <= widths).all() and (wide >= 1).all()
    area, ratio = (high * wide / heights / widths)[::4], (wide / high)[::4]
    assert 0.19 < area.min() < 0.22 and 0.85 < area.max() < 0.92
    assert 0.48 < ratio.min() < 0.53 and 1.8 < ratio.max() < 2.1
    # As sources draw parts, one by one.
    crop, rng = ResizedCrop(8, 8, (0.2, 0.9), (0.5, 2.0), draft=False), drawing(2)
    theirs = np.array([crop.part(60, 80, rng) for _ in range(2000)])
    assert abs(area.mean() - (theirs[:, 2] * theirs[:, 3] / 4800).mean()) < 0.03
    assert abs(np.log(ratio).mean() - np.log(theirs[:, 3] / theirs[:, 2]).mean()) < 0.06
    assert abs(top[::4].mean() - theirs[:, 0].mean()) < 1.5
    # A part of an image that is too narrow is the largest in the middle.
    assert set(zip(high[1::4], wide[1::4], top[1::4], strict=True)) == {(6.0, 3.0, 247.0)}


def batch_of(seed: int, num_classes: int = 5) -> dict[str, torch.Tensor]:
    rng = drawing(seed)
    num = int(rng.integers(1, 9))
    return {
        "image": torch.from_numpy(rng.random((num, 3, 6, 8), np.float32)),
        "label": torch.from_numpy(rng.integers(0, num_classes, num)),
        "name": torch.arange(num),
    }


def test_mixup_blends_pairs_by_one_share() -> None:
    for seed in SEEDS:
        batch = batch_of(seed)
        made = on.mixup(0.4, 5, "image", "label")(batch, drawing(seed))
        rng = drawing(seed)
        share, other = rng.beta(0.4, 0.4), rng.permutation(len(batch["name"]))
        for row, partner in enumerate(other):
            image = share * batch["image"][row] + (1 - share) * batch["image"][partner]
            assert torch.allclose(made["image"][row], image.float(), atol=1e-6)
            label = torch.zeros(5)
            label[batch["label"][row]] += share
            label[batch["label"][partner]] += 1 - share
            assert torch.allclose(made["label"][row], label, atol=1e-6)
        assert made["name"] is batch["name"]


def test_cutmix_takes_a_rectangle_and_shares_labels_by_its_area() -> None:
    sizes = set()
    for seed in range(60):
        batch = batch_of(seed)
        made = on.cutmix(1.0, 5, "image", "label")(batch, drawing(seed))
        rng = drawing(seed)
        rng.beta(1.0, 1.0)
        other = rng.permutation(len(batch["name"]))
        inside = np.zeros((6, 8), bool)
        for row, partner in enumerate(other):
            differs = (made["image"][row] != batch["image"][row]).all(0).numpy()
            is_theirs = (made["image"][row] == batch["image"][partner]).all(0).numpy()
            assert (differs | is_theirs | ~differs).all() and is_theirs[differs].all()
            inside |= differs
        if inside.any():
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            box = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
            assert box == inside.sum()
            kept = 1 - box / 48
            for row, partner in enumerate(other):
                label = torch.zeros(5)
                label[batch["label"][row]] += kept
                label[batch["label"][partner]] += 1 - kept
                assert torch.allclose(made["label"][row], label, atol=1e-6)
            sizes.add(box)
    assert len(sizes) > 10 and max(sizes) > 24


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def test_steps_go_one_after_another_on_members_of_any_batch() -> None:
    images, labels = images_of(2), torch.arange(len(images_of(2)))
    step = on.compose(
        on.at(0, on.random_flip(), on.normalize(MEAN, STD)),
        on.mixup(0.3, 9),
        lambda batch: (*batch, len(batch)),
    )
    made = step((images, labels), drawing(4))
    assert made[0].shape[1] == 3 and made[1].shape == (len(images), 9) and made[2] == 2
    named = on.at("x", on.random_flip(1.0))({"x": images, "y": labels}, drawing(1))
    assert torch.equal(named["x"], images.flip(2)) and named["y"] is labels
    assert on.at(1, lambda x: x + 1)([images, 3], drawing(0)) == [images, 4]
    pair = Pair(images, labels)
    assert isinstance(on.at(1, lambda x: x + 1)(pair, drawing(0)), Pair)


# ---- JPEGs


def jpeg(seed: int, height: int = 24, width: int = 32) -> bytes:
    from PIL import Image

    rows = np.linspace(0, 200, height * width * 3).reshape(height, width, 3) + seed
    file = io.BytesIO()
    Image.fromarray(rows.astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


class Files(torch.utils.data.Dataset[Any]):
    """JPEGs as they are, of two sizes."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return jpeg(i, 24 + i // 4 % 2)[: 300 if i == self.broken else None], i


def test_jpegs_are_decoded_where_the_loop_has_them() -> None:
    step = on.compose(
        on.at(0, on.decode_jpeg(), on.random_resized_crop(8), on.normalize(MEAN, STD)),
        on.at(1, lambda labels: labels * 2),
    )
    with FeedLoader(Files(), 3, seed=1, on_device=step) as loader:
        batches = list(loader)
    assert [batch[0].shape for batch in batches] == [(3, 3, 8, 8)] * 4
    with FeedLoader(Files(), 3, on_device=on.at(0, on.decode_jpeg())) as loader:
        images, _ = next(iter(loader))
    wanted = [feeder.sources.decode_image(jpeg(i)) for i in range(3)]
    assert np.array_equal(images.numpy(), np.stack(wanted))


def test_a_broken_jpeg_is_told_by_its_row_and_step() -> None:
    step = on.at(0, on.decode_jpeg(), on.random_resized_crop(8))
    with FeedLoader(Files(broken=7), 3, on_device=step) as loader:
        told = (
            r"^on_device at step 2 \(batch 2 of epoch 0\): it raised ValueError: the image of row 1"
        )
        with pytest.raises(feeder.DeviceError, match=told):
            list(loader)


def test_torchvision_decodes_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a module like it; a real one is seen by `tests/gpu`."""
    calls = []

    def decode(raw: list[torch.Tensor], mode: str, device: torch.device) -> list[torch.Tensor]:
        calls.append((len(raw), mode, str(device)))
        if any(len(one) < 400 for one in raw):
            raise RuntimeError("truncated")
        pixels = [feeder.sources.decode_image(bytes(one.numpy())) for one in raw]
        return [torch.from_numpy(np.array(one)).movedim(-1, 0) for one in pixels]

    with pytest.raises(feeder.ConfigError, match="torchvision, which decodes there, is not inst"):
        on.decode_jpeg("cuda:0")
    monkeypatch.setattr(on.importlib.util, "find_spec", lambda name: name == "torchvision")
    module = SimpleNamespace(ImageReadMode=SimpleNamespace(RGB="rgb"), decode_jpeg=decode)
    monkeypatch.setitem(__import__("sys").modules, "torchvision", SimpleNamespace(io=module))
    monkeypatch.setitem(__import__("sys").modules, "torchvision.io", module)
    step = on.decode_jpeg("cuda:0")
    files = [jpeg(0), jpeg(1)]
    assert np.array_equal(step(files).numpy(), on.decode_jpeg()(files).numpy())
    assert calls == [(2, "rgb", "cuda:0")]
    with pytest.raises(ValueError, match="the image of row 1 cannot be decoded: truncated"):
        step([jpeg(0), jpeg(1)[:300]])
