"""`copier update` from one tag to the next brings a pattern's fix and keeps what the user wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import copier
import yaml

from .conftest import export

Run = Callable[..., Any]
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")


def commit(run: Run, folder: Path, message: str) -> None:
    run(*GIT, "add", "-A", cwd=folder)
    run(*GIT, "commit", "-qm", message, cwd=folder)


def test_an_update_brings_the_fix_and_keeps_the_users_edits(run: Run, tmp_path: Path) -> None:
    upstream, project = tmp_path / "upstream", tmp_path / "shop"
    export(upstream)
    run(*GIT, "init", "-q", cwd=upstream)
    commit(run, upstream, "first")
    run("git", "tag", "v0.1.0", cwd=upstream)
    # A real address, so that it is cloned, and no --trust: there is nothing to run.
    address = f"git+file://{upstream}"
    copier.run_copy(address, project, data={"job": "send-invoice"}, defaults=True, quiet=True)
    assert yaml.safe_load((project / ".copier-answers.yml").read_text())["_commit"] == "v0.1.0"
    jobs, errors = project / "src/shop/jobs.py", project / "src/shop/patterns/errors.py"
    jobs.write_text(jobs.read_text().replace("STEPS = 5", "STEPS = 7  # ours"))
    run(*GIT, "init", "-q", cwd=project)
    commit(run, project, "new project, with our own steps")

    fixed = upstream / "reference/studyhall/patterns/errors.py"
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
    assert yaml.safe_load((project / ".copier-answers.yml").read_text())["_commit"] == "v0.2.0"
