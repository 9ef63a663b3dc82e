"""What alert rules and dashboard ask for is exported, and every alert is tested both ways."""

from __future__ import annotations

import json
import re

import pytest

from deploy.test_deploy_files import DEPLOY, load
from feeder.observe.metrics import BUILD, METRICS, VERDICT

LABELS = {metric.name: set(metric.labels) for metric in METRICS} | {
    BUILD: {"version"},
    VERDICT: {"feed", "kind"},
    "up": {"job"},
}
"""Every metric that is exported, or made by Prometheus, and its labels."""
FROM_SCRAPING = {"instance", "job"}
FUNCTIONS = {"increase", "label_values", "rate", "vector"}
WORDS = {"and", "on", "or", "unless"}


def queries_of_dashboard() -> dict[str, str]:
    """Every query of the dashboard with what its legend shows, by the panel's title and letter."""
    dashboard = json.loads((DEPLOY / "grafana/dashboards/feeder.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": f"{target['expr']} # {target['legendFormat']}"
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found[f"variable {variable['name']}"] = variable["query"]["query"]
    return found


def queries_of_rules() -> dict[str, str]:
    """Every query of the rules with what its annotations show, by the rule's name."""
    rules = [rule for group in load("prometheus/rules.yml")["groups"] for rule in group["rules"]]
    return {
        rule.get("alert") or rule["record"]: " ".join(
            [rule["expr"], "#", *rule.get("annotations", {}).values()]
        )
        for rule in rules
    }


def names_in(query: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that a query and its texts name."""
    expression, _, texts = query.partition("#")
    shown = {*re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", texts)} - {"value"}
    plain = re.sub(r'"[^"]*"|\[[^]]*\]', "", expression)
    labels = {*re.findall(r"(\w+)\s*[=!]", " ".join(re.findall(r"\{([^}]*)\}", plain)))}
    for clause in re.findall(r"\bon \(([^)]*)\)|label_values\([^,]*, (\w+)\)", plain):
        labels |= {*re.findall(r"\w+", " ".join(clause))}
    bare = re.sub(r"\{[^}]*\}|\bon \([^)]*\)|, \w+\)", "", plain)
    metrics = {*re.findall(r"[a-zA-Z_:][\w:]*", bare)} - FUNCTIONS - WORDS
    return metrics, labels | shown


QUERIES = queries_of_dashboard() | queries_of_rules()
RECORDED = {"feed_queue:feeder_starved:ratio_rate5m": {"feed", "queue"}}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_query_names_metrics_and_labels_that_there_are(query: str) -> None:
    metrics, labels = names_in(query)
    known = LABELS | RECORDED
    assert metrics
    assert metrics - known.keys() == set()
    assert labels - set().union(*(known[name] for name in metrics)) <= FROM_SCRAPING


def test_the_dashboard_shows_every_metric() -> None:
    shown = set().union(*(names_in(query)[0] for query in queries_of_dashboard().values()))
    assert LABELS.keys() - shown == {"up"}


def test_every_alert_is_tested_to_come_and_to_stay_away() -> None:
    alerts = {
        rule["alert"]
        for group in load("prometheus/rules.yml")["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    tried = [
        (case["alertname"], bool(case["exp_alerts"]))
        for test in load("prometheus/rules_test.yml")["tests"]
        for case in test["alert_rule_test"]
    ]
    assert set(tried) == {(alert, comes) for alert in alerts for comes in (True, False)}
