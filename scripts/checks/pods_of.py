"""Prints the pods that custom resources have templates of, so that a schema of pods can judge them.

Arguments: a file with Kubernetes objects. Nothing is printed where no custom resource has one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

OWN = ("ray.io/",)
"""API groups whose schema comes with an operator."""

KEYS = ("template", "submitterPodTemplate")
"""What they call a template of a pod."""


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod template in an object."""
    if isinstance(value, list):
        for one in value:
            yield from templates(one)
    if isinstance(value, dict):
        for key, one in value.items():
            spec = one.get("spec", {}) if isinstance(one, dict) else {}
            if key in KEYS and "containers" in spec:
                yield one
            else:
                yield from templates(one)


def main(path: str) -> None:
    """Print them."""
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{found['metadata']['name']}-{number}", **one["metadata"]},
            "spec": one["spec"],
        }
        for found in yaml.safe_load_all(Path(path).read_text())
        if found["apiVersion"].startswith(OWN)
        for number, one in enumerate(templates(found["spec"]))
    ]
    if pods:
        print(yaml.safe_dump_all(pods), end="")


if __name__ == "__main__":
    main(sys.argv[1])
