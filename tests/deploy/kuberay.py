"""The fields of a RayJob, as msgspec reads them: a field that there is not, a value of another type
and a field that is missing are refused, as an API server refuses them with KubeRay's schemas.

Written from the types of which KubeRay makes its schemas (ray-operator/apis/ray/v1,
rayjob_types.go and raycluster_types.go). They are told at
https://ray-project.github.io/kuberay/reference/api too. Of ray.io/v1 the fields are here that
KubeRay 1.2 has, and of a pod those that the overlay uses, as Kubernetes 1.29 has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
"""kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity: as text, to be plain."""

Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
PortName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=15)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]


class Fields(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Fields of which none is another one."""


# ---- Pods


class Metadata(Fields, kw_only=True):
    """Of a pod that is made from a template."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Capabilities(Fields, kw_only=True):
    """What a process may do beside what everybody may."""

    add: list[str] = []
    drop: list[str] = []


class SecurityContext(Fields, kw_only=True):
    """Of a container."""

    allow_privilege_escalation: bool
    capabilities: Capabilities
    read_only_root_filesystem: bool = False


class Resources(Fields, kw_only=True):
    """What a container asks for, and what it may have."""

    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class ContainerPort(Fields, kw_only=True):
    """A port that a container listens at."""

    name: PortName
    container_port: Port
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


class Command(Fields, kw_only=True):
    """A command that a probe runs."""

    command: list[str]


class Probe(Fields, kw_only=True):
    """By which a container is found to be alive."""

    exec: Command
    initial_delay_seconds: Count = 0
    period_seconds: Count = 10
    timeout_seconds: Count = 1
    failure_threshold: Count = 3


class VolumeMount(Fields, kw_only=True):
    """Where a container sees a volume."""

    name: Name
    mount_path: str
    read_only: bool = False


class Container(Fields, kw_only=True):
    """A container of a pod."""

    name: Name
    image: str
    command: list[str] = []
    args: list[str] = []
    ports: list[ContainerPort] = []
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    resources: Resources
    security_context: SecurityContext
    volume_mounts: list[VolumeMount] = []


class SeccompProfile(Fields, kw_only=True):
    """Which system calls there are."""

    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]


class PodSecurityContext(Fields, kw_only=True):
    """Of all containers of a pod."""

    run_as_non_root: bool
    run_as_user: Count
    run_as_group: Count
    fs_group: Count
    seccomp_profile: SeccompProfile


class Item(Fields, kw_only=True):
    """A key of a secret, and its file."""

    key: str
    path: str


class Secret(Fields, kw_only=True):
    """A secret as a volume."""

    secret_name: Name
    default_mode: Annotated[int, Meta(ge=0, le=0o777)]
    items: list[Item] = []


class ConfigMap(Fields, kw_only=True):
    """A configuration as a volume."""

    name: Name


class EmptyDir(Fields, kw_only=True):
    """A folder as a volume."""

    medium: Literal["", "Memory"] = ""
    size_limit: Quantity


class Volume(Fields, kw_only=True):
    """A volume of a pod, of one kind."""

    name: Name
    config_map: ConfigMap | None = None
    secret: Secret | None = None
    empty_dir: EmptyDir | None = None

    def __post_init__(self) -> None:
        kinds = self.config_map, self.secret, self.empty_dir
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError(f"volume {self.name} is of no kind, or of several")


class PodSpec(Fields, kw_only=True):
    """What a pod is to be."""

    service_account_name: Name
    automount_service_account_token: bool
    enable_service_links: bool
    security_context: PodSecurityContext
    init_containers: list[Container] = []
    containers: Annotated[list[Container], Meta(min_length=1)]
    volumes: list[Volume] = []
    restart_policy: Literal["Always", "OnFailure", "Never"] = "Always"


class PodTemplate(Fields, kw_only=True):
    """From which pods are made."""

    metadata: Metadata
    spec: PodSpec


# ---- ray.io/v1


class AutoscalerOptions(Fields, kw_only=True):
    """Of the autoscaler, which the operator puts into the head's pod."""

    resources: Resources | None = None
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    env: list[Any] = []
    env_from: list[Any] = []
    volume_mounts: list[VolumeMount] = []
    security_context: SecurityContext | None = None
    idle_timeout_seconds: Count | None = None
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"] | None = None


class HeadGroup(Fields, kw_only=True):
    """The head of a cluster."""

    ray_start_params: dict[str, str]
    template: PodTemplate
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] | None = None
    head_service: dict[str, Any] | None = None
    enable_ingress: bool | None = None


class ScaleStrategy(Fields, kw_only=True):
    """Which workers go first."""

    workers_to_delete: list[str] = []


class WorkerGroup(Fields, kw_only=True):
    """Workers that are alike."""

    group_name: str
    replicas: Count | None = None
    min_replicas: Count
    max_replicas: Count
    num_of_hosts: Count = 1
    ray_start_params: dict[str, str]
    template: PodTemplate
    scale_strategy: ScaleStrategy | None = None


class RayClusterSpec(Fields, kw_only=True):
    """A cluster."""

    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup] = []
    ray_version: str = ""
    enable_in_tree_autoscaling: bool | None = None
    autoscaler_options: AutoscalerOptions | None = None
    head_service_annotations: dict[str, str] = {}
    suspend: bool | None = None


class SubmitterConfig(Fields, kw_only=True):
    """Of the job of Kubernetes that hands Ray its job."""

    backoff_limit: Count | None = None


class RayJobSpec(Fields, kw_only=True):
    """A job, and the cluster that is made for it."""

    entrypoint: str = ""
    active_deadline_seconds: Annotated[int, Meta(ge=1)] | None = None
    backoff_limit: Count | None = None
    ray_cluster_spec: RayClusterSpec | None = None
    cluster_selector: dict[str, str] = {}
    submission_mode: Literal["K8sJobMode", "HTTPMode"] = "K8sJobMode"
    submitter_pod_template: PodTemplate | None = None
    submitter_config: SubmitterConfig | None = None
    metadata: dict[str, str] = {}
    runtime_env: str = msgspec.field(default="", name="runtimeEnvYAML")
    job_id: str = ""
    entrypoint_num_cpus: float = 0.0
    entrypoint_num_gpus: float = 0.0
    entrypoint_resources: str = ""
    ttl_seconds_after_finished: Count = 0
    shutdown_after_job_finishes: bool = False
    suspend: bool = False


class ObjectMetadata(Fields, kw_only=True):
    """Of an object."""

    name: Name
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RayJob(Fields, kw_only=True):
    """A RayJob."""

    api_version: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: ObjectMetadata
    spec: RayJobSpec


def read_job(given: Any) -> RayJob:
    """What a file says. Raises `msgspec.ValidationError`, which says where it is wrong."""
    return msgspec.convert(given, RayJob)
