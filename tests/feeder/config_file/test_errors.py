"""What is told about a configuration that is wrong: what, in which line, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from feeder.config_file.build import build_checkpointing, build_coordinator, locating
from feeder.errors import ConfigError
from feedfiles import FEED, folder, read

__all__ = ["folder"]
pytestmark = pytest.mark.usefixtures("folder")

# ---- what is wrong

AFTER_A_FEED = [
    ("\nbatchsize = 3", "6: unknown key in [feeds.train] 'batchsize': did you mean 'batch_size'"),
    ("options = 3", "5: feeds.train.options is 3, expected a table"),
    (
        "source = 'filed_feeds:make'\noptions.rows = 4\noptions.stpo = 3",
        "7: unknown option 'stpo': did you mean 'stop'",
    ),
    (
        "source = 'filed_feeds:make_verbosely'",
        "5: source 'filed_feeds:make_verbosely' raised OSError: no ",
    ),
    ("devices = 0.5", "5: devices is 0.5, expected a whole number or a text or a list of texts"),
    ("", "2: neither fetch nor source is given: name a function, MODULE:ATTR"),
    ("fetch = 'filed_feeds:fetch'\nepochs = 0", "6: epochs is 0, expected a whole number >= 1"),
    (
        "fetch = 'filed_feeds:fetch'\nlast_batch = 'kep'",
        "6: last_batch is 'kep', expected one of ('keep', ",
    ),
    (
        "order = 'arrival'\nsource = 'arrays'\noptions.columns = 'x.npy'\noptions.order = 'wild'",
        "8: order is 'wild', expected one of ",
    ),
    (
        "fetch = 'filed_feeds:fetch'\nsource = 'arrays'",
        "6: source is 'arrays' and fetch is 'filed_feeds:fetch': give",
    ),
    (
        "fetch = 'filed_feeds:fetch'\noptions.crop = 3",
        "6: crop is an option of a source, and fetch is ",
    ),
    (
        "fetch = 'filed_feeds:fetch'\nlast_batch = 'drop'\ndont_rebatch = true",
        "6: last_batch is 'drop': with dont_rebatch every chunk is ",
    ),
    ("source = 'array'", "5: unknown source 'array': did you mean 'arrays', or MODULE:ATTR"),
    (
        "source = 'arrays'\noptions.columns = 'x.npy'\noptions.num_shard = 2",
        "7: unknown option 'num_shard': did you mean 'num_shards'",
    ),
    ("source = 'image_folder'", "5: source 'image_folder': missing a required argument: 'path'"),
    ("source = 'arrays'\noptions.columns = 'y.npy'", "6: 'y.npy' cannot be read as arrays: "),
    ("fetch = 'filed_feeds'", "5: fetch is 'filed_feeds': 'filed_feeds' is not MODULE:ATTR, "),
    (
        "fetch = 'no_such_module:fetch'",
        "5: fetch is 'no_such_module:fetch': no module ",
    ),
    ("fetch = 'filed_feeds:fecth'", "5: fetch is 'filed_feeds:fecth': 'filed_feeds' has no "),
    ("fetch = 'filed_feeds:number'", "5: fetch_fun is 7, expected a function"),
    (
        "fetch = 'filed_feeds:stateful'",
        "5: fetch is 'filed_feeds:stateful', which cannot be put back",
    ),
    (
        "fetch = 'filed_feeds:fetch'\nexternal_loggers = ['filed_feeds:number']",
        "6: external_loggers is [7], expected objects with log(dict)",
    ),
]
"""Lines after a feed, which has four, and what is told of them: in which line, and what."""

WHOLE = [
    ("[servre]\n", "1: unknown table 'servre': did you mean 'server'"),
    (
        "[server]\nlease = 3\nqueus = 2\n",
        "3: unknown key in [server] 'queus': did you mean 'queues'",
    ),
    ("[server]\nxyzzy = 2\n", "2: unknown key in [server] 'xyzzy': expected one of addresses, "),
    ("server = 3\n", "1: server is 3, expected a table"),
    ("[feeds]\nx = 3\n", "2: feeds.x is 3, expected a table"),
    ("[[feeds]]\n", "1: feeds is [{}], expected a table"),
    (
        '\n[feeds.train]\ninput_blob_names = ["x"]\nbatch_size = "8"\n',
        "4: batch_size is '8', expected a whole number",
    ),
    (
        "\n[feeds.train]\ninput_blob_names = [1]\nbatch_size = 8\n",
        "3: input_blob_names is [1], expected a list of texts",
    ),
    (
        "[feeds.train]\nbatch_size = 3\nfetch = 'filed_feeds:fetch'\n",
        "1: input_blob_names is missing, expected a list of texts",
    ),
]

OF_CHECKPOINTS = [
    ("dir = 'x'", "2: unknown key in [checkpoint] 'dir': expected one of every_s, keep, resume, "),
    ("url = 'x'\nkeep = 0", "3: keep is 0, expected a whole number from 1 on, or None"),
    ("url = 'x'\nevery_s = 0", "3: every_s is 0.0 s, expected more than 0"),
    ("every_s = 3", "2: every_s is 3.0, and url does not say where to store"),
    ("resume = 'latest'", "2: resume is 'latest', and nothing says of which checkpoints: give ur"),
]
"""Lines of the table of checkpoints."""


@pytest.mark.parametrize(
    ("text", "says"), [*WHOLE, *((FEED + text, told) for text, told in AFTER_A_FEED)]
)
def test_what_is_wrong_is_told_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_coordinator(read(text))
    assert str(caught.value).startswith(f"feed.toml:{says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "says"), OF_CHECKPOINTS)
def test_what_is_wrong_about_checkpoints_is_told_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_checkpointing(read(f"[checkpoint]\n{text}").checkpoint)
    assert str(caught.value).startswith(f"feed.toml:{says}")


def test_a_module_that_fails_is_told_with_place_and_search_path(folder: Path) -> None:
    Path("filed_broken.py").write_text("x = 1\nx.y\n")
    Path("filed_garbled.py").write_text("x = (\n")
    text = FEED + "fetch = 'filed_{}:fetch'\n"
    for name, line, error in (
        ("broken", 2, "AttributeError: 'int' object has no attribute 'y'"),
        ("garbled", 1, "SyntaxError: '(' was never closed"),
    ):
        with pytest.raises(ConfigError) as caught:
            build_coordinator(read(text.format(name)))
        assert str(caught.value).startswith(
            f"feed.toml:5: fetch is 'filed_{name}:fetch': module 'filed_{name}' cannot be "
            f"imported: {error}, at {folder}/filed_{name}.py:{line}; modules are in "
        )


def test_an_error_about_a_value_is_placed_where_the_value_is() -> None:
    table = read("[server]\nlease = 3\naddresses = ['tcp://127.0.0.1:1']\n").server
    with pytest.raises(ConfigError, match=r"^feed.toml:3: cannot listen at "), locating(table):
        raise ConfigError("cannot listen at 'tcp://127.0.0.1:1'")
    with pytest.raises(ConfigError, match=r"^something else$"), locating(table):
        raise ConfigError("something else")
