"""The report says what the JSON says: settings, spreads, shares of the limit, targets met and missed."""

import json
from types import SimpleNamespace

import pytest

from bench import report, results
from bench.figures import UNSTABLE
from bench.targets import targets

PEERS = {
    "stock": {"title": "Stock", "version": "s 1", "settings": "as it comes"},
    "queuesmith": {"title": "Ours", "version": "q 1", "settings": "everything on"},
    "queuesmith-bare": {"title": "Ours, bare", "version": "q 1", "settings": "bare"},
    "huey": {"title": "Huey", "version": "h 1", "settings": "threads"},
    "node": {"title": "Node", "version": "n 1", "settings": "node"},
}


def add(data, name, rows, failures=()):
    results.add(data, name, SimpleNamespace(failures=dict(failures)), rows)  # type: ignore[arg-type]


def run(**noop):
    """Results with these rounds of no-op jobs per second."""
    data = {
        "date": "2031-02-03",
        "mode": "full",
        "rounds": 3,
        "machine": {"cpus": 2, "processor": "one", "system": "Linux", "load_at_start": 0.1},
        "versions": {"python": "3.x"},
        "peers": PEERS,
        "missing": ["Celery: could not be installed"],
        "sections": {},
    }
    for turn in range(3):
        rows = {name.replace("_", "-"): {"noop": rates[turn]} for name, rates in noop.items()}
        add(data, "throughput", rows, {"huey": "its worker ended"})
    add(data, "ceiling", {"work": {"P1": 9_000, "P16": 20_000}})
    return data


STEADY = {
    "stock": [1000.0, 1100.0, 900.0],
    "queuesmith": [2500.0, 2500.0, 2600.0],
    "queuesmith_bare": [3000.0, 3000.0, 3000.0],
    "huey": [5000.0, 1.0, 20000.0],
    "node": [5000.0, 5000.0, 5000.0],
}


def test_medians_spreads_ratios_and_shares_are_in_the_table():
    text = report.markdown(run(**STEADY))
    ours = next(line for line in text.splitlines() if line.startswith("| **Ours** |"))
    assert ours == "| **Ours** | 2,500 ± 100 | 2.50 × | 12% |"
    assert "| Stock | 1,000 ± 200 | 1 | 5% |" in text
    huey = next(line for line in text.splitlines() if line.startswith("| Huey | 5,000"))
    assert UNSTABLE in huey
    assert "×" not in huey, "no ratio for rounds that disagree that much"


def test_settings_machine_and_gaps_are_reported():
    text = report.markdown(run(**STEADY))
    for shown in ("as it comes", "everything on", "2031-02-03", "3 round(s)"):
        assert shown in text
    assert "Celery: could not be installed" in text
    assert "Huey failed: its worker ended" in text


def test_targets_say_by_how_much_they_are_met_or_missed():
    verdicts = {(t.text, t.wanted): t.verdict for t in targets(run(**STEADY))}
    assert verdicts["full pipeline, no-op jobs", "≥ 3.5 × Stock"] == "missed by 1.00 ×"
    assert verdicts["full pipeline, no-op jobs", "≥ 0.3 × Node"] == "met"
    assert verdicts["bare worker, no-op jobs", "≥ 4 × Stock"] == "missed by 1.00 ×"
    assert verdicts["bare worker, no-op jobs", "≥ 0.5 × Node"] == "met"
    assert verdicts["full pipeline ahead, no-op jobs of one process", "> 1 × Huey"] == UNSTABLE
    assert verdicts["jobs lost by the kills", "≤ 0"] == "not measured"


def test_one_lost_job_in_one_round_misses_the_target():
    data = run(**STEADY)
    for lost in (0, 1, 0):
        add(data, "kills", {"queuesmith": {"lost": lost, "duplicated": 0}})
    verdicts = {t.text: t.verdict for t in targets(data)}
    assert verdicts["jobs lost by the kills"] == "missed by 1"
    assert verdicts["jobs duplicated by the kills"] == "met"


def test_a_missing_value_is_a_dash_and_words_are_kept():
    data = run(**STEADY)
    rows = {"stock": {"lost": None, "duplicated": "does not say"}, "node": {"lost": 3, "duplicated": 0}}
    add(data, "kills", rows)
    text = report.markdown(data)
    assert "| Stock | – | does not say |" in text
    assert "| Node | 3 | 0 |" in text


def test_results_survive_being_written_and_read(tmp_path):
    data = run(**STEADY)
    results.save(data, tmp_path / "results.json")
    again = json.loads((tmp_path / "results.json").read_text())
    assert report.markdown(again) == report.markdown(data)
    assert again["sections"]["throughput"]["rows"]["stock"]["noop"] == STEADY["stock"]


def test_what_is_measured_less_is_better_and_what_must_not_fall_is_compared_with_the_run_before(tmp_path):
    data = run(**STEADY)
    add(data, "memory", {"stock": {"waiting": 100}, "queuesmith": {"waiting": 150}})
    add(data, "streams", {"Queuesmith": {"consume": 800}})
    (tmp_path / "before.json").write_text(
        json.dumps({"sections": {"streams": {"rows": {"Queuesmith": {"consume": [1_000]}}}}})
    )
    data["before"] = results.before(
        tmp_path / "before.json", [("streams", "Queuesmith", "consume"), ("relay", "x", "y")]
    )
    verdicts = {t.text: (t.measured, t.verdict) for t in targets(data)}
    assert verdicts["bytes in Redis per waiting job"] == ("1.50 ×", "missed by 0.20 ×")
    assert verdicts["streams, Queuesmith: consume per second as before"] == ("0.80 ×", "missed by 0.10 ×")
    assert verdicts["relay, SQLite: rate per second as before"] == ("–", "not measured")


def test_a_row_of_an_earlier_run_says_so_and_makes_no_ratio(tmp_path):
    results.save(run(**STEADY), tmp_path / "results.json")
    now = run(stock=[1.0, 1.0, 1.0], queuesmith=[5.0, 5.0, 5.0])
    earlier = results.keep(now, tmp_path / "results.json", ["throughput"])
    results.keep_rows(now, earlier, "throughput")
    text = report.markdown(now)
    assert "| Node (2031-02-03, 2 × one) | 5,000 | – |" in text
    assert "| **Ours** | 5 | 5.00 × |" in text
    assert results.compare(now, "throughput", "noop", "node", "queuesmith-bare"), "two of the same earlier run"


def test_sections_measured_earlier_are_kept_but_never_mixed_with_another_kind_of_run(tmp_path):
    results.save(run(**STEADY), tmp_path / "results.json")
    now = run(**STEADY) | {"sections": {}}
    results.keep(now, tmp_path / "results.json", ["ceiling"])
    assert list(now["sections"]) == ["throughput"]
    assert "Measured 2031-02-03, 2 × one." in report.markdown(now)
    with pytest.raises(SystemExit, match="not to be mixed"):
        results.keep(now | {"mode": "quick"}, tmp_path / "results.json", [])
