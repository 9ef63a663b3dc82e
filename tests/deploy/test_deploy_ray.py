"""The overlay for KubeRay: names, ports and labels that agree."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from deploy import test_deploy_files as files
from deploy.test_deploy_files import BATCH_PORT, DEPLOY, STATUS_PORT, UID, parse
from feeder.executors.cluster import OLDEST

OVERLAY = "k8s/overlays/kuberay"
DASHBOARD_PORT, GCS_PORT = 8265, 6379


def load(name: str) -> Any:
    """The only document of a file."""
    return files.load(f"{OVERLAY}/{name}")


def policies() -> dict[str, Any]:
    """Who may come, by the policy's name."""
    found = yaml.safe_load_all((DEPLOY / OVERLAY / "networkpolicy.yaml").read_text())
    return {one["metadata"]["name"]: one["spec"] for one in found}


def cluster() -> dict[str, Any]:
    found: dict[str, Any] = load("rayjob.yaml")["spec"]["rayClusterSpec"]
    return found


def test_the_job_serves_on_actors() -> None:
    command, *words = shlex.split(load("rayjob.yaml")["spec"]["entrypoint"])
    arguments = vars(parse(words))
    assert command == "feeder" and arguments["command"] == "serve"
    assert str(arguments["server.executor"]).startswith("ray:")
    assert arguments["server.status"] == f"0.0.0.0:{STATUS_PORT}"
    assert tuple(map(int, cluster()["rayVersion"].split(".")))[:2] >= OLDEST


def test_a_wrong_configuration_starts_no_head() -> None:
    inits = cluster()["headGroupSpec"]["template"]["spec"]["initContainers"]
    *command, path = inits[-1]["args"]
    assert command == ["config", "check"]
    assert f"--config={path}" in load("rayjob.yaml")["spec"]["entrypoint"]


def test_pods_service_and_policies_agree() -> None:
    head = cluster()["headGroupSpec"]["template"]
    labels = head["metadata"]["labels"].items()
    service = load("service.yaml")
    assert service["spec"]["selector"].items() <= labels
    (container,) = head["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {one["targetPort"] for one in service["spec"]["ports"]} == {"batches", "status"}
    # With ports that are named the operator's service has no others, and workers come by it.
    assert ports == {
        "batches": BATCH_PORT, "status": STATUS_PORT,
        "dashboard": DASHBOARD_PORT, "gcs-server": GCS_PORT,
    }  # fmt: skip
    workers = [group["template"] for group in cluster()["workerGroupSpecs"]]
    selected = policies()["feeder-ray"]["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in [head, *workers])
    for pod in [head, *workers, load("rayjob.yaml")["spec"]["submitterPodTemplate"]]:
        assert pod["spec"]["securityContext"]["runAsUser"] == UID
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        for one in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            assert {mount["name"] for mount in one.get("volumeMounts", ())} <= volumes


def test_jobs_come_to_the_head_from_submitter_and_operator() -> None:
    head = cluster()["headGroupSpec"]["template"]["metadata"]["labels"]
    policy = policies()["feeder-ray-head"]
    assert policy["podSelector"]["matchLabels"].items() <= head.items()
    ((rule,)) = policy["ingress"]
    assert rule["ports"] == [{"port": DASHBOARD_PORT, "protocol": "TCP"}]
    submitter, operator = rule["from"]
    pod = load("rayjob.yaml")["spec"]["submitterPodTemplate"]
    chosen = submitter["podSelector"]["matchLabels"]
    assert chosen.items() <= pod["metadata"]["labels"].items()
    # Else it would be of the cluster, or be a server.
    assert not pod["metadata"]["labels"].keys() & head.keys()
    assert pod["spec"]["restartPolicy"] == "Never"
    # The label of the operator's pods, by its manifests and its chart; in any namespace.
    assert operator == {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}},
    }


def test_the_autoscaler_alone_may_ask_kubernetes() -> None:
    head = cluster()["headGroupSpec"]["template"]["spec"]
    account = load("serviceaccount.yaml")
    assert cluster()["enableInTreeAutoscaling"]
    # Its container is in the head's pod. The operator does not make an account that a pod names.
    assert head["automountServiceAccountToken"] is True
    assert head["serviceAccountName"] == account["metadata"]["name"]
    assert "serviceaccount.yaml" in load("kustomization.yaml")["resources"]
    others = [group["template"]["spec"] for group in cluster()["workerGroupSpecs"]]
    others.append(load("rayjob.yaml")["spec"]["submitterPodTemplate"]["spec"])
    for pod in others:
        assert pod["serviceAccountName"] != head["serviceAccountName"]
        assert pod["automountServiceAccountToken"] is False
