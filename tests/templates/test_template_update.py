"""`copier update` from one tag to the next brings a pattern's fix and keeps what the user wrote."""

import subprocess
import sys
from pathlib import Path

import copier
import pytest
import yaml
from copier.errors import DirtyLocalWarning

from .conftest import export

ROOT = Path(__file__).resolve().parents[2]
FIRST = "1e00c0c"  # the last commit of 0.1.0
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")


def commit(run, folder, message):
    run(*GIT, "add", "-A", cwd=folder)
    run(*GIT, "commit", "-qm", message, cwd=folder)


@pytest.fixture
def upstream(run, tmp_path):
    folder = tmp_path / "upstream"
    export(folder, proofs=False)
    run(*GIT, "init", "-q", cwd=folder)
    commit(run, folder, "first")
    return folder


def answered(project):
    return yaml.safe_load((project / ".copier-answers.yml").read_text())


@pytest.mark.slow
def test_an_update_brings_the_fix_and_keeps_the_users_edits(run, tmp_path, upstream):
    project = tmp_path / "shop"
    run("git", "tag", "v0.1.0", cwd=upstream)
    # A real address, so that it is cloned, and no --trust: there is nothing to run.
    address = f"git+file://{upstream}"
    copier.run_copy(address, project, data={"job": "send-invoice"}, defaults=True, quiet=True)
    assert answered(project)["_commit"] == "v0.1.0"
    jobs, errors = project / "src/shop/jobs.py", project / "src/shop/patterns/core/errors.py"
    jobs.write_text(jobs.read_text().replace("STEPS = 5", "STEPS = 7  # ours"))
    run(*GIT, "init", "-q", cwd=project)
    commit(run, project, "new project, with our own steps")

    fixed = upstream / "reference/studyhall/patterns/core/errors.py"
    fixed.write_text(fixed.read_text() + "\n# the fix\n")
    common = upstream / "templates/common/package/jobs.py"
    common.write_text(common.read_text().replace("attempts=5", "attempts=6"))
    commit(run, upstream, "fix")
    run("git", "tag", "v0.2.0", cwd=upstream)

    copier.run_update(str(project), defaults=True, overwrite=True, quiet=True)
    assert errors.read_bytes() == fixed.read_bytes()
    text = jobs.read_text()
    assert "STEPS = 7  # ours" in text
    assert "attempts=6" in text
    assert "<<<<<<<" not in text
    assert "send_invoice" in text
    assert answered(project)["_commit"] == "v0.2.0"


@pytest.mark.slow
def test_a_project_of_0_1_0_becomes_one_of_this_version(run, tmp_path, render):
    upstream, project = tmp_path / "upstream", tmp_path / "shop"
    if subprocess.run(["git", "cat-file", "-e", FIRST], cwd=ROOT, check=False, capture_output=True).returncode:
        pytest.skip("this checkout has no history back to 0.1.0: git fetch --unshallow")
    run("git", "clone", "-q", "--shared", "--no-checkout", ROOT, upstream, cwd=tmp_path)
    run("git", "tag", "-f", "v0.1.0", FIRST, cwd=upstream)
    run("git", "read-tree", "--empty", cwd=upstream)
    export(upstream, proofs=False)
    commit(run, upstream, "this version")
    run("git", "tag", "-f", "v0.2.0", cwd=upstream)
    copier.run_copy(f"git+file://{upstream}", project, defaults=True, quiet=True, vcs_ref="v0.1.0")
    assert (project / "src/shop/patterns/errors.py").is_file()
    jobs, own = project / "src/shop/jobs.py", project / "src/shop/ours.py"
    jobs.write_text(jobs.read_text().replace("attempts=5", "attempts=9"))
    own.write_text("OURS = True\n")
    run(*GIT, "init", "-q", cwd=project)
    commit(run, project, "made with 0.1.0, with our own number of attempts")

    copier.run_update(str(project), defaults=True, overwrite=True, quiet=True, vcs_ref="v0.2.0")
    assert not run("git", "grep", "-l", "<<<<<<<", cwd=project, code=1).stdout
    new = render("shop")
    jobs.write_text(jobs.read_text().replace("attempts=9", "attempts=5"))
    own.unlink()
    wanted, updated = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (new, project)
    )
    updated = {path: text for path, text in updated.items() if ".git" not in path.parts}
    differs = {path.as_posix() for path in wanted | updated if wanted.get(path) != updated.get(path)}
    # Where it came from, and that updates come from there.
    assert differs <= {".copier-answers.yml", "README.md"}


@pytest.mark.slow
def test_a_project_made_from_a_checkout_with_uncommitted_changes_can_be_updated(run, tmp_path, upstream):
    errors = upstream / "reference/studyhall/patterns/core/errors.py"
    committed = errors.read_bytes()
    errors.write_bytes(committed + b"\n# half an idea\n")
    made = run(sys.executable, upstream / "bin/queuesmith", "new", "shop", "--defaults", cwd=tmp_path)
    project = tmp_path / "shop"
    copy = project / "src/shop/patterns/core/errors.py"
    assert copy.read_bytes() == committed
    recorded = answered(project)["_commit"]
    head = run("git", "rev-parse", "HEAD", cwd=upstream).stdout.strip()
    assert run("git", "rev-parse", f"{recorded}^{{commit}}", cwd=upstream).stdout.strip() == head
    assert "uncommitted changes" in made.stderr
    assert head[:9] in made.stderr
    # The naive call, for comparison: it records a commit that nobody has.
    naive = tmp_path / "naive"
    with pytest.warns(DirtyLocalWarning):
        copier.run_copy(str(upstream), naive, defaults=True, quiet=True, vcs_ref="HEAD")
    run("git", "cat-file", "-e", answered(naive)["_commit"], cwd=upstream, code=128)

    run(*GIT, "init", "-q", cwd=project)
    commit(run, project, "new project")
    commit(run, upstream, "the idea is whole")
    copier.run_update(str(project), defaults=True, overwrite=True, quiet=True, vcs_ref="HEAD")
    assert copy.read_bytes() == errors.read_bytes()
