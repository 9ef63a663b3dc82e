"""Examples of TensorFlow in TFRecord files: the features that TensorFlow itself reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from feeder.workers.sources.stores.example import parse_example
from feeder.workers.sources.stores.wire import WireError
from needs import needs_framework

needs_framework("tensorflow")

features = st.one_of(
    st.fixed_dictionaries({"bytes_list": st.fixed_dictionaries({"value": st.lists(st.binary())})}),
    st.fixed_dictionaries({
        "float_list": st.fixed_dictionaries({"value": st.lists(st.floats(width=32))})
    }),
    st.fixed_dictionaries({
        "int64_list": st.fixed_dictionaries({
            "value": st.lists(st.integers(-(2**63), 2**63 - 1))
        })
    }),
    st.just({}),
)  # fmt: skip
names = st.text(max_size=3)


def read(feature: Any) -> Any:
    """What a feature of TensorFlow's is, as we give it."""
    kind = feature.WhichOneof("kind")
    values = [] if kind is None else [*getattr(feature, kind).value]
    if kind == "bytes_list":
        return values[0] if len(values) == 1 else values
    return np.array(values, np.int64 if kind == "int64_list" else np.float32)


def same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(ours, list) and not all(isinstance(one, bytes) for one in theirs):
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert ours == theirs


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(names, features, max_size=3),
    st.none() | st.dictionaries(names, st.lists(features, max_size=3), max_size=3),
    st.dictionaries(names, features, max_size=2),
)
def test_features_are_those_of_tensorflow(context: Any, lists: Any, more: Any) -> None:
    import tensorflow as tf

    def message(features: Any) -> Any:
        made = {name: tf.train.Feature(**feature) for name, feature in features.items()}
        return tf.train.Features(feature=made)

    if lists is None:
        example = tf.train.Example(features=message(context))
        # Joined messages are one message.
        data = example.SerializeToString()
        data += tf.train.Example(features=message(more)).SerializeToString()
        wanted = tf.train.Example.FromString(data).features.feature
        parsed = parse_example(data)
        assert parsed.keys() == dict(wanted).keys()
        for name, feature in wanted.items():
            same(parsed[name], read(feature))
        return
    steps = {
        name: tf.train.FeatureList(feature=[tf.train.Feature(**one) for one in given])
        for name, given in lists.items()
    }
    sequence = tf.train.SequenceExample(
        context=message(context), feature_lists=tf.train.FeatureLists(feature_list=steps)
    )
    try:
        parsed = parse_example(sequence.SerializeToString())
    except WireError:
        assert context.keys() & lists.keys()
        return
    assert parsed.keys() == context.keys() | lists.keys()
    for name, feature in sequence.context.feature.items():
        same(parsed[name], read(feature))
    for name, listed in sequence.feature_lists.feature_list.items():
        same(parsed[name], [read(feature) for feature in listed.feature])
