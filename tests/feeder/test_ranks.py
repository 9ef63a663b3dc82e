"""Which queue and which shard a launcher's environment means."""

from __future__ import annotations

import os

import pytest

from feeder.errors import ConfigError
from feeder.ranks import node_of, num_nodes, queue_of
from feeder.service.client.connect import _addresses, _queue
from feeder.service.net.addresses import parse

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "3",
}
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
JOB = IN_POD | {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "job-3-x7g2k"}
POD = IN_POD | {"HOSTNAME": "trainer-4"}
DEPLOYED = IN_POD | {"HOSTNAME": "trainer-7c9f-24679"}


@pytest.mark.parametrize(
    ("environment", "near", "far"),
    [
        (TORCHRUN, (1, "LOCAL_RANK"), (5, "RANK")),
        (SLURM, (2, "SLURM_LOCALID"), (6, "SLURM_PROCID")),
        (SLURM | TORCHRUN, (1, "LOCAL_RANK"), (5, "RANK")),
        ({"RANK": "5"}, (5, "RANK"), (5, "RANK")),
        ({"LOCAL_RANK": "1"}, (1, "LOCAL_RANK"), (1, "LOCAL_RANK")),
        (JOB, (0, "no launcher"), (3, "JOB_COMPLETION_INDEX")),
        (POD, (0, "no launcher"), (4, "HOSTNAME")),
        (DEPLOYED, (0, "no launcher"), (0, "no launcher")),
        ({"HOSTNAME": "trainer-4"}, (0, "no launcher"), (0, "no launcher")),
        (TORCHRUN | {"FEEDER_QUEUE": "7"}, (7, "FEEDER_QUEUE"), (7, "FEEDER_QUEUE")),
        ({"RANK": "none", "SLURM_PROCID": "6"}, (6, "SLURM_PROCID"), (6, "SLURM_PROCID")),
        ({}, (0, "no launcher"), (0, "no launcher")),
    ],
)
def test_the_queue_is_the_number_among_those_who_share_the_server(
    environment: dict[str, str], near: tuple[int, str], far: tuple[int, str]
) -> None:
    assert queue_of(environment, is_near=True) == near
    assert queue_of(environment, is_near=False) == far


@pytest.mark.parametrize(
    ("environment", "node", "of"),
    [
        (TORCHRUN, (2, "GROUP_RANK"), (4, "GROUP_WORLD_SIZE")),
        (SLURM, (1, "SLURM_NODEID"), (3, "SLURM_JOB_NUM_NODES")),
        (POD | {"FEEDER_NUM_NODES": "5"}, (4, "HOSTNAME"), (5, "FEEDER_NUM_NODES")),
        (SLURM | {"FEEDER_NODE": "0"}, (0, "FEEDER_NODE"), (3, "SLURM_JOB_NUM_NODES")),
        ({}, (0, "no launcher"), (1, "no launcher")),
    ],
)
def test_the_node_is_the_launchers(
    environment: dict[str, str], node: tuple[int, str], of: tuple[int, str]
) -> None:
    assert node_of(environment) == node
    assert num_nodes(environment) == of


@pytest.mark.parametrize("name", ["FEEDER_QUEUE", "FEEDER_NODE", "FEEDER_NUM_NODES"])
@pytest.mark.parametrize("text", ["two", "-1", "1.5"])
def test_what_is_said_to_feeder_itself_is_a_number(name: str, text: str) -> None:
    """And not passed over for what others say, or nobody."""
    ask = {"FEEDER_QUEUE": lambda environment: queue_of(environment, is_near=True),
           "FEEDER_NODE": node_of, "FEEDER_NUM_NODES": num_nodes}[name]  # fmt: skip
    with pytest.raises(ConfigError, match=rf"^{name} is '{text}', expected a whole number >= 0$"):
        ask(SLURM | {name: text})
    assert ask(SLURM | {name: ""}) == ask(SLURM)


@pytest.mark.parametrize(
    ("addresses", "queue"),
    [
        (["ipc://feed"], 1),
        (["tcp://127.0.0.1:5570"], 1),
        (["tcp://localhost:5570", "ipc://feed"], 1),
        ([f"tcp://{os.uname().nodename}:5570"], 1),
        (["tcp://feeder-0.feeder:5570"], 5),
        (["tcp://127.0.0.1:5570", "tcp://feeder-0.feeder:5570"], 5),
    ],
)
def test_a_server_is_near_where_all_its_addresses_are(
    addresses: list[str], queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in TORCHRUN.items():
        monkeypatch.setenv(name, text)
    assert _queue([parse(text) for text in addresses]) == queue


def test_addresses_are_in_the_environment_where_none_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEEDER_ADDRESSES", "tcp://a:1,tcp://b:2")
    assert [str(one) for one in _addresses(None)] == ["tcp://a:1", "tcp://b:2"]
    assert [str(one) for one in _addresses("tcp://c:3")] == ["tcp://c:3"]
