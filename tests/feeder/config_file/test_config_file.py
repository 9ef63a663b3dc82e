"""Configurations: where keys stand, who comes before whom, and what is told about a wrong one."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

import feeder
from feeder.cli.config import advise
from feeder.config import default_bytes, memory_bytes
from feeder.config_file.build import build_checkpointing, build_coordinator, locating
from feeder.config_file.keys import checkpoint_keys, feed_keys, server_keys
from feeder.config_file.settings import Setting, Settings, show
from feeder.config_file.toml import parse_toml, read_toml
from feeder.errors import ConfigError
from feeder.observe.humanize import size
from feedfiles import FEED, folder, read

__all__ = ["folder"]
pytestmark = pytest.mark.usefixtures("folder")


def values(text: str, environment: Mapping[str, str] | None = None) -> list[list[int]]:
    """The first column of every batch of the feed 'train'."""
    with build_coordinator(read(text, environment)) as coordinator:
        return [batch["x"][:, 0].tolist() for batch in coordinator["train"]]


# ---- where keys stand

LINES = '''# nothing here
[server]
addresses = [
  "tcp://127.0.0.1:1",  # ]
  "x = 3",
]

lease = 3
[feeds.train]
note = """
x = 3
[no]
"""
options = { a = 1, b = { c = 2 } }
deep.er.key = 4
[feeds."my feed".options]
k = 1
'''


def test_every_key_has_a_line() -> None:
    lines = parse_toml("f", LINES).lines
    assert {".".join(path): line for path, line in lines.items()} == {
        "server": 2, "server.addresses": 3, "server.lease": 8, "feeds.train": 9,
        "feeds.train.note": 10, "feeds.train.options": 14, "feeds.train.options.a": 14,
        "feeds.train.options.b": 14, "feeds.train.options.b.c": 14, "feeds.train.deep": 15,
        "feeds.train.deep.er": 15, "feeds.train.deep.er.key": 15,
        "feeds.my feed.options": 16, "feeds.my feed.options.k": 17,
    }  # fmt: skip
    file = parse_toml("f", LINES)
    assert file.where("server", "queues") == "f:2"  # not written: where its table is
    assert file.where("checkpoint") == "f"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = 1\nb = \n", "f:2: invalid value"),
        ("a = 1\n\nb = [1,\n", "f:3: invalid value"),
        ("a = 1\na = 2\nc = 3", "f:2: cannot overwrite a value"),
        ("[a\n", "f:1: expected ']' at the end of a table declaration"),
        ("a = " + 5000 * "[", "f: it is nested too deeply"),
    ],
)
def test_what_is_no_toml_is_told_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        parse_toml("f", text)


def test_a_file_that_cannot_be_read_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^configuration 'none' cannot be read: No such file"):
        read_toml("none")
    Path("binary").write_bytes(b"a = \xff")
    with pytest.raises(ConfigError, match=r"^binary: not UTF-8 at byte 4$"):
        read_toml("binary")


# ---- the keys


def test_keys_are_the_keyword_arguments() -> None:
    of_feed = set(inspect.signature(feeder.init_data_input_workers).parameters)
    theirs = {
        "fetch_fun", "input_source_name", "resume", "coordinator", "transcript", "on_device"
    }  # fmt: skip
    assert set(feed_keys()) == (of_feed - theirs) | {"fetch", "source", "options"}
    of_server = set(inspect.signature(feeder.serve).parameters)
    assert set(server_keys()) == of_server - {"feeds", "checkpoints", "resume"}
    of_store = {
        *inspect.signature(feeder.CheckpointStore).parameters,
        *inspect.signature(feeder.Checkpointing).parameters,
        "resume",
    }
    assert set(checkpoint_keys()) <= of_store


def test_defaults_are_those_of_the_functions() -> None:
    table = read(FEED).feeds["train"]
    parameters = inspect.signature(feeder.init_data_input_workers).parameters
    told = {key: one.value for key, one in table.items() if one.origin == "default"}
    assert told.pop("fetch") is told.pop("source") is None
    assert told == {key: parameters[key].default for key in told}
    assert len(told) > 15


# ---- who comes before whom

LAYERED = "[server]\nqueues = 2\nlease = 5\n" + FEED


def test_flags_come_before_variables_these_before_the_file_and_it_before_defaults() -> None:
    flag = {"queues": Setting(4, "--queues")}
    variables = {"FEEDER_SERVER_QUEUES": "3", "FEEDER_SERVER_LEASE": "7"}
    assert read(LAYERED, variables, **flag).server["queues"] == (4, "--queues")
    assert read(LAYERED, variables).server["queues"] == (3, "FEEDER_SERVER_QUEUES")
    assert read(LAYERED, variables).server["lease"] == (7.0, "FEEDER_SERVER_LEASE")
    assert read(LAYERED).server["queues"] == (2, "feed.toml:2")
    assert read(LAYERED).server["insecure"] == (False, "default")


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("BATCH_SIZE", "16", "batch_size", 16),
        ("EPOCHS", "inf", "epochs", None),
        ("VERSION", "2", "version", "2"),
        ("VERSION", "a b", "version", "a b"),
        ("WRITABLE", "true", "writable", True),
        ("DEVICES", "2", "devices", 2),
        ("DEVICES", "cpu:0,cpu:1", "devices", ["cpu:0", "cpu:1"]),
        ("INPUT_BLOB_NAMES", "y", "input_blob_names", ["y"]),
        ("INPUT_BLOB_NAMES", '["y", "z"]', "input_blob_names", ["y", "z"]),
        ("OPTIONS_SHARD_ID", "3", "options.shard_id", 3),
        ("OPTIONS_PATH", "/data", "options.path", "/data"),
    ],
)
def test_variables_are_read_as_the_key_wants_them(
    name: str, text: str, key: str, value: object
) -> None:
    variable = f"FEEDER_FEEDS_TRAIN_{name}"
    assert read(FEED, {variable: text}).feeds["train"][key] == (value, variable)


def test_a_variable_belongs_to_the_feed_with_the_longest_name() -> None:
    text = FEED + FEED.replace("train", '"train 2"')
    feeds = read(text, {"FEEDER_FEEDS_TRAIN_2_SEED": "3"}).feeds
    assert [feeds[name]["seed"].value for name in ("train", "train 2")] == [0, 3]


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("FEEDER_SERVER_QUEUS", "2", "unknown variable {0!r}: did you mean 'FEEDER_SERVER_QUEUES'"),
        ("FEEDER_FEEDS_TRAIN_SEDE", "2", "unknown variable {0!r}: did you mean"),
        ("FEEDER_FEEDS_TRAIN_OPTIONS", "{}", "unknown variable {0!r}: "),
        ("FEEDER_FEEDS_TEST_SEED", "2", "{0} is of no feed: the configuration has 'train'"),
        ("FEEDER_SERVER_REPLICAS", "x", "{0}: replicas is 'x', expected a whole number"),
        ("FEEDER_SERVER_INSECURE", "yes", "{0}: insecure is 'yes', expected true or false"),
    ],
)
def test_a_wrong_variable_is_told(variable: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(says.format(variable))):
        read(FEED, {variable: text})


def test_what_kubernetes_says_of_its_services_is_left_alone() -> None:
    links = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_BATCHES", "PORT", "PORT_5570_TCP_ADDR")
    environment = {f"FEEDER_SERVER_{link}": "tcp://10.0.0.1:5570" for link in links}
    assert read(FEED, environment) == read(FEED)


# ---- what they come to


def test_a_fetch_function_is_fed() -> None:
    text = FEED + 'fetch = "filed_feeds:fetch"\nepochs = 2\nlast_batch = "drop"\n'
    assert values(text) == [[0] * 4 + [1] * 4] * 2


def test_a_source_is_fed_with_its_options() -> None:
    text = FEED + 'source = "arrays"\noptions.columns = "x.npy"\n'
    assert values(text) == [[0, 2, 4, 6, 8, 10, 12, 14], [16, 18]]
    shard = {"FEEDER_FEEDS_TRAIN_OPTIONS_NUM_SHARDS": "2"}
    assert values(text, shard) == [[0, 2, 4, 6, 8]]
    assert values(text.replace('"x.npy"', '{ x = "x.npy" }')) == values(text)
    both = text.replace('["x"]', '["x", "y"]').replace('"x.npy"', '["x.npy", "x.npy"]')
    assert values(both) == values(text)


def test_objects_of_python_are_options_by_name() -> None:
    text = FEED + 'source = "records"\noptions.dataset = "filed_feeds:dataset"\n'
    assert values(text) == [list(range(8))]


def test_a_function_of_ones_own_makes_a_new_fetch_function_each_time() -> None:
    text = FEED + 'source = "filed_feeds:make"\noptions = { rows = 8 }\nnum_worker_threads = 1\n'
    assert values(text) == values(text) == [[2] * 8, [1] * 8, [0] * 8]


def test_loggers_and_init_fun_are_named() -> None:
    text = FEED + (
        'fetch = "filed_feeds:fetch"\ninit_fun = "filed_feeds:begin"\n'
        'external_loggers = ["filed_feeds:log"]\n'
    )
    with build_coordinator(read(text)) as coordinator:
        feeds = sys.modules["filed_feeds"]
        assert feeds.begun == [coordinator["train"]]
        assert coordinator["train"].streams[0].config.external_loggers == (feeds.log,)


PLACED = (
    FEED
    + """source = "arrays"
[feeds.train.options]
columns = "x.npy"
shard_id = "node"
num_shards = "nodes"
"""
)


def test_shards_go_by_the_number_of_the_node() -> None:
    slurm = {"SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2"}
    assert values(PLACED, slurm) == [[10, 12, 14, 16, 18]]
    assert values(PLACED) == [[0, 2, 4, 6, 8, 10, 12, 14], [16, 18]]
    table = read(PLACED, slurm).feeds["train"]
    assert table["options.shard_id"] == (1, "feed.toml:8, told by SLURM_NODEID")
    with pytest.raises(ConfigError, match=r"^feed.toml:8: shard_id is 'node'.*FEEDER_NUM_NODES$"):
        read(PLACED, {"HOSTNAME": "feeder-1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    with pytest.raises(ConfigError, match=r"^feed.toml:8: shard_id is 'node'.* number is 2 .* 2 "):
        read(PLACED, slurm | {"SLURM_NODEID": "2"})


# ---- showing, and advice


def test_what_is_shown_says_the_same_as_what_was_read() -> None:
    text = (
        LAYERED
        + 'fetch = "filed_feeds:fetch"\nepochs = inf\nversion = "a \\"b\\""\n'
        + '[feeds."my feed"]\ninput_blob_names = ["y"]\nbatch_size = 1\nsource = "arrays"\n'
        + 'options = { columns = { y = "x.npy" }, random_shuffle = true }\n'
    )
    settings = read(text, {"FEEDER_SERVER_LEASE": "7"})
    lines = list(show(settings))
    shown = read("\n".join(lines))

    def plain(one: Settings) -> dict[str, dict[str, object]]:
        tables = {"server": one.server, **one.feeds}
        return {name: {k: v.value for k, v in t.items()} for name, t in tables.items()}

    def as_list(value: object) -> object:
        return list(value) if isinstance(value, tuple) else value

    assert plain(shown) == {
        name: {key: as_list(value) for key, value in table.items()}
        for name, table in plain(settings).items()
    }
    assert any(line.split() == ["queues", "=", "2", "#", "feed.toml:2"] for line in lines)
    assert any(line.split()[2:] == ["7.0", "#", "FEEDER_SERVER_LEASE"] for line in lines)
    assert tomllib.loads("\n".join(lines))["feeds"]["my feed"]["options"]["random_shuffle"] is True


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('"s3://data/train"', '"s3://data/train"'),
        ('"s3://bucket/a@b"', '"s3://bucket/a@b"'),
        ('"https://a_token@host/train"', '"https://***@host/train"'),
        (
            '{ account_key = "a", sas_key = "b", connection_string = "c", sas = "d" }',
            '{ account_key = "***", sas_key = "***", connection_string = "***", sas = "***" }',
        ),
        ('"https://user:pass@host/train?list=1"', '"https://***@host/train?list=***"'),
        (
            '["https://host/a?X-Amz-Signature=0f&X-Amz-Date=1", "/data/b"]',
            '["https://host/a?X-Amz-Signature=***&X-Amz-Date=***", "/data/b"]',
        ),
        (
            '{ secret_access_key = "a", password = "b", token = "c", key = "e" }',
            '{ secret_access_key = "***", password = "***", token = "***", key = "e" }',
        ),
    ],
)
def test_what_opens_doors_is_masked(given: str, told: str) -> None:
    text = f'{FEED}source = "tokens"\noptions.path = {given}\noptions.sequence_length = 8\n'
    (line,) = [line for line in show(read(text)) if line.startswith("options.path")]
    assert line.partition("  #")[0].rstrip() == f"options.path = {told}"


def advice(text: str, *, memory: int = 1000, cpus: int = 2) -> list[str]:
    coordinator = build_coordinator(read(FEED + 'fetch = "filed_feeds:fetch"\n' + text))
    return list(advise(coordinator, memory=memory, cpus=cpus))


def test_bounds_that_exceed_memory_are_advised_against() -> None:
    assert advice("max_buffered_bytes = 500\n") == []
    assert advice("max_buffered_bytes = 501\n") == [
        "max_buffered_bytes comes to 501 B, and there are 1 kB: lower it to 500 (500 B) a feed, "
        "half of the memory"
    ]
    assert advice("", memory=2 * default_bytes()) == []
    (line,) = advice("", memory=2 * default_bytes() - 2)
    assert line.startswith(f"max_buffered_bytes comes to {size(default_bytes())}, and there are ")


def test_many_threads_on_few_cpus_are_advised_against() -> None:
    text = "max_buffered_bytes = 500\nnum_worker_threads = 9\n"
    assert advice(text, cpus=3) == []
    (line,) = advice(text, cpus=2)
    assert line.startswith("9 fetcher threads share 2 CPUs: ")


def test_memory_is_that_of_the_group_where_it_is_less(tmp_path: Path) -> None:
    whole = memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == whole > 1 << 20
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path) == 1 << 20


# ---- what is wrong, in which line, and what to do

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
    ("source = 'array'", "5: unknown source 'array': did you mean 'arrays', or MODULE:ATTR"),
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
    with pytest.raises(ConfigError, match="^feed.toml:" + re.escape(says)):
        build_checkpointing(read(f"[checkpoint]\n{text}").checkpoint)


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
