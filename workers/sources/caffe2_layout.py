"""What the tensors of a Caffe2 record mean."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.arguments import whole
from feeder.workers.sources.stores.tensors import BYTE, INT32, STRING, Tensor

LabelType = Literal["single", "multi_hot", "dense", "weighted", "none"]
LABEL_TYPES: tuple[LabelType, ...] = get_args(LabelType)

_BOX_NUMBERS = 4


def find_label_type(value: LabelType | int) -> LabelType:
    """A label type by its name, or by the number that DALI gives it."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(LABEL_TYPES):
        return LABEL_TYPES[value]
    if value not in LABEL_TYPES:
        raise ConfigError(f"label_type is {value!r}, expected one of {LABEL_TYPES!r}, or 0 to 4")
    return value


class RecordLayout:
    """What the tensors of a record mean. Read-only: any thread reads."""

    def __init__(
        self,
        *,
        has_image: bool,
        label_type: LabelType,
        num_labels: int | None,
        additional_inputs: int,
        bbox: bool,
    ) -> None:
        # Of these two the length of the column does not follow from a record.
        is_sparse = label_type in ("multi_hot", "weighted")
        if is_sparse:
            if num_labels is None:
                raise ConfigError(f"label_type {label_type!r} needs num_labels")
            num_labels = whole("num_labels", num_labels, 1)
        elif num_labels is not None:
            raise ConfigError(f"num_labels is given, and label_type is {label_type!r}")
        self.has_image = has_image
        self.label_type = label_type
        self.num_labels = num_labels or 0
        self.bbox = bbox
        names = [] if label_type == "none" else ["label"]
        names += [f"additional input {i}" for i in range(additional_inputs)]
        self.names = names + ["box"] * bbox
        """Names of the columns behind the image."""
        # Weights are a tensor of their own, and share the label's column.
        self.num_tensors = has_image + (label_type == "weighted") + len(self.names)
        """Tensors of a record."""
        if self.num_tensors == 0:
            raise ConfigError("neither image, label nor additional inputs: no column is left")

    def rows(self, tensors: list[Tensor]) -> list[NDArray[Any]]:
        """A record's row of each column behind the image.

        Raises:
            ValueError: a tensor is missing, or is not what it should be.
        """
        # Tensors have no names, only places: one too many means that all behind it would be taken
        # for another.
        if len(tensors) != self.num_tensors:
            raise ValueError(f"has {len(tensors)} tensors, expected {self.num_tensors}")
        rest = tensors[self.has_image :]
        rows: list[NDArray[Any]] = []
        if self.label_type == "weighted":
            rows.append(self._weighted(_numbers("label", rest[0]), _numbers("weights", rest[1])))
            rest = rest[2:]
        elif self.label_type != "none":
            rows.append(self._label(_numbers("label", rest[0])))
            rest = rest[1:]
        names = self.names[len(rows) :]
        rows.extend(_numbers(name, tensor) for name, tensor in zip(names, rest, strict=True))
        # A box is told by its type and length, since it too has no name.
        if self.bbox and (rest[-1].data_type != INT32 or rows[-1].shape != (_BOX_NUMBERS,)):
            raise ValueError(
                f"box is {rest[-1].type_name}{list(rows[-1].shape)}, expected INT32[{_BOX_NUMBERS}]"
            )
        return rows

    def _label(self, numbers: NDArray[Any]) -> NDArray[Any]:
        if self.label_type == "multi_hot":
            label = np.zeros(self.num_labels, numbers.dtype)
            label[self._places(numbers)] = 1
            return label
        if self.label_type == "single":
            if len(numbers) != 1:
                raise ValueError(f"label has {len(numbers)} numbers, expected 1")
            return numbers.reshape(())
        return numbers

    def _weighted(self, numbers: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
        if weights.dtype != np.float32 or len(weights) != len(numbers):
            raise ValueError(
                f"weights are {weights.dtype}[{len(weights)}], expected float32[{len(numbers)}]"
            )
        label = np.zeros(self.num_labels, np.float32)
        label[self._places(numbers)] = weights
        return label

    def _places(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        for number in numbers.tolist():
            # A float label is allowed where it is a whole number, as Caffe2's tools write it.
            if not 0 <= number < self.num_labels or number != int(number):
                raise ValueError(f"label {number!r} is none of 0 to {self.num_labels - 1}")
        return numbers.astype(np.int64)

    def fingerprint_fields(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {
            "image_available": self.has_image,
            "label_type": self.label_type,
            "num_labels": self.num_labels,
            "columns": self.names,
        }


def _numbers(name: str, tensor: Tensor) -> NDArray[Any]:
    try:
        return tensor.numbers()
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def image_of(tensor: Tensor) -> tuple[memoryview, tuple[int, ...] | None]:
    """The bytes of an image, and of raw pixels the shape.

    Raises:
        ValueError: the tensor is no image.
    """
    if tensor.data_type == STRING:
        if not tensor.strings or not tensor.strings[0]:
            raise ValueError("image is an empty STRING tensor")
        return tensor.strings[0], None
    if tensor.data_type != BYTE:
        raise ValueError(f"image is of data type {tensor.type_name}, expected STRING or BYTE")
    dims, data = tensor.dims, tensor.octets if tensor.octets is not None else memoryview(b"")
    # Two dimensions are a grey image: one channel.
    shape = (*dims[:2], dims[2] if len(dims) > 2 else 1)
    if len(dims) not in (2, 3) or min(shape) < 1 or shape[0] * shape[1] * shape[2] != len(data):
        raise ValueError(f"image has {len(data)} bytes, expected as many as {list(dims)} says")
    return data, shape
