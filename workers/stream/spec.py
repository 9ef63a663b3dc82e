"""What defines a stream, and what only says how it is run.

The two stand apart because the first is compared when a stream is resumed, and the second may be
anything then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from feeder.workers.errors import ResumeError
from feeder.workers.stream.batch import Call
from feeder.workers.stream.position import Partitions

# The values are part of the fingerprint: a renamed one would refuse every old token.
LastBatch = Literal["keep", "drop", "pad", "carry"]
LastRound = Literal["uneven", "drop", "pad"]
Rounds = Literal["stream", "epoch"]
Order = Literal["ticket", "arrival"]


FILE_ORDER = "file_order"
"""The field in which a source says which files it reads in which order. Older positions have none,
and are good without it."""


class StreamSpec(NamedTuple):
    """From these follows the sequence of batches, bit for bit."""

    fetch: Callable[..., Any]
    """The fetch function."""
    pure: bool
    """Whether it is called as `fetch(call)`, else as `fetch(worker_id, batch_size)`."""
    # Both or none: with one alone a worker could not be put back to where it is known to stand.
    cursor: Callable[[int], Any] | None
    """Tells where a worker stands: `cursor(worker_id)`; None where the fetch function cannot."""
    seek: Callable[[int, Any], Any] | None
    """Puts a worker there: `seek(worker_id, cursor)`."""
    names: tuple[str, ...]
    """The input names."""
    axes: tuple[int, ...]
    """The row axis of each input."""
    batch_size: int
    """Rows per batch."""
    num_workers: int
    """Number of worker ids."""
    first_worker_id: int
    """The smallest of them."""
    seed: int
    """Seed of all randomness, from 0 to 2**64 - 1."""
    epochs: int | None
    """Number of epochs; None is without end."""
    last_batch: LastBatch
    """What becomes of the rows at the end of an epoch that do not fill a batch."""
    last_round: LastRound
    """What becomes of the batches at the end of a stream, or of an epoch where rounds end with it,
    that do not make a round."""
    order: Order
    """Whether chunks are merged in ticket order or as they arrive."""
    dont_rebatch: bool
    """Whether each chunk is one batch."""
    repeatable: bool
    """Whether the fetch function gives the same rows again when it is asked again."""
    rounds: Rounds = "stream"
    """Whether rounds go on from one epoch into the next, or begin anew in each."""
    global_batch_size: int | None = None
    """Rows of a round of all queues, where the size of a batch follows from it; else None."""

    @property
    def rows_asked(self) -> int:
        """Rows that the fetch function is asked for at each call."""
        # A round, where only rounds stay the same with another number of queues: what a call gives
        # must not depend on that number.
        return self.global_batch_size or self.batch_size

    @property
    def seekable(self) -> bool:
        """Whether the fetch function can be put back by a cursor."""
        return self.cursor is not None

    @property
    def worker_ids(self) -> range:
        """The worker ids of the stream."""
        return range(self.first_worker_id, self.first_worker_id + self.num_workers)

    @property
    def ignores_worker_ids(self) -> bool:
        """Whether the stream is the same whatever the worker ids of its calls are. A source says
        so of itself: what it returns follows from the index of a call alone."""
        # Then the number of workers may change between a run and its resume.
        return self.pure and bool(getattr(self.fetch, "ignores_worker_ids", False))

    @property
    def worker_fields(self) -> dict[str, Any]:
        """The fields of the fingerprint that say which worker ids there are."""
        return {"num_worker_threads": self.num_workers, "first_worker_id": self.first_worker_id}

    def worker_id(self, partition: int, number: int) -> int:
        """The worker id of a call: of the pure form by its index, else by its partition."""
        # By the index, so that the number of threads changes no worker id.
        return self.first_worker_id + (number % self.num_workers if self.pure else partition)

    def call(self, epoch: int, index: int) -> Call:
        """A call of a pure fetch function."""
        return Call(index, epoch, self.worker_id(0, index), self.rows_asked, self.seed)

    def not_repeatable(self, worker_id: int, call: int, what: str) -> ResumeError:
        """The error of a fetch function that gives something else than it gave before."""
        if self.seekable:
            cure = (
                "make it give these rows again after seek(worker_id, cursor), or make the feed "
                "with repeatable=False, whose states hold them, too"
            )
        elif self.pure:
            cure = "or make it repeat itself; a source needs the data that it had"
        else:
            cure = (
                "give the function cursor(worker_id) and seek(worker_id, cursor), or make it "
                "repeat itself"
            )
        return ResumeError(
            f"fetch function is not deterministic: worker {worker_id}, call {call}: {what}; resume "
            f"from a snapshot, which holds the rows left over, {cure}"
        )

    def fingerprint(self) -> dict[str, Any]:
        """The declared fields that must be equal for a position to fit the stream."""
        form = "pure" if self.pure else "seek" if self.seekable else "replay"
        size = "batch_size" if self.global_batch_size is None else "global_batch_size"
        # Left out where it is as it always was, so that older positions stay valid.
        rounds = {} if self.rounds == "stream" else {"rounds": self.rounds}
        return {
            "form": form,
            "names": list(self.names),
            "batch_columns": list(self.axes),
            size: self.rows_asked,
            **({} if self.ignores_worker_ids else self.worker_fields),
            "seed": self.seed,
            "last_batch": self.last_batch,
            "last_round": self.last_round,
            "order": self.order,
            "dont_rebatch": self.dont_rebatch,
            **rounds,
        }


class CallNames(NamedTuple):
    """How a user knows the calls of a stream: errors name them so."""

    spec: StreamSpec
    partitions: Partitions

    def of_call(self, partition: int, call: int) -> tuple[int, int]:
        """Worker id and call number of a partition's call."""
        return self.spec.worker_id(partition, call), call


class Executor(Protocol):
    """Where the fetch function of a feed is run; its streams follow one after the other. Frozen."""

    def begin(self, spec: StreamSpec, run: RunSpec) -> Any:
        """A stream begins: its `pipeline.Execution`. Nothing runs before that is started."""

    def of(self, fetch: Callable[..., Any]) -> Executor:
        """The same for another fetch function."""


class Part(NamedTuple):
    """The queues whose batches a run makes, where others are made elsewhere (`parts`)."""

    first: int
    stop: int
    """The first one after them."""
    num: int
    """All queues."""

    def has(self, queue: int) -> bool:
        """Whether a queue is one of them."""
        return self.first <= queue < self.stop

    def __str__(self) -> str:
        one = self.first + 1 == self.stop
        some = f"queue {self.first}" if one else f"queues {self.first} to {self.stop - 1}"
        return f"{some} of {self.num}"


class RunSpec(NamedTuple):
    """How a stream is run: none of it changes a batch."""

    num_threads: int
    """Fetcher threads."""
    max_rows: int
    """Rows buffered at most, from a call's return until they are handed out."""
    max_bytes: int
    """Bytes buffered at most, the chunks of calls under way included."""
    guess_bytes: int
    """Bytes that a chunk is taken for until one has been seen."""
    # Without a guess, many workers would begin with chunks that together are above the bound.
    timeout_s: float
    """Seconds for which a fetch function may give nothing while a batch is waited for."""
    retries: int
    """How often a call that raised is made again."""
    retry_backoff_s: float
    """Seconds before the first retry; doubled for each further one."""
    writable: bool
    """Whether batches are private writable copies."""
    debug: bool
    """Whether chunks are checked for changes after they were returned, and pure fetch functions
    called again."""
    encode_cursor: Callable[[Any], bytes]
    """Turns a cursor into bytes; called in the fetcher thread."""
    decode_cursor: Callable[[bytes], Any]
    """The reverse of `encode_cursor`."""
    rows_per_call: int | None = None
    """Rows that each call of a pure function gives, an epoch's last excepted; None where it may
    give any number. Known rows have a known place: the call may write them there."""
    executor: Executor | None = None
    """Runs the fetch function elsewhere; None where the fetcher threads do."""
    part: Part | None = None
    """The queues whose batches are made; None for those of all."""
