"""Alert rules and dashboard: accepted and evaluated by Prometheus itself, about metrics that a service really has."""

import json
import re
import runpy
import sys
import urllib.parse
import urllib.request

import pytest

from guide import dashboards
from harness.browser import StudyHall
from harness.missing import need_binary
from harness.ports import free_port
from harness.waiting import until_sync

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


def test_prometheus_takes_the_rules_and_alerts_when_it_should(run, tmp_path):
    promtool = need_binary("promtool", how=HOW)
    assert "12 rules found" in run(promtool, "check", "rules", dashboards.ALERTS, cwd=tmp_path).stdout
    (tmp_path / "cases.yml").write_text(CASES.format(rules=dashboards.ALERTS))
    assert "SUCCESS" in run(promtool, "test", "rules", "cases.yml", cwd=tmp_path).stdout


def test_every_metric_has_its_panel_and_a_rule_about_none_is_refused(monkeypatch):
    board = json.loads(dashboards.DASHBOARD.read_text())
    shown = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    assert {name for name in dashboards.known() if name not in shown} == set()
    monkeypatch.setattr(dashboards, "_RULES", [("Drifted", "queue_lenght > 1", "1m", "")])
    with pytest.raises(SystemExit, match="queue_lenght"):
        dashboards.alerts()


@pytest.mark.full
def test_a_real_prometheus_scrapes_a_service_and_evaluates_rules_and_panels(render, spawn, tmp_path):
    project = render("service", patterns=["observability.metrics"])
    assert (project / "ops" / "alerts.yml").read_text() == dashboards.ALERTS.read_text()
    ports = {name: free_port() for name in ("api", "worker")}
    ask = scraping(spawn, tmp_path, *ports.values())
    env = {
        "PYTHONPATH": "src",
        "SERVICE_PORT": str(ports["api"]),
        "SERVICE_METRICS_PORT": str(ports["worker"]),
        "SERVICE_STEP_SECONDS": "0.01",
    }
    api = f"http://127.0.0.1:{ports['api']}"
    example = runpy.run_path(str(project / "tests" / "example.py"))

    def post():
        body = json.dumps(example["BODY"]).encode()
        asked = urllib.request.Request(api + example["URL"], body, {"content-type": "application/json"})
        urllib.request.urlopen(asked, timeout=10).close()

    spawn.command(sys.executable, "-m", "service", "api", cwd=project, env=env)
    until_sync(lambda: _answers(f"{api}/readyz"), 60, "an API that is ready")
    post()  # and no worker

    def pending():
        answer = ask("alerts") or {"alerts": []}
        return {alert["labels"]["alertname"] for alert in answer["alerts"]}

    until_sync(lambda: {"NobodyWorks", "ServiceDown"} <= pending(), 60, "alerts about the worker that is not there")
    spawn.command(sys.executable, "-m", "service", "worker", cwd=project, env=env)
    until_sync(lambda: not pending(), 60, "the end of these alerts")
    # What this kind of service does not have, and what has not happened.
    panels_show(ask, project / "ops" / "dashboard.json", post, "Events|Age of the oldest of them|Sagas|Failed")


@pytest.mark.full
def test_every_panel_shows_something_of_studyhall(spawn, tmp_path):
    metrics = free_port()
    hall = StudyHall(tmp_path, STUDYHALL_METRICS_PORT=str(metrics))
    ask = scraping(spawn, tmp_path, hall.port, metrics)
    (tmp_path / "damaged.pdf").write_bytes(b"%PDF-1.7 cut off")
    try:
        panels_show(ask, dashboards.DASHBOARD, lambda: hall.upload(tmp_path / "damaged.pdf"))
    finally:
        hall.close()


def scraping(spawn, folder, *ports):
    """A Prometheus with our rules that scrapes these ports every second; returns how to ask it."""
    server, port = need_binary("prometheus", how=HOW), free_port()
    targets = json.dumps([f"127.0.0.1:{each}" for each in ports])
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n"
        f"rule_files: [{dashboards.ALERTS}]\n"
        f"scrape_configs: [{{job_name: service, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    listen = f"--web.listen-address=127.0.0.1:{port}"
    spawn.command(server, "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb", listen, cwd=folder)

    def ask(path, **query):
        address = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    return ask


def panels_show(ask, board, stir, absent="$"):
    """Every query of the dashboard is understood and has a series, but for panels whose title is `absent`."""
    until_sync(lambda: ask("query", query="up") is not None, 60, "a Prometheus that answers")
    for panel in json.loads(board.read_text())["panels"]:
        for target in panel["targets"]:

            def shown(expr=target["expr"]):
                stir()  # something to see
                answer = ask("query", query=expr)
                assert answer is not None, f"Prometheus refuses {expr}"
                return bool(answer["result"]) or re.match(absent, panel["title"]) is not None  # noqa: B023

            until_sync(shown, 60, f"something in the panel {panel['title']!r}")


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
