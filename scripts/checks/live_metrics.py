"""Runs the example with a real Prometheus beside it, and asks that every query of the dashboard:

    python scripts/checks/live_metrics.py PROMETHEUS

PROMETHEUS is its executable. A server with two trainers runs on loopback for some ten seconds, in
processes that this one starts and ends. What a healthy run has no numbers for (checksum failures
and the like are 0, but there) counts as an answer; a query without any answer fails. The sources of
a mixture and object stores are not asked for: the example has none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy/example"
READY_S, RUN_S, END_S = 20.0, 8.0, 10.0
SCRAPED_S = 1
WINDOW = "[5s]"


def main(prometheus: str) -> int:
    """Print each query's number of answers; 1 where one has none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        os.mkdir(f"{folder}/run", 0o700)
        environment = os.environ | {
            "XDG_RUNTIME_DIR": f"{folder}/run",
            "TRAIN_STEP_S": "0.005",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        status, web = free_ports(2)
        feeder = [sys.executable, "-m", "feeder", "serve", "--config", "feed.toml"]
        kept = ["--checkpoint-dir", f"{folder}/kept", "--checkpoint-every", "1"]
        start(running, [*feeder, "--status", str(status), *kept], environment, folder)
        running.push(lambda kind, *_: show(folder) if kind else None)
        wait_for(f"http://127.0.0.1:{status}/healthz")
        for queue in ("0", "1"):
            trainer = [sys.executable, "train.py"]
            start(running, trainer, environment | {"FEEDER_QUEUE": queue}, folder)
        start(running, prometheus_command(prometheus, folder, status, web), environment, folder)
        wait_for(f"http://127.0.0.1:{web}/-/ready")
        threading.Event().wait(RUN_S)
        return report({name: ask(web, query) for name, query in queries().items()})


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]


def start(
    running: contextlib.ExitStack, command: list[str], environment: Mapping[str, str], folder: str
) -> None:
    """Start a process in the example's folder; it is ended with `running`."""
    with open(f"{folder}/processes.log", "ab") as log:
        process = subprocess.Popen(command, cwd=EXAMPLE, env=environment, stdout=log, stderr=log)
    running.callback(end, process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and end it where it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def show(folder: str) -> None:
    """Print what the processes have said; something went wrong."""
    print(Path(folder, "processes.log").read_text()[-4000:], file=sys.stderr)


def prometheus_command(prometheus: str, folder: str, status: int, web: int) -> list[str]:
    """Prometheus with the rules of deploy/, scraping the server on loopback."""
    rules = ROOT / "deploy/prometheus/rules.yml"
    Path(folder, "prometheus.yml").write_text(
        f"global: {{scrape_interval: {SCRAPED_S}s, evaluation_interval: {SCRAPED_S}s}}\n"
        f"rule_files: [{json.dumps(str(rules))}]\n"
        "scrape_configs:\n"
        f"  - {{job_name: feeder, static_configs: [{{targets: ['127.0.0.1:{status}']}}]}}\n"
    )
    return [
        prometheus,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{web}",
    ]


def wait_for(url: str) -> None:
    """Wait until an address answers."""
    ends = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=READY_S):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > ends:
                raise
            threading.Event().wait(0.1)


def queries() -> dict[str, str]:
    """Every query of the dashboard, for all feeds, over a window that a short run fills."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/feeder.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
        if not re.search("feeder_(source|store|cache)_", target["expr"])
    }
    return {
        name: re.sub(r"\[[^]]*\]", WINDOW, query.replace("$instance", ".*").replace("$feed", ".*"))
        for name, query in found.items()
    }


def ask(web: int, query: str) -> list[Any]:
    """What Prometheus answers to a query now."""
    words = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"http://127.0.0.1:{web}/api/v1/query?{words}") as answer:
        return list(json.load(answer)["data"]["result"])


def report(answers: Mapping[str, list[Any]]) -> int:
    """Print what came."""
    for name, results in answers.items():
        shown = ", ".join(f"{float(one['value'][1]):.3g}" for one in results[:4]) or "no answer"
        print(f"{name}: {shown}")
    return int(not all(answers.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
