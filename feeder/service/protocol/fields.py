"""The types and limits of message fields.

Every limit holds before memory is taken for what it bounds: what arrives is hostile until it has
passed.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from feeder import errors

# Each lease may leave its batches unread in the connection, so the number bounds memory too. A
# consumer that asks more often (its user loads many states) takes a new connection.
MAX_OPENS = 16
"""How often a consumer may ask for a queue over one connection."""
# Counted up whenever a message changes, with no negotiation: server and trainers of one job run
# the same feeder, and a message of another version is refused by name.
PROTOCOL_VERSION = 5
"""Version of the messages; both sides must have the same one."""

# 64 KiB take milliseconds to look at. A message of 31 MB of nested lists took 2 GB and stopped
# the server for 13 s, since msgpack makes an object of each byte.

CONTROL_BYTES = 64 * 1024
"""Largest message of a consumer, its token not counted."""
# The token format allows 64 KiB of content; its head adds some bytes.
TOKEN_BYTES = 64 * 1024 + 64
"""Largest token without leftover rows."""
HEADER_BYTES = 256 * 1024
"""Largest part of a consumer's snapshot that is not rows."""
ROWS_BYTES = 256 * 1024 * 1024
"""Largest token or snapshot with leftover rows; a larger snapshot is refused, not sent."""
SEEN_BYTES = 64 * 1024 * 1024
"""Largest `Seen`: the figures of all feeds."""
# Bounds the objects that decoding makes; a feed has at most so many queues and columns.
MAX_ITEMS = 1024
"""Most items of a list in a message; more go in several messages."""
MAX_NAME = 1024
"""Most characters of a name."""
# NumPy 1 allows 32 axes, of which one is the rows.
MAX_AXES = 31
"""Most axes of a column beside the rows."""
ANSWERS = 6
"""A server answers so many of a lease's renewals in a lease's time."""
MAX_TEXT = 64 * 1024
"""Most characters of a text from the server, a remote traceback included."""
MAX_CREDIT = 1024
"""Most batches that a consumer may have under way, and most that its user may keep."""
# 64 random bits: a peer that does not read the answer cannot guess them.
RECEIPT_BYTES = 8
"""Length of a receipt, which shows that an answer has been read."""

# What a signed 64-bit integer of other languages holds.
MAX_COUNT = 2**63 - 1
"""The largest count."""
# A closed list: the name chooses a class on the other side, so no peer may choose freely.
KINDS = "|".join(
    name for name in errors.__all__ if issubclass(getattr(errors, name), errors.FeedError)
)
"""Names of the errors that may be sent, as a regular expression."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Credit = Annotated[int, Meta(ge=0, le=MAX_CREDIT)]
# The fencing token of a lease: 16 random bytes of the server's run and a counter of 8.
Generation = Annotated[bytes, Meta(min_length=24, max_length=24)]
# msgpack has no larger integer than a seed may be.
Seed = Annotated[int, Meta(ge=0)]
# A fraction as text, since 1/3 is no float: short, so that a hostile one is no work.
Weight = Annotated[str, Meta(max_length=64, pattern=r"^[0-9]+(/[1-9][0-9]*)?\Z")]
Receipt = Annotated[bytes, Meta(max_length=RECEIPT_BYTES)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Rows = Annotated[bytes, Meta(max_length=ROWS_BYTES)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=MAX_AXES)]
# The form of `numpy.dtype.str` for types without objects, or a name of ml_dtypes. Checked before
# NumPy parses it: `numpy.dtype` takes commas, repetitions and much else.
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
    """Base of all messages: a msgpack map with the class's name under "type". Frozen."""
