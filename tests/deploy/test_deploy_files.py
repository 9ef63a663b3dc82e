"""The files of deploy/: they name commands, settings and ports that there are, and agree with each
other. What their own tools say of them scripts/check-deploy asks."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from feeder import cli
from feeder.config_file.build import build_coordinator
from feeder.config_file.settings import read_settings
from feeder.config_file.toml import read_toml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLE = DEPLOY / "example"
YAMLS = sorted([*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")])
STATUS_PORT, BATCH_PORT = 9478, 5570
UID = 10001


def name_of(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


def load(name: str) -> Any:
    """The only document of a YAML file."""
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.mark.parametrize("path", YAMLS, ids=name_of)
def test_every_yaml_file_can_be_read(path: Path) -> None:
    assert list(yaml.safe_load_all(path.read_text()))


# ---- commands


def parse(words: list[str]) -> argparse.Namespace:
    """The words after `feeder`, as the command itself reads them."""
    return cli._make_parser(words[:1]).parse_args(words)


def instructions(name: str) -> dict[str, str]:
    """The last of each instruction of the Dockerfile."""
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    return dict(line.split(maxsplit=1) for line in lines)


def kubernetes(kind: str) -> Iterator[dict[str, Any]]:
    """Every object of a kind in the files for Kubernetes."""
    for path in sorted((DEPLOY / "k8s").rglob("*.yaml")):
        found = yaml.safe_load(path.read_text())
        if found.get("kind") == kind:
            yield found


def containers() -> dict[str, dict[str, Any]]:
    """Every container of the files for Kubernetes, by workload and name."""
    return {
        f"{workload['metadata']['name']}: {container['name']}": container
        for kind in ("StatefulSet", "Job")
        for workload in kubernetes(kind)
        for pod in [workload["spec"]["template"]["spec"]]
        for container in [*pod["initContainers"], *pod["containers"]]
    }


def commands() -> dict[str, list[str]]:
    """Every command of feeder that a file of deploy/ starts, without the word `feeder`."""
    found = {"Dockerfile": json.loads(instructions("Dockerfile")["CMD"])}
    for name, service in load("compose.yaml")["services"].items():
        if service.get("image") == "feeder" and "entrypoint" not in service:
            found[f"compose: {name}"] = service["command"]
    for name, container in containers().items():
        if "args" in container:
            found[name] = container["args"]
    unit = (DEPLOY / "systemd/feeder@.service").read_text().replace("%i", "train")
    for key, line in re.findall(r"^(Exec\w+)=\S+/bin/feeder (.*)$", unit, re.MULTILINE):
        found[f"systemd: {key}"] = shlex.split(line)
    batch = (DEPLOY / "slurm/train.sbatch").read_text()
    variables = {"config": "feed.toml", "FEEDER_ADDRESSES": "ipc://job-1", "per_node": "2"}
    (line,) = re.findall(r"^ *feeder (serve .*) &$", batch, re.MULTILINE)
    found["slurm"] = shlex.split(re.sub(r"\$(\w+)", lambda one: variables[one[1]], line))
    return found


COMMANDS = commands()


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_command_is_understood(words: list[str]) -> None:
    arguments = parse(words)
    assert arguments.command in {"serve", "config"}
    assert "feed.toml" in str(arguments) or "train.toml" in str(arguments)


def test_commands_are_found_in_every_file() -> None:
    places = {name.partition(":")[0] for name in COMMANDS}
    assert places == {"Dockerfile", "compose", "feeder", "train", "systemd", "slurm"}


def test_a_command_that_there_is_not_is_seen() -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--config=feed.toml", "--satus=1"])


def test_what_probes_and_scrapes_ask_is_where_the_status_is() -> None:
    assert f"127.0.0.1:{STATUS_PORT}/healthz" in instructions("Dockerfile")["HEALTHCHECK"]
    (scraped,) = load("prometheus/prometheus.yml")["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"feeder:{STATUS_PORT}"]}]
    for name, words in COMMANDS.items():
        status = vars(parse(words)).get("server.status")
        if status is not None:
            assert status.endswith(f":{STATUS_PORT}"), name
    for name, container in containers().items():
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        probes = [container[key]["httpGet"] for key in container if key.endswith("Probe")]
        assert ports.items() <= {"status": STATUS_PORT, "batches": BATCH_PORT}.items(), name
        assert {probe["port"] for probe in probes} <= {"status"}
        assert {probe["path"] for probe in probes} <= {"/healthz", "/readyz"}


def test_monitors_find_the_port_that_services_and_pods_have() -> None:
    (service,) = kubernetes("Service")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert ports == {"status": STATUS_PORT, "batches": BATCH_PORT}
    (monitor,) = kubernetes("ServiceMonitor")
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    assert {end["port"] for end in monitor["spec"]["endpoints"]} <= set(ports)
    (pods,) = kubernetes("PodMonitor")
    (job,) = kubernetes("Job")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert pods["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy", "Service"])
def test_selectors_find_the_pool(kind: str) -> None:
    (pool,) = kubernetes("StatefulSet")
    labels = pool["spec"]["template"]["metadata"]["labels"]
    (found,) = kubernetes(kind)
    spec = found["spec"]
    chosen = {
        "PodDisruptionBudget": lambda: spec["selector"]["matchLabels"],
        "NetworkPolicy": lambda: spec["podSelector"]["matchLabels"],
        "Service": lambda: spec["selector"],
    }[kind]()
    assert chosen.items() <= labels.items()
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_everybody_who_shares_sockets_has_one_uid() -> None:
    assert instructions("Dockerfile")["USER"] == f"{UID}:{UID}"
    for service in load("compose.yaml")["services"].values():
        assert service["image"] != "feeder" or service["user"] == f"{UID}:{UID}"
    for kind in ("StatefulSet", "Job"):
        for workload in kubernetes(kind):
            context = workload["spec"]["template"]["spec"]["securityContext"]
            assert (context["runAsUser"], context["runAsNonRoot"]) == (UID, True)
    assert f"uid={UID}" in load("compose.yaml")["volumes"]["sockets"]["driver_opts"]["o"]


def test_volumes_that_are_mounted_are_there() -> None:
    for kind in ("StatefulSet", "Job"):
        for workload in kubernetes(kind):
            pod = workload["spec"]["template"]["spec"]
            mounted = {
                mount["name"]
                for container in [*pod["initContainers"], *pod["containers"]]
                for mount in container["volumeMounts"]
            }
            assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_number_of_pods_is_what_they_are_told() -> None:
    (pool,), (job,) = kubernetes("StatefulSet"), kubernetes("Job")
    numbers = {"feeder": pool["spec"]["replicas"], "train": job["spec"]["completions"]}
    for name, container in containers().items():
        told = {one["name"]: one.get("value") for one in container.get("env", [])}
        if "FEEDER_NUM_NODES" in told:
            assert told["FEEDER_NUM_NODES"] == str(numbers[name.partition(":")[0]])


# ---- the example


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the example as the current one, its modules to be imported."""
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "feeds", raising=False)
    yield EXAMPLE
    sys.modules.pop("feeds", None)


def test_the_example_feeds_each_node_its_shard(example: Path) -> None:
    rows = []
    for node in ("0", "1"):
        environment = {"FEEDER_NODE": node, "FEEDER_NUM_NODES": "2"}
        environment["FEEDER_FEEDS_TRAIN_EPOCHS"] = "1"
        settings = read_settings(read_toml("feed.toml"), environment)
        with build_coordinator(settings) as coordinator:
            rows.append(sum(batch.rows for batch in coordinator["train"]))
    assert rows == [900, 900]


def test_the_examples_need_the_wheel_alone(example: Path) -> None:
    modules = {path.stem for path in example.glob("*.py")}
    for path in example.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        from_ = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        imported = {name.split(".")[0] for name in plain | from_}
        assert imported - modules - sys.stdlib_module_names == {"feeder", "numpy"}
