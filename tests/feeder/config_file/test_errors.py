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

WRONG = {
    "section": ("[servre]\n", "feed.toml:1: unknown table 'servre': did you mean 'server'"),
    "key of the server": (
        "[server]\nlease = 3\nqueus = 2\n",
        "feed.toml:3: unknown key in [server] 'queus': did you mean 'queues'",
    ),
    "key of a feed": (
        FEED + "\nbatchsize = 3\n",
        "feed.toml:6: unknown key in [feeds.train] 'batchsize': did you mean 'batch_size'",
    ),
    "name of the original": (
        FEED + 'fetch_fun = "filed_feeds:fetch"\n',
        "feed.toml:5: unknown key in [feeds.train] 'fetch_fun': did you mean 'fetch'",
    ),
    "key like none": (
        "[server]\nxyzzy = 2\n",
        "feed.toml:2: unknown key in [server] 'xyzzy': expected one of addresses, ",
    ),
    "section that is no table": ("server = 3\n", "feed.toml:1: server is 3, expected a table"),
    "feed that is no table": ("[feeds]\nx = 3\n", "feed.toml:2: feeds.x is 3, expected a table"),
    "feeds in an array": ("[[feeds]]\n", "feed.toml:1: feeds is [{}], expected a table"),
    "options that are no table": (
        FEED + "options = 3\n",
        "feed.toml:5: feeds.train.options is 3, expected a table",
    ),
    "option of a function": (
        FEED + "source = 'filed_feeds:make'\noptions.rows = 4\noptions.stpo = 3\n",
        "feed.toml:7: unknown option 'stpo': did you mean 'stop'",
    ),
    "option of a source": (
        FEED + "source = 'tokens'\n[feeds.train.options]\npaht = 'x'\n",
        "feed.toml:7: unknown option 'paht': did you mean 'path'",
    ),
    "error of two lines": (
        FEED + "source = 'filed_feeds:make_verbosely'\n",
        "feed.toml:5: source 'filed_feeds:make_verbosely' raised OSError: no such disk look, at ",
    ),
    "type of a count": (
        FEED.replace("8", '"8"'),
        "feed.toml:4: batch_size is '8', expected a whole number",
    ),
    "type of a flag": (
        "[server]\ninsecure = 1\n",
        "feed.toml:2: insecure is 1, expected true or false",
    ),
    "type of a list": (
        FEED.replace('["x"]', "[1]"),
        "feed.toml:3: input_blob_names is [1], expected a list of texts",
    ),
    "type of one of several": (
        FEED + "devices = 0.5\n",
        "feed.toml:5: devices is 0.5, expected a whole number or a text or a list of texts",
    ),
    "missing key": (
        "[feeds.train]\nbatch_size = 3\nfetch = 'filed_feeds:fetch'\n",
        "feed.toml:1: input_blob_names is missing, expected a list of texts",
    ),
    "nothing to fetch with": (
        FEED,
        "feed.toml:2: neither fetch nor source is given: name a function, MODULE:ATTR",
    ),
    "value out of range": (
        FEED + "fetch = 'filed_feeds:fetch'\nepochs = 0\n",
        "feed.toml:6: epochs is 0, expected a whole number >= 1",
    ),
    "choice": (
        FEED + "fetch = 'filed_feeds:fetch'\nlast_batch = 'kep'\n",
        "feed.toml:6: last_batch is 'kep', expected one of ('keep', ",
    ),
    "option of two names": (
        FEED + "order = 'arrival'\nsource = 'arrays'\n"
        "options.columns = 'x.npy'\noptions.order = 'wild'\n",
        "feed.toml:8: order is 'wild', expected one of ",
    ),
    "fetch and source": (
        FEED + "fetch = 'filed_feeds:fetch'\nsource = 'arrays'\n",
        "feed.toml:6: source is 'arrays' and fetch is 'filed_feeds:fetch': give one of them",
    ),
    "options of a fetch function": (
        FEED + "fetch = 'filed_feeds:fetch'\noptions.crop = 3\n",
        "feed.toml:6: crop is an option of a source, and fetch is 'filed_feeds:fetch', which",
    ),
    "contradiction": (
        FEED + "fetch = 'filed_feeds:fetch'\nlast_batch = 'drop'\ndont_rebatch = true\n",
        "feed.toml:6: last_batch is 'drop': with dont_rebatch every chunk is a batch",
    ),
    "source that there is not": (
        FEED + "source = 'array'\n",
        "feed.toml:5: unknown source 'array': did you mean 'arrays', or MODULE:ATTR",
    ),
    "option that there is not": (
        FEED + "source = 'arrays'\noptions.columns = 'x.npy'\noptions.num_shard = 2\n",
        "feed.toml:7: unknown option 'num_shard': did you mean 'num_shards'",
    ),
    "option that is missing": (
        FEED + "source = 'image_folder'\n",
        "feed.toml:5: source 'image_folder': missing a required argument: 'path'",
    ),
    "file that is missing": (
        FEED + "source = 'arrays'\noptions.columns = 'y.npy'\n",
        "feed.toml:6: 'y.npy' cannot be read as arrays: ",
    ),
    "maker that fails": (
        FEED + "source = 'filed_feeds:make_wrongly'\n",
        "feed.toml:5: source 'filed_feeds:make_wrongly' raised OSError: no such disk, at ",
    ),
    "no name": (
        FEED + "fetch = 'filed_feeds'\n",
        "feed.toml:5: fetch is 'filed_feeds': 'filed_feeds' is not MODULE:ATTR, ",
    ),
    "module": (
        FEED + "fetch = 'no_such_module:fetch'\n",
        "feed.toml:5: fetch is 'no_such_module:fetch': no module 'no_such_module', expected "
        "MODULE:ATTR, as in 'package.feeds:make'; looked for in ",
    ),
    "attribute": (
        FEED + "fetch = 'filed_feeds:fecth'\n",
        "feed.toml:5: fetch is 'filed_feeds:fecth': 'filed_feeds' has no attribute 'fecth', ",
    ),
    "what is not called": (
        FEED + "fetch = 'filed_feeds:number'\n",
        "feed.toml:5: fetch_fun is 7, expected a function",
    ),
    "what cannot be put back": (
        FEED + "fetch = 'filed_feeds:stateful'\n",
        "feed.toml:5: fetch is 'filed_feeds:stateful', which cannot be put back: make it fetch(",
    ),
    "logger": (
        FEED + "fetch = 'filed_feeds:fetch'\nexternal_loggers = ['filed_feeds:number']\n",
        "feed.toml:6: external_loggers is [7], expected objects with log(dict)",
    ),
}


CHECKPOINT_WRONG = {
    "key": (
        "[checkpoint]\ndir = 'x'\n",
        "feed.toml:2: unknown key in [checkpoint] 'dir': expected one of every_s, keep, resume, ",
    ),
    "number kept": (
        "[checkpoint]\nurl = 'x'\nkeep = 0\n",
        "feed.toml:3: keep is 0, expected a whole number from 1 on, or None",
    ),
    "period": (
        "[checkpoint]\nurl = 'x'\nevery_s = 0\n",
        "feed.toml:3: every_s is 0.0 s, expected more than 0",
    ),
    "period without a place": (
        "[checkpoint]\nevery_s = 3\n",
        "feed.toml:2: every_s is 3.0, and url does not say where to store",
    ),
    "newest without a place": (
        "[checkpoint]\nresume = 'latest'\n",
        "feed.toml:2: resume is 'latest', and nothing says of which checkpoints: give url, or "
        "--checkpoint-dir",
    ),
}


@pytest.mark.parametrize(("text", "says"), CHECKPOINT_WRONG.values(), ids=CHECKPOINT_WRONG)
def test_what_is_wrong_about_checkpoints_is_told_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_checkpointing(read(text).checkpoint)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(("text", "says"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_coordinator(read(text))
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


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
