"""The benchmark from end to end, small: real peers on a real Redis, nothing lost and nothing counted twice."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from bench import lab as labs
from bench import sections
from bench.lab import ENVS, ORDER, OURS, PEERS, RECORD, Peer, Tally
from bench.sections import throughput
from harness.processes import ROOT, alive


@pytest.mark.slow
def test_one_command_writes_json_report_and_picture(tmp_path):
    argv = ["-m", "bench", "--section", "enqueue,latency", "--peers", "queuesmith-bare", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    row = results["sections"]["enqueue"]["rows"]["queuesmith-bare"]
    (single,), (bulk,), (gain,) = row["single"], row["bulk"], row["gain"]
    assert single > 0
    assert gain == pytest.approx(bulk / single, rel=0.01)
    delays = results["sections"]["latency"]["rows"]["queuesmith-bare"]
    assert [0] < delays["idle_p50"] <= delays["idle_p99"]
    assert (tmp_path / "RESULTS.md").read_text() == done.stdout.removesuffix("\n")
    assert "enqueue 1/1" in done.stderr, "progress"


@pytest.mark.parametrize("flag", ["--section=nonsense", "--peers=celery,nonsense"])
def test_an_unknown_name_is_answered_with_the_known_ones(flag):
    done = subprocess.run(
        [sys.executable, "-m", "bench", flag], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "unknown: nonsense; known: " in done.stderr


@pytest.mark.slow
def test_two_processes_do_every_job_once_and_end_with_the_bench(lab):
    for peer in lab.peers:
        with lab.bench(peer) as bench:
            bench.enqueue(300, bulk=True)
            workers = bench.start(2)
            records = bench.finished(300, workers)
            assert bench.tally.missing(300) == []
            assert bench.tally.duplicated() == {}
            assert all(record.sent < record.started <= record.ended for record in records)
            pids = workers.pids()
            assert len(pids) == 2
            assert workers.memory()["pss"] > 5
            assert workers.cpu_seconds() > 0
        assert not any(map(alive, pids))


def test_a_tally_tells_lost_and_duplicated_jobs(tmp_path):
    tally = Tally(tmp_path / "tally")
    assert tally.count() == 0
    now = time.time_ns()
    whole = b"".join(RECORD.pack(number, now, now + 1, now + 2 + number) for number in (2, 0, 2, 4))
    tally.path.write_bytes(whole + b"half a record")
    assert tally.count() == 4
    assert [record.number for record in tally.records()] == [0, 2, 2, 4]
    assert tally.missing(5) == [1, 3]
    assert tally.duplicated() == {2: 2}


def test_the_rate_counts_neither_start_nor_tail():
    """A hundred jobs, one every 10 ms, but the first tenth took a minute and the last is a minute late."""
    second = 1_000_000_000
    ends = [n * 6 * second for n in range(10)] + [60 * second + n * second // 100 for n in range(80)]
    ends += [120 * second + n for n in range(10)]
    records = [labs.Record(n, 0, 0, end) for n, end in enumerate(ends)]
    assert throughput.rate(records) == pytest.approx(100, rel=0.02)


def test_a_worker_that_ends_is_an_error_with_what_it_said(lab):
    with lab.bench(lab.peers[1]) as bench:
        bench.url = "no-such-scheme://nowhere"
        workers = bench.start()
        with pytest.raises(RuntimeError, match=r"(?s)its worker ended.*must specify one of the following schemes"):
            bench.finished(1, workers, timeout=60)


def test_a_peer_that_cannot_be_installed_is_reported_and_left_out(tmp_path, monkeypatch):
    for name in ("gone", "queuesmith"):
        (tmp_path / "peers" / name).mkdir(parents=True)
        text = (PEERS / "queuesmith" / "peer.toml").read_text()
        (tmp_path / "peers" / name / "peer.toml").write_text(text.replace("Queuesmith, full", name))
    (tmp_path / "peers" / "gone" / "requirements.txt").write_text("no-such-package-at-all==1.0\n")
    monkeypatch.setattr(labs, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(labs, "ENVS", tmp_path / "envs")
    monkeypatch.setenv("UV_OFFLINE", "1")
    ready, missing = labs.available(["gone", "queuesmith"])
    assert [peer.id for peer in ready] == ["queuesmith"]
    assert len(missing) == 1
    assert "gone" in missing[0]


def test_every_peer_says_its_settings_and_pins_every_package():
    assert {path.name for path in PEERS.iterdir() if path.name not in ("shared", "__pycache__")} == set(ORDER)
    for name in ORDER:
        peer = Peer.load(name)
        assert len(peer.settings) > 30, name
        assert peer.states[0] == "waiting"
        if peer.is_node:
            pins = json.loads((PEERS / name / "package.json").read_text())["dependencies"].values()
            assert all(re.fullmatch(r"\d+(\.\d+)+", pin) for pin in pins)
        elif peer.is_go:
            assert re.fullmatch(r"v\d+(\.\d+)+", peer.version())
        elif name not in OURS:
            lines = (PEERS / name / "requirements.txt").read_text().splitlines()
            assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
            assert any(line.startswith(f"{peer.package}==") for line in lines), name


def test_every_section_says_what_it_measures():
    for name in sections.NAMES:
        module = sections.load(name)
        assert module.TITLE
        assert len(module.ABOUT) > 60, name
        assert all(column.label for column in module.COLUMNS.values())
    files = {
        path.stem for path in (ROOT / "bench" / "sections").glob("*.py") if hasattr(sections.load(path.stem), "TITLE")
    }
    assert files == set(sections.NAMES)


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("name", ORDER)
def test_every_peer_does_all_kinds_of_work_once(lab, name):
    """Installs the peer if needed."""
    peer = Peer.load(name)
    peer.install()
    assert name in OURS or (ENVS / name).exists()
    with lab.bench(peer) as bench:
        for turn, kind in enumerate(("noop", "io5", "cpu20")):
            bench.enqueue(20, kind=kind, first=turn * 20, payload=1_000, bulk=True)
        workers = bench.start(2)
        bench.finished(60, workers)
        assert bench.tally.missing(60) == []
        long = [record.ended - record.started for record in bench.tally.records() if record.number >= 40]
        assert min(long) > 19_000_000, "20 ms of CPU"
        assert os.getpid() not in workers.pids()
