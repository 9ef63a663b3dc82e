"""The overlay for KubeRay: fields that there are, and names, ports and labels that agree."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from deploy.test_deploy_files import BATCH_PORT, DEPLOY, STATUS_PORT, UID, parse
from feeder.executors.cluster import OLDEST

OVERLAY = DEPLOY / "k8s/overlays/kuberay"

# Of ray.io/v1, as KubeRay 1.1 and newer have it (ray-operator/apis/ray/v1). Its schema comes with
# the operator; that of the pods is asked by scripts/check-deploy.
JOB = {
    "entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
    "rayClusterSpec", "submissionMode", "runtimeEnvYAML", "suspend", "activeDeadlineSeconds",
}  # fmt: skip
CLUSTER = {
    "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec",
    "workerGroupSpecs", "headServiceAnnotations", "suspend",
}  # fmt: skip
HEAD = {"rayStartParams", "template", "serviceType", "headService", "enableIngress"}
GROUP = {
    "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams",
    "template", "scaleStrategy",
}  # fmt: skip
NEEDED = {"headGroupSpec"}, {"rayStartParams", "template"}, {"groupName", "minReplicas",
          "maxReplicas", "rayStartParams", "template"}  # fmt: skip


def load(name: str) -> Any:
    return yaml.safe_load((OVERLAY / name).read_text())


def cluster() -> dict[str, Any]:
    found: dict[str, Any] = load("rayjob.yaml")["spec"]["rayClusterSpec"]
    return found


def test_fields_are_those_of_the_operator() -> None:
    job = load("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"].keys() <= JOB
    of_cluster, of_head, of_group = NEEDED
    assert of_cluster <= cluster().keys() <= CLUSTER
    assert of_head <= cluster()["headGroupSpec"].keys() <= HEAD
    for group in cluster()["workerGroupSpecs"]:
        assert of_group <= group.keys() <= GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        # What `ray start` is told is text.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert all(
        isinstance(one, str) for one in cluster()["headGroupSpec"]["rayStartParams"].values()
    )


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


def test_pods_service_and_policy_agree() -> None:
    head = cluster()["headGroupSpec"]["template"]
    labels = head["metadata"]["labels"]
    service, policy = load("service.yaml"), load("networkpolicy.yaml")
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = head["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"batches": BATCH_PORT, "status": STATUS_PORT}
    assert {one["targetPort"] for one in service["spec"]["ports"]} == set(ports)
    pods = [head, *(group["template"] for group in cluster()["workerGroupSpecs"])]
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    for pod in pods:
        assert selected <= pod["metadata"]["labels"].items()
        assert pod["spec"]["securityContext"]["runAsUser"] == UID
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for one in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes


def test_kustomize_knows_where_a_job_names_things() -> None:
    paths = {one["path"] for one in load("names.yaml")["images"]}
    references = {
        spec["path"] for one in load("names.yaml")["nameReference"] for spec in one["fieldSpecs"]
    }
    for group in ("headGroupSpec", "workerGroupSpecs"):
        assert f"spec/rayClusterSpec/{group}/template/spec/containers/image" in paths
        assert f"spec/rayClusterSpec/{group}/template/spec/volumes/configMap/name" in references
