"""A batch on its way from a worker: a pickle whose arrays lie in shared memory beside it.

A batch is whatever `collate_fn` made, so it travels as a pickle, and every class arrives as itself.
The bytes of tensors and arrays are left out of the pickle (protocol 5), into blocks of memory that
both ends map: the trainer's tensors lie over them, and no file or descriptor stays open for each.
Only a loader's own workers write what is read here, so it is trusted as the trainer's own memory.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251  # between a trainer and the workers that it has started
from collections.abc import Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate

from feeder.executors.blocks import Writer
from feeder.executors.wire import Place

_IN_MESSAGE_BYTES = 16 * 1024
"""A longer pickle lies in a block, too: messages wait in a socket, which has room for so many."""
_BYTES = 0
"""The number of the one dtype that blocks hold here."""


def pack(batch: Any, blocks: Writer) -> tuple[bytes, list[Place]]:
    """A batch as a pickle, empty if it is the last of the places, and where its bytes lie."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(file, buffers.append).dump(batch)
    places = [blocks.place(np.frombuffer(buffer.raw(), np.uint8), _BYTES) for buffer in buffers]
    stream = file.getbuffer()
    if len(stream) <= _IN_MESSAGE_BYTES:
        return bytes(stream), places
    return b"", [*places, blocks.place(np.frombuffer(stream, np.uint8), _BYTES)]


def unpack(stream: bytes, buffers: Sequence[Any]) -> Any:
    """The reverse: `buffers` are the bytes that the places mean."""
    if not stream:
        *buffers, stream = buffers
    return pickle.loads(stream, buffers=buffers)


class _Pickler(pickle.Pickler):
    """Leaves out the bytes of tensors, as NumPy's arrays do by themselves."""

    def __init__(self, file: Any, callback: Any) -> None:
        super().__init__(file, 5, buffer_callback=callback)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise RuntimeError(
                "a tensor of the batch requires grad and is no leaf: a worker cannot send its "
                "graph; detach() it"
            )
        data = value.detach()
        stride = None
        if not data.is_contiguous():
            if _is_dense(data):
                # Its order in memory is part of what it is, as of images with channels last.
                stride = data.stride()
                data = data.as_strided((data.numel(),), (1,))
            else:
                data = data.contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)
        found = pickle.PickleBuffer(raw), str(value.dtype)[6:], tuple(value.shape), stride
        return _tensor, (*found, value.requires_grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not getattr(tensor, "__dict__", None)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side in memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _tensor(
    buffer: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...] | None,
    requires_grad: bool,
) -> torch.Tensor:  # fmt: skip
    of = getattr(torch, dtype)
    if not prod(shape):
        made = torch.empty(shape, dtype=of)
    else:
        flat = torch.frombuffer(buffer, dtype=torch.uint8).view(of)
        made = flat.view(shape) if stride is None else flat.as_strided(shape, stride)
    return made.requires_grad_() if requires_grad else made


def collate_into(blocks: Writer) -> None:
    """Have PyTorch's `default_collate` of this process, a worker, stack tensors where they are sent
    from. Its own way makes a file in shared memory for each of them."""

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if first.layout is not torch.strided or first.is_nested or first.device.type != "cpu":
            return collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        if type(first) is not torch.Tensor or any(tensor.requires_grad for tensor in batch):
            return torch.stack(batch, 0)
        num_bytes = len(batch) * first.numel() * first.element_size()
        memory = torch.from_numpy(blocks.empty((num_bytes,), np.uint8)).view(first.dtype)
        return torch.stack(batch, 0, out=memory.view(len(batch), *first.shape))

    collate.default_collate_fn_map[torch.Tensor] = stack


def write_indices(indices: Any) -> bytes:
    """What a sampler gave, for the worker that is asked for it: samplers give keys of any kind."""
    return pickle.dumps(indices, 5)


def read_indices(written: bytes) -> Any:
    """The reverse."""
    return pickle.loads(written)


def name_samples(indices: Any) -> str:
    """The samples of a batch, for errors."""
    try:
        some = list(islice(indices, 9))
    except TypeError:
        return repr(indices)
    return repr(some[:8])[:-1] + (", ...]" if len(some) > 8 else "]")


def path_to_unpicklable(value: Any, at: str = "batch", depth: int = 0) -> str:
    """Which part of a value it is that cannot be pickled."""
    if isinstance(value, dict):
        # Of the arguments of a loader only the name.
        parts = [(f"{at}[{key!r}]" if at else str(key), part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{at}[{i}]", part) for i, part in enumerate(value)]
    else:
        parts = [(f"{at}.{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    for name, part in parts if depth < 8 else ():
        try:
            pickle.dumps(part)
        except Exception:
            return path_to_unpicklable(part, name, depth + 1)
    return f"{at} ({type(value).__name__})"
