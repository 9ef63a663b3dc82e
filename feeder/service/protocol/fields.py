"""What the fields of messages may hold, and how large anything may be."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from feeder import errors

MAX_OPENS = 16
"""How often a queue may be asked for over one connection: each lease may leave batches unread."""
PROTOCOL_VERSION = 5
"""Version of the messages; both sides must be of the same."""

CONTROL_BYTES = 64 * 1024
"""A consumer's message is at most so large, a token not counted."""
TOKEN_BYTES = 64 * 1024 + 64
"""A token without leftover rows is at most so large."""
HEADER_BYTES = 256 * 1024
"""What a snapshot from a consumer holds beside rows is at most so large."""
ROWS_BYTES = 256 * 1024 * 1024
"""A token or snapshot with leftover rows is at most so large."""
SEEN_BYTES = 64 * 1024 * 1024
"""The figures of all feeds are at most so large."""
MAX_ITEMS = 1024
"""A list in a message has at most so many items; more go in several messages."""
MAX_NAME = 1024
"""A name has at most so many characters."""
MAX_AXES = 31
"""A column has at most so many axes beside the rows."""
MAX_TEXT = 64 * 1024
"""A text from the server has at most so many characters, a remote traceback too."""
MAX_CREDIT = 1024
"""A consumer may ask for so many batches under way, and to keep so many."""
RECEIPT_BYTES = 8
"""Length of what shows that an answer has been read."""

MAX_COUNT = 2**63 - 1
"""The largest count."""
KINDS = "|".join(
    name for name in errors.__all__ if issubclass(getattr(errors, name), errors.FeedError)
)
"""The errors that may be told, as a regular expression."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Credit = Annotated[int, Meta(ge=0, le=MAX_CREDIT)]
Generation = Annotated[bytes, Meta(min_length=24, max_length=24)]
Receipt = Annotated[bytes, Meta(max_length=RECEIPT_BYTES)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Rows = Annotated[bytes, Meta(max_length=ROWS_BYTES)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=MAX_AXES)]
DType = Annotated[
    str,
    Meta(
        max_length=32,
        pattern=r"^([<>|]([biufcSU][0-9]+|[mM]8(\[[0-9a-zA-Z]+\])?)"
        r"|(b?float|b?complex|u?int)[0-9]+(_[0-9a-z]+)?)\Z",
    ),
]
Counts = Annotated[tuple[Count, ...], Meta(max_length=MAX_ITEMS)]


class Message(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=True
):
    """Anything that one side says to the other."""
