"""The order options, which every source takes, and the order that they stand for.

Options that users know from other libraries contradict each other in many pairs. They are checked
together once, and become a plan that cannot be wrong; orders are made of plans alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, get_args

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import check_names, flag, whole
from feeder.workers.sources.orders.orders import (
    DALI_LIST_SEED,
    BlockOrder,
    Order,
    PermutedOrder,
    ReshuffledOrder,
    SequentialOrder,
    shuffled_list,
)
from feeder.workers.sources.orders.permutation import MAX_SIZE
from feeder.workers.sources.orders.sharding import Sharding
from feeder.workers.sources.orders.windowed import WindowedOrder

OrderName = Literal["feeder", "dali"]

_DALI_INITIAL_FILL = 1024
_MAX_SEED = 2**64 - 1


@public("feeder.sources")
class OrderOptions(TypedDict, total=False):
    """Keyword arguments of every source that say which record comes when."""

    order: OrderName
    """Whose shuffle: "feeder" (the default), a permutation of all records that is computed where
    it is asked, or "dali", the sequences of DALI 2.x readers. Without a shuffle they are alike."""
    shard_id: int
    """The shard that epoch 0 reads (0)."""
    num_shards: int
    """Number of shards that the records are dealt out to (1)."""
    stick_to_shard: bool
    """Whether each epoch reads the same shard, else epoch e reads `shard_id + e` (False)."""
    pad_last_batch: bool
    """Whether each epoch repeats its last record until it has as many batches as the longest
    shard's, all of them full (False)."""
    random_shuffle: bool
    """Whether the records are shuffled (False)."""
    initial_fill: int
    """Records in the window of DALI's shuffle (1024)."""
    seed: int | None
    """Seed of the shuffle; None takes the feed's (None)."""
    shuffle_after_epoch: bool | Literal["compound"]
    """DALI's other shuffle: the list of records is shuffled for each epoch, the sorted list as
    with `enable_checkpointing`, or with "compound" that of the epoch before, as without (False)."""
    shuffle_after_epoch_seed: int | None
    """Seed of that shuffle; None takes DALI's own (None)."""


ORDER_NAMES = tuple(OrderOptions.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPlan:
    """Checked order options."""

    sharding: Sharding
    order: OrderName
    random_shuffle: bool
    initial_fill: int
    seed: int | None
    shuffle_after_epoch: bool | Literal["compound"]
    shuffle_after_epoch_seed: int
    list_shuffle: bool
    """Whether DALI shuffles the list of records itself before it draws from it (its readers of
    files do)."""
    window: int | None = None
    """Records of a window, where a shuffle keeps together what lies together."""

    def in_windows(self, window: int) -> OrderPlan:
        """The same shuffle within windows of so many records."""
        return replace(self, window=window)

    def resized(self, size: int) -> OrderPlan:
        """The same order of so many records."""
        return replace(self, sharding=replace(self.sharding, num_records=size))

    @property
    def in_sequence(self) -> bool:
        """Whether the records come as they lie."""
        return not (self.random_shuffle or self.shuffle_after_epoch)

    def leaves_out(self, record: int) -> bool:
        """Whether passes to come do not have a record."""
        return False

    def make(self, seed: int) -> Order:
        """The order, with the feed's seed where the options name none."""
        seed = seed if self.seed is None else self.seed
        if self.shuffle_after_epoch:
            compound = self.shuffle_after_epoch == "compound"
            return ReshuffledOrder(self.sharding, self.shuffle_after_epoch_seed, compound)
        if not self.random_shuffle:
            return SequentialOrder(self.sharding)
        if self.window is not None:
            return BlockOrder(self.sharding, seed, self.window)
        if self.order == "feeder":
            return PermutedOrder(self.sharding, seed)
        # As DALI's readers of files do; its readers of databases do not.
        listing = shuffled_list(self.sharding.num_records) if self.list_shuffle else None
        return WindowedOrder(self.sharding, self.initial_fill, seed, listing)

    def fingerprint_fields(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        sharding = self.sharding
        described: dict[str, Any] = {
            "size": sharding.num_records,
            "shard_id": sharding.shard_id,
            "num_shards": sharding.num_shards,
            "stick_to_shard": sharding.stick_to_shard,
            "pad_last_batch": sharding.pad_last_batch,
            "shuffle": self._shuffle(),
        }
        if self.shuffle_after_epoch:
            described["seed"] = self.shuffle_after_epoch_seed
        elif self.random_shuffle:
            described["seed"] = self.seed
            if self.order == "dali":
                described["initial_fill"] = self.initial_fill
            if self.window is not None:
                described["window"] = self.window
        return described

    def _shuffle(self) -> str:
        if self.shuffle_after_epoch:
            compound = self.shuffle_after_epoch == "compound"
            return "dali after epoch, compound" if compound else "dali after epoch"
        if not self.random_shuffle:
            return "none"
        return "dali, of a list" if self.order == "dali" and self.list_shuffle else self.order


def plan_order(num_records: int, options: OrderOptions, *, list_shuffle: bool) -> OrderPlan:
    """Check order options against each other and against the number of records.

    Raises:
        ConfigError: an option is unknown or has a value that it cannot have, or two contradict.
    """
    check_names(options, ORDER_NAMES)
    order = options.get("order", "feeder")
    if order not in get_args(OrderName):
        raise ConfigError(f"order is {order!r}, expected one of {get_args(OrderName)!r}")
    random_shuffle = flag("random_shuffle", options.get("random_shuffle", False))
    after_epoch = options.get("shuffle_after_epoch", False)
    if after_epoch != "compound":
        after_epoch = flag("shuffle_after_epoch", after_epoch)
    stick = flag("stick_to_shard", options.get("stick_to_shard", False))
    if after_epoch:
        _check_after_epoch(order, random_shuffle, stick)
    elif options.get("shuffle_after_epoch_seed") is not None:
        raise ConfigError("shuffle_after_epoch_seed is given without shuffle_after_epoch")
    # The permutation counts in 64 bits.
    if random_shuffle and order == "feeder" and num_records > MAX_SIZE:
        raise ConfigError(
            f"the source holds {num_records} records, expected at most {MAX_SIZE} to shuffle them"
        )
    # Without effect there, and whoever gives it expects DALI's order.
    if "initial_fill" in options and random_shuffle and order != "dali":
        raise ConfigError(
            f"initial_fill is the window of order='dali', and order is {order!r}, which shuffles "
            "all records: leave it out"
        )
    return OrderPlan(
        sharding=Sharding(
            num_records=num_records,
            shard_id=whole("shard_id", options.get("shard_id", 0)),
            num_shards=whole("num_shards", options.get("num_shards", 1), 1),
            # Each shard keeps its share of the list: it is the list that changes.
            stick_to_shard=stick or bool(after_epoch),
            pad_last_batch=flag("pad_last_batch", options.get("pad_last_batch", False)),
        ),
        order=order,
        random_shuffle=random_shuffle,
        initial_fill=whole("initial_fill", options.get("initial_fill", _DALI_INITIAL_FILL), 1),
        seed=_seed("seed", options.get("seed"), order),
        shuffle_after_epoch=after_epoch,
        shuffle_after_epoch_seed=_after_epoch_seed(options),
        list_shuffle=list_shuffle,
    )


def _check_after_epoch(order: OrderName, random_shuffle: bool, stick: bool) -> None:
    if order != "dali":
        raise ConfigError(
            f"shuffle_after_epoch belongs to order='dali', and order is {order!r}, whose "
            "random_shuffle shuffles all records anew in each epoch"
        )
    if random_shuffle:
        raise ConfigError("random_shuffle and shuffle_after_epoch exclude each other: choose one")
    if stick:
        raise ConfigError(
            "stick_to_shard and shuffle_after_epoch exclude each other: a shuffled list leaves no "
            "shard to stick to"
        )


def _after_epoch_seed(options: OrderOptions) -> int:
    seed = _seed("shuffle_after_epoch_seed", options.get("shuffle_after_epoch_seed"), "dali")
    return DALI_LIST_SEED if seed is None else seed


def _seed(name: str, value: Any, order: OrderName) -> int | None:
    if value is None:
        return None
    # -1 is what DALI's readers have by default: it need not be the seed that they draw by.
    if isinstance(value, int) and value < (-1 if name == "seed" else 0) and order == "dali":
        raise ConfigError(
            f"{name} is {value!r}, expected 0 to 2**64 - 1: {value!r} % 2**64 gives DALI's sequence"
        )
    seed = whole(name, value)
    if seed > _MAX_SEED:
        raise ConfigError(f"{name} is {seed!r}, expected 0 to 2**64 - 1")
    return seed
