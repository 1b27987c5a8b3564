"""Every recipe: small, clean under any names, green where it was started, and proven under kills."""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from guide import quotes
from queuesmith import cli
from queuesmith.project import Project
from queuesmith.prove.card import as_text
from queuesmith.prove.run import Options, prove
from queuesmith.prove.spec import load
from queuesmith.recipes import Recipe, parse_fields, recipes, render
from queuesmith.record import Refused

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MOST_LINES, MOST_TOKENS = 120, 2_000
# Not a name of any recipe: a word of SQL, an int as the key, every type.
QUEUE = "other.queue-2"
FIELDS = "order_number_of_the_customer: int, select: str, cents: int, share: float, isExpress: bool"

every_recipe = pytest.mark.parametrize("recipe", recipes().values(), ids=lambda recipe: recipe.id)


def start(recipe, folder, *options):
    command = [sys.executable, ROOT / "bin" / "queuesmith", "start", recipe.id, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def service_code(recipe):
    return {
        name: text
        for name, text in recipe.files.items()
        if name.endswith(".py") and not name.startswith(("test_", "send."))  # the other side, played for tests
    }


# ---- as a text


@every_recipe
def test_recipe_is_small(recipe: Recipe):
    lines = [line.strip() for text in service_code(recipe).values() for line in text.splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= MOST_LINES
    assert quotes.tokens((ROOT / recipe.page).read_text()) <= MOST_TOKENS


@every_recipe
def test_page_quotes_the_whole_service_and_names_both_commands(recipe: Recipe):
    text = (ROOT / recipe.page).read_text()
    for name in service_code(recipe):
        assert re.search(rf"^```\w+ reference/recipes/{recipe.id}/{re.escape(name)}$", text, re.MULTILINE), name
    assert f"queuesmith start {recipe.id} --into . " in text
    added = re.search(r"queuesmith add ([\w. -]+) --into", text)
    assert added
    assert added[1].split() == list(recipe.patterns)
    assert "queuesmith prove" in text
    skill = (ROOT / "skills" / recipe.skill / "SKILL.md").read_text()
    assert f"references/recipes/{recipe.id}.md" in skill


@every_recipe
def test_dead_letters_are_found_by_what_the_job_carried(recipe: Recipe):
    """A job's id may be a hash of the key: then it shows no key once BullMQ's own record is swept."""
    assert re.findall(r"select (\w+), reason from dead_letters", recipe.files["prove.toml"]) in ([], ["snapshot"])


@every_recipe
def test_code_names_the_key_alone_of_its_fields(recipe: Recipe):
    """The user replaces all others: `model_dump()`."""
    others = {field.name for field in recipe.fields[1:]}
    for name, text in service_code(recipe).items():
        tree = ast.parse(text)
        read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not read & others, name


@every_recipe
@pytest.mark.parametrize("into", [".", "src/app"])
@pytest.mark.parametrize("fields", ["id: str", FIELDS], ids=["short", "long"])
def test_code_is_clean_under_any_names(
    recipe: Recipe, into: str, fields: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["start", recipe.id, "--into", into, "--queue", QUEUE, "--fields", fields]) == 0
    here = [path for path in tmp_path.rglob("*.*") if "patterns" not in path.parts]
    files = [path for path in here if path.name in recipe.files]
    assert len(files) >= len(recipe.files)
    for path in files:
        words = set(re.findall(r"\w+", path.read_text()))
        assert path.suffix == ".csv" or not words & {field.name for field in recipe.fields}, path
    settings = (ROOT / "pyproject.toml").read_text().replace('src = ["reference", "tests"]', 'src = [".", "src"]')
    settings = settings.replace("skip-magic-trailing-comma = true", "").replace("split-on-trailing-comma = false", "")
    (tmp_path / "pyproject.toml").write_text(settings)
    for command in (["check", "--extend-ignore", "E501"], ["format", "--check"], ["format", "--check", "--isolated"]):
        words = [BIN / "ruff", *command, *(path for path in files if path.suffix == ".py")]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@every_recipe
def test_another_field_may_have_the_name_of_the_recipes_own_key(recipe: Recipe, tmp_path: Path):
    fields = recipe.fields[::-1]
    files = render(recipe, queue=QUEUE, fields=fields, project=Project(tmp_path, ".", ""), modules="patterns")
    task = next(node for node in ast.parse(files["jobs.py"]).body if getattr(node, "name", "") == "Task")
    assert re.findall(r"^    (\w+): (?:str|int)$", ast.unparse(task), re.MULTILINE) == [field.name for field in fields]
    assert fields[1].name in files["prove.toml"]


# ---- the command


def test_start_alone_lists_the_recipes(capsys):
    assert cli.main(["start"]) == 0
    assert all(f"  {ident} " in capsys.readouterr().out for ident in list(recipes())[:1])
    assert cli.main(["start", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == list(recipes())


@pytest.mark.parametrize(
    ("fields", "why"),
    {
        "": "cannot read ''",
        "parcel": "cannot read 'parcel'",
        "parcel: date": "cannot read",
        "class: str": "class is taken",
        "json: str": "json is taken",
        "parcel: str, help: str": "help is taken",
        "a: str, a: int": "names a field twice",
        "weight: float": "is the key: it is a str or an int",
    }.items(),
)
def test_invalid_fields_are_refused_with_what_to_write(fields, why):
    with pytest.raises(Refused, match=why):
        parse_fields(fields)


def test_a_project_without_a_list_of_its_packages_gets_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packages = tmp_path / "requirements.txt"
    assert cli.main(["start", "nightly", "--into", "."]) == 0
    first = packages.read_text()
    assert "bullmq==" in first
    assert cli.main(["start", "paid-call", "--into", "calls"]) == 0
    assert [line.partition(">")[0] for line in packages.read_text().removeprefix(first).splitlines()] == ["httpx2"]
    packages.write_text("flask\n")
    assert cli.main(["start", "webhook", "--into", "hooks"]) == 0
    assert packages.read_text() == "flask\n"


def test_an_edited_file_is_never_overwritten_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["start", "shared-queue", "--into", "."]
    assert cli.main([*words, "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "worker.py").write_text("mine\n")
    assert cli.main(words) == 2
    assert "worker.py" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["worker.py"]
    assert cli.main([*words, "--keep"]) == 0
    assert (tmp_path / "worker.py").read_text() == "mine\n"
    assert (tmp_path / "jobs.py").exists()
    assert cli.main([*words, "--force"]) == 0
    assert "ReliableWorker" in (tmp_path / "worker.py").read_text()


def test_an_unknown_recipe_names_those_there_are(capsys):
    assert cli.main(["start", "nothing"]) == 2
    assert "paid-call" in capsys.readouterr().err
    assert cli.main(["recipe", "paid-call"]) == 2
    assert "did you mean: queuesmith start" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--queue", "--fields"])
def test_an_empty_option_is_refused_and_no_default_taken(option, capsys):
    """An unset shell variable: the service would listen to a queue that nobody fills."""
    assert cli.main(["start", "paid-call", "--dry-run", option, ""]) == 2
    assert option in capsys.readouterr().err


def test_start_says_what_the_key_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["start", "paid-call", "--dry-run", "--fields", "photo: str, width: int"]) == 0
    out = capsys.readouterr().out
    assert "Key: photo, the first field, or what `key_of` in jobs.py returns." in out
    assert "\nThen:\n" in out
    assert "httpx2" in out
    assert "pytest-asyncio" not in out


def test_start_from_the_top_of_a_monorepo_says_where_its_commands_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "services" / "photos").mkdir(parents=True)
    (tmp_path / "services" / "photos" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["start", "paid-call", "--dry-run", "--into", "services/photos/src/photos"]) == 0
    out = capsys.readouterr().out
    assert "\nThen, in services/photos:\n  PYTHONPATH=src python -m pytest" in out
    assert Path(out.split()[-1]).is_file(), "the page, wherever the plugin is"


# ---- as a service


@pytest.fixture
def _own_python(monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "0.15")


@pytest.fixture
def flat(recipe, tmp_path, _own_python):
    start(recipe, tmp_path, "--into", ".", "--queue", QUEUE, "--fields", FIELDS)
    return tmp_path


def own_test(folder, file="test_service.py", **env):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "-p", "no:cacheprovider", file]
    # A group of its own: a timeout must leave no worker behind.
    test = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = test.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(test.pid, signal.SIGKILL)
    assert test.returncode == 0, output


@every_recipe
@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.usefixtures("_own_python")
def test_started_into_a_package_its_own_test_is_green(recipe: Recipe, tmp_path: Path):
    start(recipe, tmp_path, "--into", "src/app", "--queue", QUEUE, "--fields", FIELDS)
    own_test(tmp_path, "tests/test_service.py", PYTHONPATH="src")


@pytest.mark.slow
def test_two_nightly_jobs_have_two_schedules(tmp_path):
    start(recipes()["nightly"], tmp_path, "--into", "app")
    start(recipes()["nightly"], tmp_path, "--into", "app/Weekly_mail", "--queue", QUEUE)
    both = "import app.worker, app.Weekly_mail.worker as two; print(app.worker.nightly.id, two.nightly.id)"
    done = subprocess.run([sys.executable, "-c", both], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["nightly", "weekly-mail"]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("into", [".", "app"])
@pytest.mark.usefixtures("_own_python")
def test_a_second_recipe_lives_beside_the_first_on_its_modules_and_its_database(into, tmp_path):
    known, below = recipes(), f"{into}/mails".removeprefix("./")
    start(known["paid-call"], tmp_path, "--into", into)
    again = [sys.executable, ROOT / "bin" / "queuesmith", "start", "unkeyed-call", "--into", into]
    refused = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert f"--into {into}/nightly".replace("./", "") in refused.stderr
    start(known["unkeyed-call"], tmp_path, "--into", below)
    assert [path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("patterns")] == [into]
    first = f"{into}." if into != "." else ""
    # Two tables, not one under two definitions; and two providers, whose calls have the same keys.
    both = f"import {first}worker as one, {first}mails.worker as two; print(one.results, two.results)"
    done = subprocess.run([sys.executable, "-c", both], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["results", "mails_results"]
    assert '"mails",' in (tmp_path / below / "worker.py").read_text()
    assert load(tmp_path / "prove-mails.toml").effect.query.endswith("from mails_results group by 1")
    own_test(tmp_path, "tests/test_mails.py")


@every_recipe
@pytest.mark.fault
@pytest.mark.full
def test_started_into_a_flat_folder_its_own_test_is_green(recipe: Recipe, flat: Path):
    own_test(flat)


@every_recipe
@pytest.mark.slow
@pytest.mark.fault
def test_recipe_holds_under_kills(recipe: Recipe, flat: Path):
    spec = load(flat / "prove.toml")
    # Without a provider jobs end at once: a deploy hit none of nightly's.
    faults = ("twice", *(("kill-at-effect",) if spec.providers else ("kill-at-commit", "rolling")))
    card = prove(spec, Options(seed=3, only=faults))
    shutil.rmtree(card.evidence, ignore_errors=True)
    verdicts = {row.fault: row.verdict for row in card.rows}
    assert {verdicts[name] for name in faults} == {"held"}, as_text(card)
    assert not card.broken, as_text(card)


@every_recipe
@pytest.mark.fault
@pytest.mark.full
@pytest.mark.timeout(600)
def test_recipe_holds_under_every_quick_fault(recipe: Recipe, flat: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "1")
    card = prove(load(flat / "prove.toml"), Options(seed=3, quick=True))
    shutil.rmtree(card.evidence, ignore_errors=True)
    killed = [row.verdict for row in card.rows if row.fault.startswith("kill")]
    assert "held" in killed, as_text(card)
    assert not card.broken, as_text(card)


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.usefixtures("_own_python")
def test_a_nightly_job_that_calls_another_service_per_item_as_the_page_says_calls_once(tmp_path):
    start(recipes()["nightly"], tmp_path, "--into", ".")
    page = (ROOT / "skills/background-jobs/references/combine.md").read_text()
    (tmp_path / "outside.py").write_text(re.findall(r"```python [^\n]*\n(.*?)```", page, re.DOTALL)[0])
    added = re.search(r"queuesmith (add outside-call.*) --into", page)
    assert added
    add = [sys.executable, ROOT / "bin" / "queuesmith", *added[1].split(), "--into", "."]
    subprocess.run(add, cwd=tmp_path, capture_output=True, check=True)
    worker = "from outside import Outside\n" + (tmp_path / "worker.py").read_text()
    for part in re.findall(r"```diff\n(.*?)```", page, re.DOTALL)[0].split(" …\n"):
        old = "".join(line[1:] for line in part.splitlines(keepends=True) if line[0] == " ")
        assert worker.count(old) == 1, old
        worker = worker.replace(old, "".join(line[1:] for line in part.splitlines(keepends=True)))
    (tmp_path / "worker.py").write_text(worker)
    assert asked_of_one_refused_and_one_lost(tmp_path) == ["k-1", "k-2", "k-3", "k-2"]
    block = re.search(r"```toml\n\[service\.env\]\n(.*?)\n\n(.*?)```", page, re.DOTALL)
    assert block
    proof = (tmp_path / "prove.toml").read_text()
    (tmp_path / "prove.toml").write_text(proof.replace("[service.env]\n", f"[service.env]\n{block[1]}\n") + block[2])
    card = prove(load(tmp_path / "prove.toml"), Options(seed=3, only=("kill-at-effect",)))
    shutil.rmtree(card.evidence, ignore_errors=True)
    assert {row.verdict for row in card.rows} == {"held"}, as_text(card)


def asked_of_one_refused_and_one_lost(folder):
    asked = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["item"])
            self.send_response({1: 422, 2: 503}.get(len(asked), 204))
            self.end_headers()

    program = """if True:
        import asyncio, outside
        from patterns.core.open_store import create_all, open_store

        async def main():
            store = open_store("sqlite:///told.db")
            await create_all(store)
            told, items = outside.Outside(store), ("k-1", "k-2", "k-3")
            try:
                await told.tell_all(items)
            except outside.InFlight as later:
                await asyncio.sleep(later.delay + 0.1)
            await told.tell_all(items)

        asyncio.run(main())"""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {**os.environ, "OUTSIDE_URL": f"http://127.0.0.1:{server.server_port}", "OUTSIDE_LONGEST": "1"}
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
        server.shutdown()
    assert "Permanent: outside refused 'k-1'" in done.stderr
    return asked


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.usefixtures("_own_python")
def test_a_webhook_that_nobody_can_read_is_seen_as_failed(tmp_path):
    start(recipes()["webhook"], tmp_path, "--into", ".", "--fields", "event: str")
    card = prove(load(tmp_path / "prove.toml"), Options(seed=3, only=("failing",)))
    shutil.rmtree(card.evidence, ignore_errors=True)
    assert {row.verdict for row in card.rows} == {"held"}, as_text(card)
