"""TensorFlow: data sets of a loader, and positions of the batch that was used."""

from __future__ import annotations

import gc
import json
import os
import warnings
import weakref
from collections import namedtuple
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from needs import needs_framework

needs_framework("tensorflow")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with warnings.catch_warnings():
    # What the libraries' own imports say is not ours.
    warnings.simplefilter("ignore")
    import tensorflow as tf

    from feeder.adapters.tensorflow import FeedCallback, FeedLoader, FeedState, dataset

import feeder
from adapters.examples import printed
from adapters.tf_programs import differences, draw
from small import Pure, make

pytestmark = pytest.mark.filterwarnings("ignore")

NUM, SIZE, EPOCHS = 22, 4, 3
STEPS = -(-NUM // SIZE)
Pair = namedtuple("Pair", "x y")


@pytest.fixture(autouse=True, scope="module")
def warm_tensorflow() -> None:
    """TensorFlow keeps what it starts for its first data set."""
    list(tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec(())))


class Numbers:
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Any:
        return {"i": i, "x": np.full(3, i, np.float32)}


def loader(**settings: Any) -> FeedLoader:
    return FeedLoader(Numbers(), SIZE, shuffle=True, **settings)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["i"].numpy().tolist() for batch in batches]


def epochs(loader: FeedLoader, batches: Any) -> list[list[int]]:
    seen = []
    while loader.epoch < EPOCHS:
        seen += numbers(batches)
    return seen


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    with loader() as one:
        return [b["i"].tolist() for _ in range(EPOCHS) for b in one]


# ---- batches


def test_a_loop_over_the_data_set_is_an_epoch(whole: list[list[int]]) -> None:
    one = loader()
    assert epochs(one, dataset(one)) == whole
    assert sorted(i for batch in whole[:STEPS] for i in batch) == list(range(NUM))
    assert whole[:STEPS] != whole[STEPS : 2 * STEPS]
    two = loader()
    assert numbers(dataset(two).repeat(EPOCHS)) == whole


def test_batches_have_the_structure_of_the_samples() -> None:
    def sample(i: int) -> Any:
        one = np.array(i, tf.bfloat16.as_numpy_dtype)
        return Pair({"a": one, "t": f"é{i}"}, (np.zeros((2, i and 2), np.uint8), [i, 0.5]))

    one = FeedLoader([sample(i) for i in range(1, 6)], 2)
    batches = dataset(one)
    (a, b, _) = batches
    assert type(a) is Pair
    assert (a.x["a"].dtype, a.x["a"].numpy().tolist()) == (tf.bfloat16, [1, 2])
    assert [text.decode() for text in b.x["t"].numpy()] == ["é3", "é4"]
    assert batches.element_spec.y[0] == tf.TensorSpec((None, 2, 2), tf.uint8)
    assert a.y[1][0].numpy().tolist() == [1, 2]


def test_equal_shapes_are_told_to_the_compiler() -> None:
    batches = dataset(loader(drop_last=True))
    assert batches.element_spec["x"] == tf.TensorSpec((SIZE, 3), tf.float32)
    assert len(list(batches)) == NUM // SIZE


def test_rows_of_other_lengths_need_a_signature() -> None:
    def pad(samples: list[Any]) -> Any:
        longest = max(map(len, samples))
        return np.stack([np.pad(sample, (0, longest - len(sample))) for sample in samples])

    def make() -> FeedLoader:
        return FeedLoader([np.ones(i + 1, np.int64) for i in range(6)], 2, collate_fn=pad)

    batches = dataset(make(), signature=tf.TensorSpec((None, None), tf.int64))
    assert [batch.shape[1] for batch in batches] == [2, 4, 6]
    with pytest.raises((TypeError, tf.errors.InvalidArgumentError), match="shape"):
        list(dataset(make()))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(feeder.ConfigError, match="None in it"):
        dataset(FeedLoader([1, 2], 2, collate_fn=lambda samples: {"x": None}))
    with pytest.raises(feeder.ConfigError, match="batch_size is None"):
        FeedLoader(Numbers())


def test_a_feed_has_its_own_order() -> None:
    coordinator = make(Pure(3, 4), epochs=2)
    with pytest.raises(feeder.ConfigError, match="shuffle is True: a feed has its own"):
        FeedLoader(coordinator, shuffle=True)


def test_a_loader_lives_as_long_as_its_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else the fixture keeps it.
    monkeypatch.undo()
    one = loader()
    gone = weakref.ref(one)
    batches = iter(dataset(one).map(lambda batch: batch["i"]).prefetch(1))
    del one
    gc.collect()
    assert len(list(batches)) == STEPS
    del batches
    gc.collect()
    assert gone() is None


# ---- positions


def test_the_trainer_may_say_it_in_a_compiled_loop(whole: list[list[int]]) -> None:
    first = loader()
    state, total = FeedState(first), tf.Variable(0, dtype=tf.int64)
    batches = dataset(first, steps=True).prefetch(4)

    @tf.function
    def train() -> None:
        for step, batch in batches:
            total.assign_add(tf.reduce_sum(batch["i"]))
            state.used.assign(step)
            if step >= 3:
                break

    train()
    assert int(total) == sum(map(sum, whole[:3]))
    second = loader()
    FeedState(second).deserialize(state.serialize())
    assert epochs(second, dataset(second)) == whole[3:]


def test_a_state_that_nobody_told_is_no_state(tmp_path: Path) -> None:
    one = loader()
    checkpoint = tf.train.Checkpoint(feed=FeedState(one))
    checkpoint.save(tmp_path / "before")
    list(dataset(one).take(2))
    with pytest.raises(feeder.ConfigError, match="FeedState was not told which were used"):
        checkpoint.save(tmp_path / "after")


def test_workers_share_one_order_with_any_number_of_them(
    monkeypatch: pytest.MonkeyPatch, whole: list[list[int]]
) -> None:
    def workers(num: int) -> list[FeedLoader]:
        made = []
        for number in range(num):
            hosts = {"chief": ["a:1"], "worker": [f"b:{n}" for n in range(num - 1)], "ps": ["c:1"]}
            task = {"type": "worker", "index": number - 1} if number else {"type": "chief"}
            monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": hosts, "task": task}))
            made.append(loader())
        return made

    two = workers(2)
    seen = [next(iter(dataset(one)))["i"].numpy().tolist() for one in two]
    state = two[1].state_dict(used=1)
    three = workers(3)
    for one in three:
        one.load_state_dict(state)
        seen.append(next(iter(dataset(one)))["i"].numpy().tolist())
    assert seen == whole[:5]
    monkeypatch.setenv("TF_CONFIG", "[")
    with pytest.raises(feeder.ConfigError, match="TF_CONFIG is"):
        loader()


# ---- random jobs, and what is refused


@pytest.mark.timeout(120)
def test_random_jobs_go_on_as_if_nobody_had_killed_them(tmp_path: Path) -> None:
    drawn = [draw(Random(f"5 {number}")) for number in range(200)]
    for way in ("repeat", "fit", "fit steps", "each"):
        # The shortest of its kind; with two epochs or more, in which there are ends.
        jobs = [c for c in drawn if c.way == way and c.most_epochs > 1 and c.data.kind != "served"]
        (tmp_path / way).mkdir()
        least = min(jobs, key=lambda c: c.data.num / c.data.size)
        assert differences(least, tmp_path / way)[0] > 1


def fit(*more: Any, num_epochs: int = 1, at: int = 0, **named: Any) -> None:
    one = loader()
    feed = FeedState(one)
    for _ in range(at):
        next(iter(dataset(one)))
    feed.used.assign(at)
    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile(loss="mse", steps_per_execution=named.pop("steps_per_execution", 1))
    batches = dataset(one).map(lambda batch: (batch["x"], batch["i"]))
    model.fit(batches, epochs=num_epochs, callbacks=[FeedCallback(feed), *more], verbose=0, **named)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: fit(steps_per_execution=2), "steps_per_execution=2, expected 1"),
        (lambda: fit(tf.keras.callbacks.BackupAndRestore("x")), "BackupAndRestore keeps weights"),
        (lambda: fit(steps_per_epoch=STEPS + 1), f"after {STEPS} of {STEPS + 1} steps of epoch 0"),
        (lambda: fit(steps_per_epoch=5, num_epochs=2, at=1), "after 1 batches, and would use 5"),
    ],
)
def test_what_fit_does_not_tell_is_refused(run: Any, said: str) -> None:
    with pytest.raises(feeder.ConfigError, match=said):
        run()


def test_what_was_looked_at_comes_again_after_a_rewind(whole: list[list[int]]) -> None:
    one = loader(epochs=2)
    state, batches = FeedState(one), dataset(one, steps=True).prefetch(1)
    list(batches.take(1))
    state.rewind()
    assert [b["i"].numpy().tolist() for _, b in batches.repeat()] == whole[: 2 * STEPS]
    assert list(batches) == []


def test_one_batch_again_and_again_needs_a_cache(whole: list[list[int]]) -> None:
    batches = dataset(loader())
    assert numbers(batches.take(1).cache().repeat(3)) == 3 * whole[:1]
    with pytest.raises(tf.errors.OpError, match="begin a new loop"):
        list(batches.take(1).repeat(3))


def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import sys, feeder, feeder.adapters; assert 'tensorflow' not in sys.modules"
    printed("-c", code, limit_s=50.0)
