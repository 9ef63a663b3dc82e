"""Steps for `on_device=`: what batches of images need before a model, by PyTorch, on the device
that the tensors are on.

```python
from feeder.adapters.torch import device as on

images = on.at(0, on.random_resized_crop(224), on.random_flip(), on.normalize(mean, std))
steps = on.compose(images, on.mixup(0.2, num_classes=1000))
loader = FeedLoader(dataset, 256, device="cuda:0", on_device=steps)
```

Images are (rows, height, width, channels) of 0 to 255, as decoders and files have them, until
`normalize`, which comes last. Draws are made on the host, a few numbers for each row, and so are
the same on every kind of device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nn

from feeder.devices.ondevice import takes_draws
from feeder.errors import ConfigError
from feeder.sources import decode_image

Step = Callable[..., Any]
"""`fn(value)` or `fn(value, rng)`."""
Range = tuple[float, float]

_TRIES = 10
"""A part of an image that would not lie in it is drawn anew, so often at most, as torchvision
does."""


def compose(*steps: Step) -> Step:
    """One step after another."""
    told = [(step, takes_draws(step)) for step in steps]

    def run(value: Any, rng: np.random.Generator) -> Any:
        for step, draws in told:
            value = step(value, rng) if draws else step(value)
        return value

    return run


def at(key: Any, *steps: Step) -> Step:
    """Steps for one member of a batch: of a tuple or a list by its number, of a dict by its key."""
    whole = compose(*steps)
    return lambda batch, rng: _with(batch, {key: whole(batch[key], rng)})


def normalize(
    mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Step:  # fmt: skip
    """Images of 0 to 255 become (rows, channels, height, width) of a dtype: of 0 to 1, less the
    mean, by the standard deviation of each channel. Computed as float32."""

    def step(images: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1 / (255 * of) for of in std])
        shift = torch.tensor([-m / of for m, of in zip(mean, std, strict=True)])
        scale, shift = (_there(one, images)[:, None, None] for one in (scale, shift))
        made = torch.addcmul(shift, images.movedim(-1, 1).float(), scale)
        return made.to(dtype).contiguous(memory_format=memory_format)

    return step


def random_flip(p: float = 0.5) -> Step:
    """Each image is mirrored, left and right, with this probability."""

    def step(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        is_flipped = _there(torch.from_numpy(rng.random(len(images)) < p), images)
        return torch.where(is_flipped[:, None, None, None], images.flip(2), images)

    return step


def random_resized_crop(
    size: int | tuple[int, int], scale: Range = (0.08, 1.0), ratio: Range = (3 / 4, 4 / 3)
) -> Step:
    """A random part of each image in one size (height, width): parts are drawn as torchvision's
    `RandomResizedCrop` draws them; pixels are interpolated between the nearest four, without
    antialiasing. Takes one tensor, or a list of images of several sizes; gives float32."""
    height, width = (size, size) if isinstance(size, int) else size

    def step(images: Any, rng: np.random.Generator) -> torch.Tensor:
        shapes = np.array([image.shape[:2] for image in images], np.float64)
        top, left, high, wide = draw_parts(shapes, scale, ratio, rng)
        # Of -1 to 1, the outer edges of an image: what `grid_sample` has.
        corner = np.stack([left, top], 1) / shapes[:, ::-1] * 2 - 1
        extent = np.stack([wide, high], 1) / shapes[:, ::-1] * 2
        drawn = torch.from_numpy(np.stack([corner, extent]).astype(np.float32))
        begin, part = _there(drawn, images[0])[:, :, None, None, :]
        middles = [(torch.arange(num, device=part.device) + 0.5) / num for num in (width, height)]
        grid = begin + torch.stack(torch.meshgrid(*middles, indexing="xy"), -1) * part
        if isinstance(images, torch.Tensor):
            return _sampled(images, grid)
        return torch.cat([_sampled(image[None], grid[i : i + 1]) for i, image in enumerate(images)])

    return step


def draw_parts(
    shapes: np.ndarray, scale: Range, ratio: Range, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Of images of (height, width) each a part: top, left, height and width of them all."""
    num = len(shapes)
    heights, widths = shapes.T
    areas = (heights * widths)[:, None] * rng.uniform(*scale, (num, _TRIES))
    least, most = map(math.log, ratio)
    ratios = np.exp(rng.uniform(least, most, (num, _TRIES)))
    wide, high = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (wide > 0) & (wide <= widths[:, None]) & (high > 0) & (high <= heights[:, None])
    first = np.argmax(fits, 1)[:, None]
    wide, high = (np.take_along_axis(one, first, 1)[:, 0] for one in (wide, high))
    # Where none fits, the largest part in the middle whose ratio is allowed.
    misfit = ~fits.any(1)
    wide = np.where(misfit, np.rint(np.minimum(widths, heights * max(ratio))), wide)
    high = np.where(misfit, np.rint(np.minimum(heights, widths / min(ratio))), high)
    free = np.stack([heights - high, widths - wide])
    # All are drawn, so that an image's draws do not depend on the others.
    places = np.floor(rng.random((2, num)) * (free + 1))
    top, left = np.where(misfit, np.floor(free / 2), places)
    return top, left, high, wide


def mixup(alpha: float, num_classes: int, images: Any = 0, labels: Any = 1) -> Step:
    """Images of a whole batch are blended with others of it, and labels become shares of classes,
    float32 of (rows, num_classes). How much is drawn once, of Beta(alpha, alpha)."""

    def step(batch: Any, rng: np.random.Generator) -> Any:
        given = batch[images]
        share, other = float(rng.beta(alpha, alpha)), _partners(given, rng)
        mixed = torch.lerp(given[other], given, share)
        shares = _shares(batch[labels], other, share, num_classes)
        return _with(batch, {images: mixed, labels: shares})

    return step


def cutmix(alpha: float, num_classes: int, images: Any = 0, labels: Any = 1) -> Step:
    """A rectangle of the images of a whole batch, (rows, channels, height, width), is that of
    others of it, and labels become shares of classes, by the area. It is drawn once."""

    def step(batch: Any, rng: np.random.Generator) -> Any:
        given = batch[images]
        share, other = float(rng.beta(alpha, alpha)), _partners(given, rng)
        size = np.array(given.shape[-2:])
        half, middle = np.sqrt(1 - share) * size / 2, rng.random(2) * size
        (top, left), (bottom, right) = (
            np.clip(np.floor(middle + side * half), 0, size).astype(int) for side in (-1, 1)
        )
        mixed = given.clone()
        mixed[..., top:bottom, left:right] = given[other][..., top:bottom, left:right]
        share = 1 - float((bottom - top) * (right - left) / size.prod())
        shares = _shares(batch[labels], other, share, num_classes)
        return _with(batch, {images: mixed, labels: shares})

    return step


def decode_jpeg(device: Any = "cpu") -> Step:
    """The bytes of JPEGs, as a list that stays on the host, become images on a device: one tensor
    if they are of one size, otherwise a list of them. On a GPU by torchvision, which has the
    device's own decoder; on the host by `feeder.sources.decode_image`, whose pixels may differ in
    the last bits. Raises `ValueError` for a broken image, by its row."""
    there = torch.device(device)
    if there.type != "cpu" and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"device is {device!r}, and torchvision, which decodes there, is not installed; pip "
            "install torchvision, or decode on the host"
        )

    def step(files: Sequence[bytes]) -> Any:
        found = _decoded_there(files, there) if there.type != "cpu" else _decoded(files)
        return torch.stack(found) if len({one.shape for one in found}) == 1 else found

    return step


def _decoded(files: Sequence[bytes]) -> list[torch.Tensor]:
    found = []
    for row, file in enumerate(files):
        try:
            found.append(torch.from_numpy(np.array(decode_image(file))))
        except ValueError as error:
            raise ValueError(f"the image of row {row}: {error}") from error
    return found


def _decoded_there(files: Sequence[bytes], device: torch.device) -> list[torch.Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg  # type: ignore[import-not-found]

    def decode(some: Sequence[bytes]) -> list[torch.Tensor]:
        # Their bytes are read on the host, whatever decodes them.
        raw = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in some]
        found = decode_jpeg(raw, mode=ImageReadMode.RGB, device=device)
        return [image.movedim(0, -1) for image in found]

    try:
        return decode(files)
    except RuntimeError:
        for row, file in enumerate(files):
            try:
                decode([file])
            except RuntimeError as error:
                raise ValueError(f"the image of row {row} cannot be decoded: {error}") from error
        raise


def _sampled(images: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Images where the grid says, between pixels."""
    made = nn.grid_sample(
        images.movedim(-1, 1).float(), grid, padding_mode="border", align_corners=False
    )
    return made.movedim(1, -1)


def _there(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the host on the device of others; nobody waits."""
    return values.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else values


def _partners(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return _there(torch.from_numpy(rng.permutation(len(images))), images)


def _shares(
    labels: torch.Tensor, other: torch.Tensor, share: float, num_classes: int
) -> torch.Tensor:
    of = nn.one_hot(labels.long(), num_classes).float()
    return torch.lerp(of[other], of, share)


def _with(batch: Any, changed: Mapping[Any, Any]) -> Any:
    """A batch with other members in the places of its own."""
    if isinstance(batch, Mapping):
        return {**batch, **changed}
    make = getattr(type(batch), "_make", type(batch))
    return make(changed.get(i, value) for i, value in enumerate(batch))
