"""The command: exit codes, outputs, evidence, and a first file for a repository."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from harness.processes import start_tied
from queuesmith import catalogue
from queuesmith.cli import main
from queuesmith.prove import processes
from queuesmith.prove.card import as_json, as_text, reading
from queuesmith.prove.faults import FAULTS
from queuesmith.prove.init import _PAGES, look_at, page_of
from queuesmith.prove.invariants import READ, TIME_UP, Broken, Row, _late, _measured
from queuesmith.prove.run import NOT_QUICK, Card
from queuesmith.prove.spec import load
from queuesmith.prove.world import Batch, Job

SERVICES = Path(__file__).parent / "services"
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fault


def sample(folder, defect="", more=""):
    shutil.copyfile(SERVICES / "parcels.py", folder / "parcels.py")
    text = (SERVICES / "parcels.toml").read_text().replace("env = {", f'env = {{ DEFECT = "{defect}",')
    (folder / "prove.toml").write_text(text + more)
    return folder / "prove.toml"


@pytest.mark.slow
def test_a_broken_promise_is_exit_code_1_with_evidence_and_every_output(tmp_path, capsys):
    junit, html = tmp_path / "card.xml", tmp_path / "card.html"
    file = sample(tmp_path, "new-key")
    argv = ["prove", str(file), "--only", "lost", "--seed", "5", "--junit", str(junit), "--html", str(html)]
    assert main([*argv, "--json"]) == 1
    card = json.loads(capsys.readouterr().out)
    evidence = Path(card["evidence"])
    try:
        assert card["verdict"] == "broken"
        assert card["seed"] == 5
        page = f"{catalogue.repository()}/blob/main/skills/background-jobs/references/idempotency.md"
        assert card["read"] == {"duplicated": [page]}
        assert f'Read: <a href="{page}">idempotency</a>' in html.read_text()
        assert {path.name for path in evidence.iterdir()} == {"prove.toml", "lost"}
        assert "POST /labels done under key" in (evidence / "lost" / "timeline.txt").read_text()
        assert {path.name for path in (evidence / "lost").iterdir()} >= {"timeline.json", "logs", "redis"}
        suite = ElementTree.fromstring(junit.read_text())
        assert [case.get("name") for case in suite if case.find("failure") is not None] == [
            "lost: the answer is lost after the effect, once per job"
        ]
        assert '<td class="broken">BROKEN</td>' in html.read_text()
    finally:
        shutil.rmtree(evidence)


def test_a_clean_run_is_exit_code_0_and_leaves_nothing(tmp_path, capsys):
    assert main(["prove", str(sample(tmp_path)), "--only", "twice"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"twice .* held", out)
    assert "0 broken; 1 of 1 faults hit." in out
    assert "Evidence" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("parcels.py worker", "nowhere.py worker"), r"worker 1 ends at once(.|\n)*nowhere.py"),
        (("python parcels.py worker", "pyhton parcels.py worker"), "cannot start worker 1: pyhton"),
        (("from labels", "from label"), "no such table: label"),
        (('/parcels"', '/parcels", method = "PUT"'), "`submit` was refused, without any fault: 501"),
        (("recovery =", "recvery ="), "line 25: `recvery` is not known in"),
        (("jobs = 8", 'setup = "pyhton migrate.py"'), r"cannot run pyhton: .* \(prove.toml, line 11\)"),
        (("jobs = 8", 'setup = "python -c 1/0"'), r"`setup` failed with 1 \(prove.toml, line 11\)(.|\n)*ZeroDivision"),
        (("POST /labels", "POST /lables"), "Calls that no route answers: POST /labels"),
    ],
)
def test_a_wrong_set_up_is_exit_code_2_and_says_what_is_wrong(change, says, tmp_path, capsys):
    file = sample(tmp_path)
    assert change[0] in file.read_text()
    file.write_text(file.read_text().replace(*change))
    assert main(["prove", str(file), "--only", "twice"]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_wrong_set_up_is_an_error_in_json_too(tmp_path, capsys):
    argv = ["prove", str(sample(tmp_path)), "--json"]
    assert main([*argv, "--only", "redis-kil"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "--only redis-kil: did you mean redis-kill?"
    assert main([*argv, "--html", str(tmp_path / "nowhere" / "card.html")]) == 2
    assert "there is no folder" in json.loads(capsys.readouterr().out)["error"]


def test_only_none_tries_the_set_up_and_a_terminal_sees_a_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["prove", str(sample(tmp_path)), "--only", "none"]) == 0
    err = capsys.readouterr().err
    assert f"\r\033[K[{' ' * 20}] starting" in err
    assert "--only none tries the set-up alone, and no fault" in err


@pytest.mark.parametrize(
    ("service", "page"),
    [
        ("celery_tutorial", "celery"),
        ("rq_tutorial", "rq"),
        ("dramatiq_tutorial", "dramatiq"),
        ("bullmq_node", "bullmq-ts"),
        ("stock_bullmq", ""),
        ("reliable", ""),
    ],
)
def test_pages_to_read_belong_to_the_stack(service, page):
    spec = load(SERVICES / service / "prove.toml")
    assert page_of(spec) == page
    broken = [Broken("stuck", "1 of 8"), Broken("duplicated", "1 of 8")]
    card = Card("shop", 1, "Redis", 2, 1.0, [Row("lost", "", "broken", "", broken)], stack=page_of(spec))
    pages = {name: [Path(link).stem for link in links] for name, links in reading(card).items()}
    if page:
        assert pages == {"stuck": [page], "duplicated": [page, "idempotency"]}
    else:
        assert pages == {"stuck": ["bullmq-worker", "stall-budget"], "duplicated": ["idempotency"]}


def test_every_page_to_read_is_there():
    skills = ROOT / "skills"
    names = {path.stem for path in skills.rglob("*.md")}
    assert {name for pages in READ.values() for name in pages} | set(_PAGES.values()) <= names


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_run_that_is_ended(number, tmp_path):
    """No process, not even one that left its parent, and no folder."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = start_tied(
        [sys.executable, "-m", "queuesmith", "prove", str(sample(tmp_path, "orphans")), "--quick"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    below = set()
    deadline = time.monotonic() + 60
    # two worlds at least: Redis, an api and workers each
    while len(below) < 7 and time.monotonic() < deadline:
        below = set(processes.family(run.pid)) - {run.pid}
        time.sleep(0.02)
    assert len(below) >= 7
    below |= processes.marked(f"TMPDIR={temporary}").keys() - {run.pid}
    run.send_signal(number)
    code = run.wait(30)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        left = [pid for pid in below if processes.alive(pid)]
        left += list(processes.marked(f"TMPDIR={temporary}"))
        if not left and not list(temporary.iterdir()):
            break
        time.sleep(0.05)
    assert (left, list(temporary.iterdir())) == ([], [])
    assert code == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]


@pytest.mark.parametrize(
    ("name", "text", "stack", "worker", "queue"),
    [
        (
            "worker.py",
            'from bullmq import Worker\nw = Worker("labels", f)',
            "BullMQ for Python",
            "python worker.py",
            "labels",
        ),
        (
            "src/shop/tasks.py",
            "from celery import Celery\napp = Celery('shop')",
            "Celery",
            "celery -A shop.tasks worker --concurrency 4",
            "",
        ),
        ("jobs.py", "from rq import Queue\nq = Queue('mail')", "RQ", "rq worker --url {redis} mail", "mail"),
        ("actors.py", "import dramatiq\n@dramatiq.actor\ndef f(): ...", "dramatiq", "dramatiq actors", ""),
        ("app/main.py", "class WorkerSettings:\n  functions = []", "arq", "arq app.main.WorkerSettings", ""),
        ("cmd/worker/main.go", "srv := asynq.NewServer(opt, cfg)", "asynq", "{dir}/worker", ""),
        ("tasks/__init__.py", "import dramatiq", "dramatiq", "dramatiq tasks", ""),
        ("consumer.js", "const NAME = 'mails'\nnew Worker(NAME, f)", "BullMQ for Node", "node consumer.js", "mails"),
        ("consumer.mjs", "new Worker(name, f)", "BullMQ for Node", "node consumer.mjs", ""),
        (
            "worker.mjs",
            "const w = new Worker('labels', async () => {})",
            "BullMQ for Node",
            "node worker.mjs",
            "labels",
        ),
        ("src/worker.ts", "new Worker<Data>('labels', f)", "BullMQ for Node", "npx tsx src/worker.ts", "labels"),
    ],
)
def test_init_recognises_the_stack_and_writes_a_file_that_loads(name, text, stack, worker, queue, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    look = look_at(tmp_path)
    assert look is not None
    assert (look.stack, look.worker, look.queue, look.seen) == (stack, worker, queue, name)
    assert main(["prove", "init", str(tmp_path)]) == 0
    spec = load(tmp_path / "prove.toml")
    assert str(spec.service.worker.run).replace("'", "") == worker
    assert spec.service.queue == (queue if "BullMQ" in stack else "")
    # never over a file that somebody may have edited
    assert main(["prove", "init", str(tmp_path)]) == 2


def test_init_takes_over_what_is_clear_and_asks_for_the_rest(tmp_path):
    package = tmp_path / "src" / "shop"
    package.mkdir(parents=True)
    (package / "tasks.py").write_text(
        "import os\nfrom celery import Celery\napp = Celery(broker=os.environ['CELERY_BROKER_URL'])\n"
        "lock = f\"{os.getenv('REDIS_HOST')}:{os.environ.get('REDIS_PORT')}\"\nos.environ['CARRIER_URL']\n"
    )
    (tmp_path / "enqueue.py").write_text("import sys\nprint(sys.argv)")
    assert main(["prove", "init", str(tmp_path)]) == 0
    spec = load(tmp_path / "prove.toml")
    assert spec.service.env == {
        "PYTHONPATH": "src",
        "CELERY_BROKER_URL": "{redis}",
        "REDIS_HOST": "{redis.host}",
        "REDIS_PORT": "{redis.port}",
    }
    assert str(spec.service.submit).replace("'", "") == "python enqueue.py {key}"
    assert "# It reads: CARRIER_URL.\n" in spec.file.read_text()


def test_init_asks_where_it_recognises_nothing(tmp_path, capsys):
    assert main(["prove", "init", str(tmp_path)]) == 0
    assert "no queue library was recognised" in capsys.readouterr().out
    assert load(tmp_path / "prove.toml").service.worker.run.words == ("python", "worker.py")


@pytest.mark.parametrize(
    ("text", "run", "ready"),
    [
        (
            "from flask import Flask, request\napp = Flask(__name__)\n@app.get('/healthz')\ndef up(): ...\n"
            "@app.post('/signup')\ndef signup():\n    email = request.json['email']\n",
            "flask --app shop:app run --port {port}",
            "http://127.0.0.1:{port}/healthz",
        ),
        (
            "from flask import Flask\nweb = Flask('x')\n@web.route('/signup', methods=['POST'])\ndef f():\n"
            "    return request.get_json(force=True).get('email')\n",
            "flask --app shop:web run --port {port}",
            "",
        ),
        (
            "app: FastAPI = FastAPI()\nclass User(BaseModel):\n    email: str\n@app.get('/users/{id}')\n"
            "@app.get('/ping')\n@app.post('/signup', status_code=202)\nasync def f(user: User): ...\n",
            "uvicorn shop:app --port {port}",
            "http://127.0.0.1:{port}/ping",
        ),
    ],
    ids=["flask", "flask route", "fastapi"],
)
def test_init_recognises_routes_and_leaves_copied_patterns_out(text, run, ready, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(f"import os\nos.environ['VENDOR_URL']\n{text}")
    assert main(["add", "outside-call.command", "engine", "--into", "."]) == 0
    assert main(["prove", "init"]) == 0
    spec = load(tmp_path / "prove.toml")
    assert spec.service.api is not None
    assert (str(spec.service.api.run).replace("'", ""), spec.service.api.ready) == (run, ready)
    submit = re.search("^submit = .*", spec.file.read_text(), re.MULTILINE)
    assert submit is not None
    assert 'POST", url = "http://127.0.0.1:{port}/signup", json = { email = "{key}" }' in submit[0]
    assert "# It reads: VENDOR_URL.\n" in spec.file.read_text()


def test_prove_runs_with_the_plugins_own_packages_and_the_service_with_its_own(tmp_path):
    """`python3` is the user's environment, which has neither redis nor psycopg."""
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    for name in ("queuesmith", "reference", "skills", "pyproject.toml", ".venv"):
        (plugin / name).symlink_to(ROOT / name if name != ".venv" else sys.prefix)
    shutil.copytree(ROOT / "bin", plugin / "bin")
    venv.create(tmp_path / "venv", symlinks=True)
    spec = '[service]\nsetup = "python which.py"\nworker = "true"\nsubmit = "true {key}"\n[effect]\nlog = "{key}"'
    (tmp_path / "prove.toml").write_text(spec)
    (tmp_path / "which.py").write_text("import sys; sys.exit(f'runs in {sys.prefix}')")
    path = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["python3", plugin / "bin" / "queuesmith", "prove", "--only", "none"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "needs the package" not in done.stderr
    assert f"runs in {tmp_path / 'venv'}" in done.stderr


def test_without_redis_no_package_is_needed_and_an_api_without_ready_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    file = tmp_path / "prove.toml"
    file.write_text("""[service]
worker = "sleep 99"
api = "sh -c 'sleep 2; exec python -m http.server -b 127.0.0.1 {port}'"
submit = { method = "GET", url = "http://127.0.0.1:{port}/?{key}" }
[effect]
log = "{key}"
""")
    assert main(["prove", str(file), "--only", "none"]) == 0


def test_the_list_of_faults_and_invariants_needs_no_package():
    blocked = "import sys; sys.modules['redis'] = None; from queuesmith.cli import main; sys.exit(main(sys.argv[1:]))"

    def run(*words):
        command = [sys.executable, "-c", blocked, "prove", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert re.search(r"kill-at-effect +\* SIGKILL(.|\n)*Retry-After is kept", run("--list").stdout)
    assert f".prove/bin/python {ROOT}/bin/queuesmith prove" in run(str(SERVICES / "parcels.toml")).stderr


def test_the_summary_names_what_was_not_run_and_the_command_that_runs_it():
    rows = [
        Row("kill-at-effect", "", "held", "hit worker 1"),
        Row("lost", "", "unclear", "2 not done when the run's time was up"),
        Row("freeze", "", "not run", TIME_UP),
        Row("quiet", "", "not run", NOT_QUICK),
        Row("poison", "", "not run", "needs `poison` in [service]"),
    ]
    card = Card("shop", 1, "Redis", 2, 52.0, rows, command="queuesmith prove shop.toml")
    assert as_text(card).splitlines()[-4:] == [
        "1 held, 0 broken, 1 unclear; 1 of 3 faults hit.",
        "Not run (time was up): freeze.",
        "Not run (not with --quick): quiet.",
        "Run the rest: queuesmith prove shop.toml --only lost,freeze,quiet",
    ]
    assert json.loads(as_json(card))["rest"] == ["lost", "freeze", "quiet"]
    card.rows[0] = Row("kill-at-effect", "", "not run", TIME_UP)
    assert as_text(card).endswith("run it again on a quieter machine, or without --quick")


def test_kills_a_redis_restart_an_outage_and_duplicates_come_first():
    """On a busy machine a minute has time for five or six."""
    first = list(FAULTS)[1:6]
    assert set(first) == {"kill-at-effect", "kill-at-commit", "redis-restart", "outage", "twice"}
    assert all(FAULTS[name].quick for name in first)


@pytest.mark.parametrize(("took", "shown"), [(29.0, "29.0 s"), (32.8, "32.8 s (limit 30 s + 4.0 s, its start)")])
def test_the_start_that_the_recovery_limit_allows_is_on_the_card(took, shown):
    job = Job("parcel-1", count=1, seen=[took], unseen=took)
    batch = Batch("redis-kill")
    world = SimpleNamespace(warmup=4.0, spec=SimpleNamespace(promises=SimpleNamespace(recovery=30.0)))
    assert _measured(world, batch, [job]).endswith(f"recovered in {shown}")
    assert not _late(world, [job])
