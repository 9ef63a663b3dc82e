"""`feeder.connect`: it checks its arguments, then makes the consumer from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from feeder.config import folder_of
from feeder.devices.cuda.driver import is_gpu, open_driver
from feeder.devices.cuda.landing import Landing
from feeder.devices.ondevice import OnDevice
from feeder.errors import ConfigError
from feeder.ranks import is_this_host, queue_of
from feeder.service.client.consumer import Consumer
from feeder.service.client.io_loop import ClientLoop
from feeder.service.client.machine import ConsumerOptions
from feeder.service.net.addresses import Address, check_connects, default_address, parse
from feeder.service.net.connection import Connection
from feeder.service.net.keys import ClientKeys
from feeder.service.net.security import Security
from feeder.settings import MAX_SECONDS, check
from feeder.workers.public import public
from feeder.workers.stream.batch import Batch

# The longest frame that a consumer takes. A server sends batches in frames of 31 MiB at most, and a
# snapshot with up to 256 MiB of rows. A longer frame is refused before it takes memory here.
_MAX_FRAME_BYTES = 512 * 1024 * 1024
Number = Annotated[int, Meta(ge=0, lt=2**31, description="a whole number from 0 on")]
SecondsFrom0 = Annotated[
    float, Meta(ge=0, le=MAX_SECONDS, description="0 to 1e+09", extra={"unit": " s"})
]
_PLANES = Meta(description="'auto', 'shared' or 'frames'")
_CHECKSUMS = Meta(description="'auto', 'off', 'sampled' or 'full'")


@public("feeder")
def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    feed: str = "",
    queue: Number | None = None,
    replica: Number = 0,
    device: str = "cpu",
    stream: Any = None,
    credit: Number = 0,
    hold: Number = 2,
    resume: Any = None,
    skip: Number = 0,
    rejoin: bool = False,
    takeover: bool = False,
    plane: Annotated[Literal["auto", "shared", "frames"], _PLANES] = "auto",
    checksum: Annotated[Literal["auto", "off", "sampled", "full"], _CHECKSUMS] = "auto",
    writable: bool = False,
    on_device: Callable[..., Any] | None = None,
    transcript: str | os.PathLike[str] | None = None,
    keys: str | os.PathLike[str] | None = None,
    timeout: SecondsFrom0 = 10.0,
    reconnect: SecondsFrom0 = 600.0,
) -> Consumer:
    """Read the batches of a feed that `feeder serve`, or `feeder.serve`, serves.

    Args:
        addresses: Where the server is, as it was told to `feeder serve`; several are tried in
            turn, also when the server goes away later. By default those in FEEDER_ADDRESSES, with
            commas between them, else this user's own socket.
        feed: The feed's input source name; may be left out where the server has but one.
        queue: Which of the feed's queues; by default FEEDER_QUEUE, else the number that the
            launcher gave (torchrun, Slurm, Kubernetes): among those of this node where the server
            is on this host, else among all; else 0. See docs/configuring.md#where-am-i.
        replica: Which of the trainers that share the queue, where the server has `replicas`. Give
            `queue` too then, because launchers number trainers and know nothing of queues. See
            docs/serving.md#shared-queues.
        device: Where batches are handed out: "cpu", or a GPU such as "cuda:0", which copies them
            from shared memory itself where its driver allows that; "torch:0" for tensors of
            PyTorch. See docs/gpu.md.
        stream: The stream that the GPU's work on batches goes to: one of CuPy or PyTorch, or any
            object with `__cuda_stream__`; by default the current stream of CuPy, or of
            PyTorch for its tensors, at each batch.
        credit: Batches that may be on their way beyond those handed out; 0 is the server's choice,
            by their size.
        hold: Batches that may be kept without being copied, beside the one at hand.
        resume: Where to go on: a state dict, a Snapshot, its bytes, a token, the path of a file, or
            a `CheckpointStore`, its folder or URL for the newest in it. All queues of a feed must
            start at the same round. A position of any queue is valid for all queues, also where
            there were more or fewer of them: the rest of its round is made and dropped.
        skip: Leave out so many rounds of all queues there; the same for all queues. See
            docs/positions.md#any-number-of-devices.
        rejoin: This trainer alone comes back, wherever the trainers of other queues stand.
        takeover: Take the queue from a consumer that is alive.
        plane: How batches come: "auto" takes shared memory on the server's host, else frames;
            "shared" or "frames" takes no other.
        checksum: How they are checked: "off", "sampled" or "full"; "auto" is sampled over shared
            memory, full in frames.
        writable: Whether batches are copied into memory of their own, which may be written into.
            A feed that was made with `writable=True` does so for all consumers. Without it arrays
            are read-only, and a write past NumPy's check, as PyTorch allows it, changes this
            process's batch alone. On a GPU every batch is a copy that may be written into.
        on_device: A function ``fn(batch)`` or ``fn(batch, rng)`` that returns the arrays that are
            handed out, by name. On a GPU it runs ahead of the trainer, on the stream of the copies;
            on the host when a batch is handed out. All replicas of a queue draw the same. See
            docs/gpu.md#work-on-the-device.
        transcript: A folder in which a digest of each batch that is handed out is written down, in
            a chain. See docs/transcripts.md.
        keys: A directory that `feeder keygen` made for this client, for servers with keys.
        timeout: Seconds that the server may take to answer at first.
        reconnect: Seconds that the server may be away later before `next()` raises.

    Returns:
        The consumer: an iterable and a context manager.

    Raises:
        ConfigError: An argument is wrong, there is no such GPU, or the server has no such feed or
            queue.
        ConnectTimeout: Nobody answered.
        AuthError: The server refuses this client.
        LeaseLost: Another consumer holds the queue.
        ResumeError: The position does not fit the feed, or another queue's.
    """
    # All arguments are checked before anything is opened: an error leaves nothing behind.
    # Device and feed have texts of their own, in `_landing` and `_name`.
    given = {name: one for name, one in locals().items() if name not in ("device", "feed")}
    given = check(connect, given)
    found = _addresses(addresses)
    check_connects(found)
    _check_together(given)
    function = OnDevice.of(on_device)
    function = function and function.of_stream(_facts)
    landing = _landing(device, stream, given["credit"], given["hold"], function)
    folder = None if transcript is None else folder_of(transcript)
    if folder is not None and landing is not None:
        raise ConfigError(
            f"transcript is {folder!r}, and device is {device!r}: a digest is made of rows in "
            "memory of the host; leave it out, or hand batches out on the host"
        )
    position = None if resume is None else _position(resume)
    options = ConsumerOptions(
        addresses=tuple(map(str, found)),
        feed=_name(feed),
        queue=_queue(found) if queue is None else given["queue"],
        replica=given["replica"],
        credit=given["credit"],
        hold=given["hold"],
        skip=given["skip"],
        rejoins=rejoin,
        takes_over=takeover,
        plane=plane,
        checksum=checksum,
        writable=writable,
        timeout_s=given["timeout"],
        reconnect_s=given["reconnect"],
        who=f"pid {os.getpid()} on {os.uname().nodename}",
    )
    # Opened last. The consumer's thread closes it when it ends.
    security = Security(None if keys is None else ClientKeys.from_directory(keys))

    # The I/O loop asks for a connection each time that it tries an address, and knows no keys.
    loop = ClientLoop(
        options, lambda address: Connection(security, parse(address), _MAX_FRAME_BYTES), position,
        security.close, landing,
    )  # fmt: skip
    try:
        return Consumer(loop, position, folder, None if landing is not None else function)
    except RuntimeError:
        security.close()  # Its thread could not be started.
        raise


def _position(resume: Any) -> bytes:
    """Return the bytes of the position that `resume` names."""
    # Imported here, since only consumers that resume need the store of checkpoints.
    from feeder.checkpoint.resuming import find_position

    position = find_position(resume, None).position
    assert position is not None
    return bytes(position)


def _facts(batch: Batch) -> tuple[int, Sequence[int]]:
    """The seed and the axes of the stream that a batch is of, as the server has told them."""
    place: Any = batch.place
    told = place.identity.fingerprint
    return told["seed"], told["batch_columns"]


def _landing(
    device: Any, stream: Any, credit: int, hold: int, function: OnDevice | None
) -> Landing | None:
    """Return the GPU of that name; None for "cpu"."""
    if device == "cpu":
        if stream is not None:
            raise ConfigError(f"stream is {stream!r}, but device is 'cpu'; leave it out")
        return None
    if not isinstance(device, str) or not is_gpu(device):
        raise ConfigError(
            f"device is {device!r}, expected 'cpu', 'cuda:<number>' or 'torch:<number>'"
        )
    driver = open_driver(device)
    return Landing(driver, depth=credit, hold=hold, stream=stream, on_device=function)


def _check_together(given: Mapping[str, Any]) -> None:
    credit, hold, skip = given["credit"], given["hold"], given["skip"]
    # The bounds of the wire protocol, said here so that the error has the argument's name.
    if credit > 1024 or hold > 1024:
        raise ConfigError(f"credit is {credit} and hold {hold}, expected at most 1024 each")
    if skip and given["rejoin"]:
        raise ConfigError(
            f"skip is {skip!r} with rejoin=True: rounds are left out where all trainers start, and "
            "not by one that comes back"
        )


def _addresses(addresses: Any) -> list[Address]:
    # The launcher may name the servers for all trainers at once; a single host needs no name.
    if addresses is None:
        named = os.environ.get("FEEDER_ADDRESSES", "")
        return [parse(text) for text in named.split(",")] if named else [default_address()]
    texts = [addresses] if isinstance(addresses, str) else addresses
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"addresses is {addresses!r}, expected a text or a list of texts")
    return [parse(text) for text in texts]


def _name(feed: Any) -> str:
    if not isinstance(feed, str) or not feed.isprintable() or len(feed) > 1024:
        raise ConfigError(f"feed is {feed!r}, expected the name of a feed, or '' for the only one")
    return feed


def _queue(addresses: Sequence[Address]) -> int:
    """Return the queue that the launcher's environment names.

    If the servers are on this host it is the number among this node's trainers, otherwise among
    all: two nodes' first trainers must not ask one server for the same queue.
    """
    return queue_of(os.environ, is_near=_is_near(addresses)).number


def _is_near(addresses: Sequence[Address]) -> bool:
    """Whether all servers are on this host."""
    return all(one.is_loopback or is_this_host(one.host) for one in addresses)
