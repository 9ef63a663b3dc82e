"""The files of deploy/: they name commands, settings and ports that there are, and agree with each
other. What their own tools say of them scripts/check-deploy asks."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from feeder import cli
from feeder.config_file.build import build_coordinator
from feeder.config_file.settings import read_settings
from feeder.config_file.toml import read_toml
from project import ROOT

DEPLOY = ROOT / "deploy"
EXAMPLE = DEPLOY / "example"
STATUS_PORT, BATCH_PORT = 9478, 5570
UID = 10001


def name_of(path: Path) -> str:
    return path.relative_to(DEPLOY).as_posix()


@cache
def load(name: str) -> Any:
    """The only document of a YAML file, which nobody may change."""
    return yaml.load((DEPLOY / name).read_text(), yaml.CSafeLoader)


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
    """Every object of a kind in the files for Kubernetes; those for Ray have a file of their own,
    `test_deploy_ray.py`."""
    for path in sorted((DEPLOY / "k8s").rglob("*.yaml")):
        if path.parent.name == "kuberay":
            continue
        found = load(name_of(path))
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


def test_servers_have_a_cache_that_fits_into_its_volume() -> None:
    told = load("compose.yaml")["services"]["feeder"]["environment"]["FEEDER_CACHE"]
    folder, max_bytes = told.rsplit(",", 1)
    assert f"cache:{folder}" in load("compose.yaml")["services"]["feeder"]["volumes"]
    assert f" {folder}\n" in (DEPLOY / "Dockerfile").read_text()
    for kind in ("StatefulSet", "Job"):
        for workload in kubernetes(kind):
            pod = workload["spec"]["template"]["spec"]
            (server,) = (
                container
                for container in [*pod["initContainers"], *pod["containers"]]
                if "serve" in container.get("args", ())
            )
            assert {"name": "FEEDER_CACHE", "value": told} in server["env"]
            assert {"name": "cache", "mountPath": folder} in server["volumeMounts"]
            (volume,) = (one for one in pod["volumes"] if one["name"] == "cache")
            size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
            # Its table and its indexes come on top.
            assert int(max_bytes) <= 0.95 * size
    assert told.rpartition(",")[2] in (DEPLOY / "slurm/train.sbatch").read_text()


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


# ---- the rough edges of operating it


def requirements(name: str) -> dict[str, int]:
    """The packages that a file locks, and how many hashes each has."""
    text = (DEPLOY / name).read_text()
    blocks = re.split(r"^(?=[A-Za-z])", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.M)
    found = [(re.match(r"([\w.-]+)==", block), block) for block in blocks if block.strip()]
    assert all(match is not None for match, _ in found)
    return {match[1]: block.count("--hash=sha256:") for match, block in found if match}


def test_what_the_image_installs_is_locked_with_hashes() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    installs = re.findall(r"pip install ([^&\\\n]*)", text)
    assert all("--require-hashes" in one or "--no-index" in one for one in installs), installs
    locked = requirements("requirements.txt")
    assert all(locked.values()) and all(requirements("requirements-build.txt").values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + [
        one
        for extra in ("images", "lmdb", "metrics", "objectstore")
        for one in project["optional-dependencies"][extra]
    ]
    names = {re.match(r"[\w-]+", one)[0] for one in needed}  # type: ignore[index]
    assert names <= set(locked)


def test_a_configuration_is_checked_before_anything_is_held() -> None:
    (pool,), (job,) = kubernetes("StatefulSet"), kubernetes("Job")
    for workload in (pool, job):
        inits = workload["spec"]["template"]["spec"]["initContainers"]
        checks = [one for one in inits if one.get("args", [])[:2] == ["config", "check"]]
        assert len(checks) == 1
        serving = [i for i, one in enumerate(inits) if "serve" in one.get("args", [])]
        assert not serving or inits.index(checks[0]) < serving[0]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "check", "operator": "In", "values": [2]}
    services = load("compose.yaml")["services"]
    assert services["feeder"]["depends_on"] == {
        "check": {"condition": "service_completed_successfully"}
    }
    assert services["check"]["restart"] == "no"


def test_systemd_starts_a_wrong_configuration_once() -> None:
    """A command before the start that fails is tried again, whatever its status."""
    unit = (DEPLOY / "systemd/feeder@.service").read_text()
    assert "ExecStartPre" not in re.sub(r"^#.*\n", "", unit, flags=re.MULTILINE)
    assert "\nType=notify\n" in unit
    assert "\nRestartPreventExitStatus=2\n" in unit
