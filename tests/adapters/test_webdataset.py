"""Names of shards: what the library of their layout makes of braces.

Its samples in its order are those of `adapters.formats`.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.sources.arguments import list_files
from needs import needs_framework

needs_framework("webdataset")


@given(st.lists(st.sampled_from([
    *("{00..03}", "{3..1}", "{a,b}", "{1,{2,3}}", "{0..10..5}", "{,x}", "x", "-", "{1}", "{}"),
    *("{-1..1}", "{01..3}", "{5..1..2}", "{a,b{1..2}c}", "{-05..5..5}", "{{1..2}}", ","),
    *("{a..c}", "{f..b..2}", "{A..B}"),
]), max_size=4).map("".join))  # fmt: skip
def test_braces_name_what_its_own_name(pattern: str) -> None:
    import braceexpand

    found = list_files(f"no such folder/{pattern}", "a file")
    assert found == list(braceexpand.braceexpand(f"no such folder/{pattern}"))
