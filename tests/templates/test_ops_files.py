"""Alert rules and dashboard: accepted and evaluated by Prometheus itself, about metrics that a service really has."""

import json
import re
import runpy
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guide import dashboards
from harness.missing import need_binary
from harness.ports import free_port
from harness.processes import Spawner
from harness.waiting import until_sync

Render = Callable[..., Path]
Run = Callable[..., Any]
HOW = "apt-get install prometheus"

CASES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'queue_unattended{{queue="work"}}'
        values: '0 1x10'
      - series: 'queue_oldest_age_seconds{{queue="work"}}'
        values: '299x10'
      - series: 'job_errors_total{{queue="work",name="n",error="CrashLoop"}}'
        values: '0 0 0 1x7'
    alert_rule_test:
      - {{eval_time: 1m, alertname: NobodyWorks, exp_alerts: []}}
      - eval_time: 3m
        alertname: NobodyWorks
        exp_alerts:
          - exp_labels: {{queue: work}}
            exp_annotations: {{summary: "Jobs are in work and no worker is connected: start one."}}
      - {{eval_time: 5m, alertname: JobsWaitTooLong, exp_alerts: []}}
      - eval_time: 5m
        alertname: CrashLoop
        exp_alerts:
          - exp_labels: {{queue: work}}
            exp_annotations:
              summary: "A job of work killed every worker that ran it: see the dead letters."
"""


def test_prometheus_takes_the_rules_and_alerts_when_it_should(run: Run, tmp_path: Path) -> None:
    promtool = need_binary("promtool", how=HOW)
    assert "12 rules found" in run(promtool, "check", "rules", dashboards.ALERTS, cwd=tmp_path).stdout
    (tmp_path / "cases.yml").write_text(CASES.format(rules=dashboards.ALERTS))
    assert "SUCCESS" in run(promtool, "test", "rules", "cases.yml", cwd=tmp_path).stdout


def test_every_metric_has_its_panel_and_a_rule_about_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    board = json.loads(dashboards.DASHBOARD.read_text())
    shown = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    assert {name for name in dashboards.known() if name not in shown} == set()
    monkeypatch.setattr(dashboards, "_RULES", [("Drifted", "queue_lenght > 1", "1m", "")])
    with pytest.raises(SystemExit, match="queue_lenght"):
        dashboards.alerts()


@pytest.mark.full
def test_a_real_prometheus_scrapes_a_service_and_evaluates_rules_and_panels(
    render: Render, spawn: Spawner, tmp_path: Path
) -> None:
    server = need_binary("prometheus", how=HOW)
    project = render("service", patterns=["observability.metrics"])
    ports = {name: free_port() for name in ("api", "worker", "prometheus")}
    env = {
        "PYTHONPATH": "src",
        "SERVICE_PORT": str(ports["api"]),
        "SERVICE_METRICS_PORT": str(ports["worker"]),
        "SERVICE_STEP_SECONDS": "0.01",
    }
    api = f"http://127.0.0.1:{ports['api']}"
    example = runpy.run_path(str(project / "tests" / "example.py"))

    def post() -> None:
        body = json.dumps(example["BODY"]).encode()
        asked = urllib.request.Request(api + example["URL"], body, {"content-type": "application/json"})
        urllib.request.urlopen(asked, timeout=10).close()

    def ask(path: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{ports['prometheus']}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    targets = [f"127.0.0.1:{ports[name]}" for name in ("api", "worker")]
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n"
        f"rule_files: [{project / 'ops' / 'alerts.yml'}]\n"
        f"scrape_configs: [{{job_name: service, static_configs: [{{targets: {json.dumps(targets)}}}]}}]\n"
    )
    listen = f"--web.listen-address=127.0.0.1:{ports['prometheus']}"
    spawn.command(server, "--config.file=prometheus.yml", "--storage.tsdb.path=data", listen, cwd=tmp_path)
    spawn.command(sys.executable, "-m", "service", "api", cwd=project, env=env)
    until_sync(lambda: _answers(f"{api}/readyz"), 60, "an API that is ready")
    post()  # and nobody works

    def pending() -> set[str]:
        found = ask("alerts") or {"alerts": []}
        return {one["labels"]["alertname"] for one in found["alerts"]}

    until_sync(lambda: {"NobodyWorks", "ServiceDown"} <= pending(), 60, "alerts about the worker that is not there")
    spawn.command(sys.executable, "-m", "service", "worker", cwd=project, env=env)
    until_sync(lambda: not pending(), 60, "the end of these alerts")
    board = json.loads((project / "ops" / "dashboard.json").read_text())
    # What this kind of service does not have, and what has not happened.
    absent = re.compile("Events|Age of the oldest of them|Sagas|Failed")
    for panel in board["panels"]:
        for target in panel["targets"]:

            def shown(expr: str = target["expr"]) -> bool:
                post()  # something to see
                found = ask("query", query=expr)
                assert found is not None, f"Prometheus refuses {expr}"
                return bool(found["result"]) or absent.match(panel["title"]) is not None  # noqa: B023

            until_sync(shown, 30, f"something in the panel {panel['title']!r}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
