"""Messages of Caffe, Caffe2 and TensorFlow as classes of protobuf: the oracle of our parsers."""

from __future__ import annotations

from typing import Any

import pytest

from needs import REASON

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
except ImportError:
    pytest.skip(REASON + "protobuf", allow_module_level=True)

__all__ = ["Datum", "DecodeError", "Example", "TensorProto", "TensorProtos"]

Field = descriptor_pb2.FieldDescriptorProto

DATUM = [
    ("channels", 1, Field.TYPE_INT32, False),
    ("height", 2, Field.TYPE_INT32, False),
    ("width", 3, Field.TYPE_INT32, False),
    ("data", 4, Field.TYPE_BYTES, False),
    ("label", 5, Field.TYPE_INT32, False),
    ("float_data", 6, Field.TYPE_FLOAT, True),
    ("encoded", 7, Field.TYPE_BOOL, False),
]
TENSOR = [
    ("dims", 1, Field.TYPE_INT64, True),
    ("data_type", 2, Field.TYPE_ENUM, False),
    ("float_data", 3, Field.TYPE_FLOAT, True),
    ("int32_data", 4, Field.TYPE_INT32, True),
    ("byte_data", 5, Field.TYPE_BYTES, False),
    ("string_data", 6, Field.TYPE_BYTES, True),
    ("double_data", 9, Field.TYPE_DOUBLE, True),
    ("int64_data", 10, Field.TYPE_INT64, True),
]
DATA_TYPES = {
    "FLOAT": 1, "UNDEFINED": 0, "INT32": 2, "BYTE": 3, "STRING": 4, "BOOL": 5, "UINT8": 6,
    "INT8": 7, "UINT16": 8, "INT16": 9, "INT64": 10, "FLOAT16": 12, "DOUBLE": 13,
    "ZERO_COLLISION_HASH": 14, "REBATCHING_BUFFER": 15,
}  # fmt: skip
PACKED = ("float_data", "int32_data", "double_data", "int64_data")


# TensorFlow's example.proto and feature.proto; on the wire a map is a list of entries.
LISTS = {"bytes_list": Field.TYPE_BYTES, "float_list": Field.TYPE_FLOAT,
         "int64_list": Field.TYPE_INT64}  # fmt: skip


def _message(file: Any, name: str, fields: list[tuple[str, int, int, bool]]) -> None:
    message = file.message_type.add(name=name)
    for field, number, kind, repeated in fields:
        label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
        added = message.field.add(name=field, number=number, type=kind, label=label)
        if kind == Field.TYPE_ENUM:
            added.type_name = ".oracle.DataType"
        if name == "TensorProto" and field in PACKED:
            added.options.packed = True


def _example(file: Any) -> None:
    for name, kind in LISTS.items():
        value = file.message_type.add(name=name).field.add(
            name="value", number=1, type=kind, label=Field.LABEL_REPEATED
        )
        value.options.packed = kind != Field.TYPE_BYTES
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(LISTS, 1):
        feature.field.add(
            name=name, number=number, type=Field.TYPE_MESSAGE, type_name=f".oracle.{name}",
            label=Field.LABEL_OPTIONAL, oneof_index=0,
        )  # fmt: skip
    for name, field, of, label in (
        ("Entry", "value", "Feature", Field.LABEL_OPTIONAL),
        ("Features", "feature", "Entry", Field.LABEL_REPEATED),
        ("Example", "features", "Features", Field.LABEL_OPTIONAL),
    ):
        message = file.message_type.add(name=name)
        message.field.add(
            name=field, number=2 if name == "Entry" else 1, type=Field.TYPE_MESSAGE, label=label,
            type_name=f".oracle.{of}",
        )  # fmt: skip
        if name == "Entry":
            message.field.add(
                name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL
            )


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="oracle.proto", package="oracle", syntax="proto2"
    )
    types = file.enum_type.add(name="DataType")
    for name, number in DATA_TYPES.items():
        types.value.add(name=name, number=number)
    _message(file, "Datum", DATUM)
    _message(file, "TensorProto", TENSOR)
    protos = file.message_type.add(name="TensorProtos")
    protos.field.add(
        name="protos", number=1, type=Field.TYPE_MESSAGE, label=Field.LABEL_REPEATED,
        type_name=".oracle.TensorProto",
    )  # fmt: skip
    _example(file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles(["oracle.proto"], pool)


_CLASSES = _classes()
Datum = _CLASSES["oracle.Datum"]
TensorProto = _CLASSES["oracle.TensorProto"]
TensorProtos = _CLASSES["oracle.TensorProtos"]
Example = _CLASSES["oracle.Example"]
