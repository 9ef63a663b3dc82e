"""Small commands inside deploy files, run as they stand."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import feeder
from deploy.test_deploy_files import DEPLOY, load
from feeder.service.net.keys import ClientKeys, ServerKeys, make_keys
from small import make

END_S = 20.0


def healthcheck(port: int) -> int:
    """The exit status of the image's health check, asked of another port."""
    text = (DEPLOY / "Dockerfile").read_text()
    (found,) = re.findall(r"^HEALTHCHECK .*\\\n\s*CMD (\[.*\])$", text, re.MULTILINE)
    command = [word.replace(":9478", f":{port}") for word in json.loads(found)]
    assert command[0] == "python" and str(port) in command[-1]
    return subprocess.run([sys.executable, *command[1:]], capture_output=True).returncode


@pytest.mark.process
def test_the_health_check_tells_a_server_that_lives_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with feeder.serve(make(lambda call: None, ["x"], 8), status=0) as server:
        port = int(str(server.status_url).rstrip("/").rpartition(":")[2])
        assert healthcheck(port) == 0
    assert healthcheck(port) == 1


@pytest.mark.process
def test_keys_of_a_secret_become_keys_that_a_server_takes(tmp_path: Path) -> None:
    """A secret's files can be read by their group, which a server refuses; they are copied."""
    made, secret, keys = tmp_path / "made", tmp_path / "secret", tmp_path / "keys"
    make_keys(made, "client")
    pod = load("k8s/overlays/cpu-pool/statefulset.yaml")["spec"]["template"]["spec"]
    (volume,) = (one["secret"] for one in pod["volumes"] if one["name"] == "secret")
    sources = {"client.key": made / "clients/client.key"}
    for item in volume["items"]:
        path = secret / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sources.get(item["key"], made / item["key"]).read_bytes())
        path.chmod(volume["defaultMode"])
    keys.mkdir()
    (init,) = (one for one in pod["initContainers"] if one["name"] == "keys")
    script = init["command"][-1].replace("/secret", str(secret)).replace("/keys", str(keys))
    for _ in range(2):  # a pod may run it again
        subprocess.run([*init["command"][:-1], script], check=True, timeout=END_S)
    read = ServerKeys.from_directory(keys / "server")
    assert read.allowed == {ClientKeys.from_directory(made).public}
    modes = [stat.S_IMODE(path.stat().st_mode) for path in keys.rglob("*.key*")]
    assert len(modes) == 3 and not any(mode & 0o077 for mode in modes)


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "says"),
    [([], "the configuration, a TOML file"), (["feed.toml"], "the trainer's command is missing")],
)
def test_the_batch_script_tells_what_it_lacks(words: list[str], says: str) -> None:
    script = DEPLOY / "slurm/train.sbatch"
    done = subprocess.run(
        ["bash", script, *words], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode != 0
    assert says in done.stderr
