"""The fields of a RayJob: a field that there is not, a value of another type and a field that is
missing are found, as an API server finds them by KubeRay's schemas.

Written from the types of which KubeRay makes its schemas (ray-operator/apis/ray/v1,
rayjob_types.go and raycluster_types.go). They are told at
https://ray-project.github.io/kuberay/reference/api too. Of ray.io/v1 the fields are here that
KubeRay 1.2 has, and of a pod those that the overlay uses, as Kubernetes 1.29 has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
"""kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity: as text, to be plain."""
NAME = re.compile(r"(?!.{64})[a-z0-9]([-a-z0-9]*[a-z0-9])?")
PORT_NAME = re.compile(r"(?!.{16})[a-z0-9]([-a-z0-9]*[a-z0-9])?")
COUNT = range(2**31)
TEXTS = {"*": str}
"""Any names, each with a text."""

# A dict has the fields that there are: those with "!" must be there. A list has the type of each of
# its items, and a set the texts that there are.
METADATA: dict[str, Any] = {"labels": TEXTS, "annotations": TEXTS}
SECURITY_CONTEXT = {
    "allowPrivilegeEscalation!": bool, "capabilities!": {"add": [str], "drop": [str]},
    "readOnlyRootFilesystem": bool,
}  # fmt: skip
RESOURCES = {"requests": {"*": QUANTITY}, "limits": {"*": QUANTITY}}
PROBE = {
    "exec!": {"command!": [str]}, "initialDelaySeconds": COUNT, "periodSeconds": COUNT,
    "timeoutSeconds": COUNT, "failureThreshold": COUNT,
}  # fmt: skip
MOUNT = {"name!": NAME, "mountPath!": str, "readOnly": bool}
CONTAINER = {
    "name!": NAME, "image!": str, "command": [str], "args": [str],
    "ports": [{"name!": PORT_NAME, "containerPort!": range(1, 65536),
               "protocol": {"TCP", "UDP", "SCTP"}}],
    "readinessProbe": PROBE, "livenessProbe": PROBE, "resources!": RESOURCES,
    "securityContext!": SECURITY_CONTEXT, "volumeMounts": [MOUNT],
}  # fmt: skip
VOLUME = {
    "name!": NAME, "configMap": {"name!": NAME},
    "secret": {"secretName!": NAME, "defaultMode!": range(0o1000),
               "items": [{"key!": str, "path!": str}]},
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit!": QUANTITY},
}  # fmt: skip
POD = {
    "metadata!": METADATA,
    "spec!": {
        "serviceAccountName!": NAME, "automountServiceAccountToken!": bool,
        "enableServiceLinks!": bool,
        "securityContext!": {
            "runAsNonRoot!": bool, "runAsUser!": COUNT, "runAsGroup!": COUNT, "fsGroup!": COUNT,
            "seccompProfile!": {"type!": {"RuntimeDefault", "Unconfined", "Localhost"}},
        },
        "initContainers": [CONTAINER], "containers!": [CONTAINER], "volumes": [VOLUME],
        "restartPolicy": {"Always", "OnFailure", "Never"},
    },
}  # fmt: skip
CLUSTER = {
    "headGroupSpec!": {
        "rayStartParams!": TEXTS, "template!": POD, "headService": dict, "enableIngress": bool,
        "serviceType": {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"},
    },
    "workerGroupSpecs": [{
        "groupName!": str, "replicas": COUNT, "minReplicas!": COUNT, "maxReplicas!": COUNT,
        "numOfHosts": COUNT, "rayStartParams!": TEXTS, "template!": POD,
        "scaleStrategy": {"workersToDelete": [str]},
    }],
    "rayVersion": str, "enableInTreeAutoscaling": bool, "headServiceAnnotations": TEXTS,
    "suspend": bool,
    "autoscalerOptions": {
        "resources": RESOURCES, "image": str,
        "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
        "env": list, "envFrom": list, "volumeMounts": [MOUNT], "securityContext": SECURITY_CONTEXT,
        "idleTimeoutSeconds": COUNT, "upscalingMode": {"Default", "Aggressive", "Conservative"},
    },
}  # fmt: skip
JOB = {
    "apiVersion!": {"ray.io/v1"}, "kind!": {"RayJob"}, "metadata!": {"name!": NAME, **METADATA},
    "spec!": {
        "entrypoint": str, "activeDeadlineSeconds": range(1, 2**63), "backoffLimit": COUNT,
        "rayClusterSpec": CLUSTER, "clusterSelector": TEXTS,
        "submissionMode": {"K8sJobMode", "HTTPMode"}, "submitterPodTemplate": POD,
        "submitterConfig": {"backoffLimit": COUNT}, "metadata": TEXTS, "runtimeEnvYAML": str,
        "jobId": str, "entrypointNumCpus": float, "entrypointNumGpus": float,
        "entrypointResources": str, "ttlSecondsAfterFinished": COUNT,
        "shutdownAfterJobFinishes": bool, "suspend": bool,
    },
}  # fmt: skip


def problems(value: Any, wanted: Any = JOB, where: str = "") -> Iterator[str]:
    """What an API server would not take, and where."""
    match wanted:
        case dict() if isinstance(value, dict):
            yield from _fields(value, wanted, where)
        case [inner] if isinstance(value, list):
            for i, one in enumerate(value):
                yield from problems(one, inner, f"{where}[{i}]")
        case range() if type(value) is int and value in wanted:
            pass
        case re.Pattern() if isinstance(value, str) and wanted.fullmatch(value):
            pass
        case set() if isinstance(value, str) and value in wanted:
            pass
        case type() if type(value) is wanted:
            pass
        case _:
            yield f"{where}: {value!r} is none of {wanted}"


def _fields(value: dict[str, Any], wanted: dict[str, Any], where: str) -> Iterator[str]:
    known = {name.rstrip("!"): one for name, one in wanted.items()}
    for name, one in value.items():
        if name in known or "*" in known:
            yield from problems(one, known.get(name, known.get("*")), f"{where}.{name}")
        else:
            yield f"{where}: there is no field {name}"
    for name in wanted:
        if name.endswith("!") and name[:-1] not in value:
            yield f"{where}: {name[:-1]} is missing"
    if wanted is VOLUME and len(value) != 2:
        yield f"{where}: of no kind, or of several"
