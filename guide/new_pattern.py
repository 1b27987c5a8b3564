"""`make new-pattern NAME=slow-start SKILL=background-jobs`: the files of a new pattern, each marked where to fill
it in. They pass every check of the repository except the one for those marks, and the proof, which fails until then.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from guide import sync
from queuesmith import catalogue
from queuesmith.catalogue import ROOT, SKILLS

MARK = "FILL " + "IN"  # in two parts: a test looks for it everywhere

MODULE = '''"""@@: what goes wrong without it, in one sentence.

Promise: @@, in words that a test can break.

It does not hold @@: name the case.
"""

from .core.errors import JobError

__all__ = ["NAME_", "NotYet"]


class NotYet(JobError):
    """@@: what happened, and what to do next."""


async def NAME_() -> None:
    """@@: what it does."""
    raise NotYet(str(NotYet.__doc__))
'''

PROOF = '''"""@@: the fault, and what both versions do under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from studyhall.patterns.NAME_ import NAME_

pytestmark = pytest.mark.fault


async def naive() -> None:
    """@@: the version that people publish. It loses or duplicates something below."""


async def test_NAME_keeps_its_promise_where_the_naive_version_does_not(figures: Callable[..., Path]) -> None:
    """@@: kill or freeze a real process (`harness`), then count, and rename the test to what it proves."""
    lost = naive_lost = 0
    with pytest.raises(AssertionError):
        await naive()
    await NAME_()
    figures("ID", name="kills", kills=0, lost=lost, naive_lost=naive_lost)
    assert lost == 0
    assert naive_lost > 0
'''

PAGE = """---
title: TITLE
modules: [NAME_.py]
proofs:
  PROOF:
    - test_NAME_keeps_its_promise_where_the_naive_version_does_not
---
# TITLE

@@: what goes wrong without it, with the evidence.

**Get it**

```python MODULE#NAME_
```

**Promise.** @@: in one sentence, as the card shows it.

**Measured**

**Not for** @@: where something simpler is right.

**Prove it.** @@: the test that readers write in their own project.

**Traps**
- @@: what a careful reader still gets wrong.
"""

DIAGRAM = """sequenceDiagram
    participant P as Producer
    participant Q as Queue
    participant W as Worker
    P->>Q: add
    Q->>W: job
    Note over W: @@, the fault
    W--xQ: no answer
"""

ROW = "| @@, when to read it | [ID](references/ID.md) |"
CHANGE = "- TITLE (`ID`): @@, what it promises.\n"


def lay_out(ident: str, skill: str) -> list[Path]:
    """Write the files of a new pattern; returns the paths to fill in."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", ident):
        raise SystemExit(f"{ident!r} is not a name for a pattern: lower-case words with dashes, like slow-start")
    if skill not in SKILLS:
        raise SystemExit(f"there is no skill {skill!r}; take one of {', '.join(SKILLS)}")
    name = ident.replace("-", "_")
    module = f"{catalogue.MODULES.relative_to(ROOT).as_posix()}/{name}.py"
    proof = f"tests/reference/faults/test_{name}_faults.py"
    page = f"skills/{skill}/references/{ident}.md"
    new = {module: MODULE, proof: PROOF, page: PAGE, f"guide/diagrams/{ident}.mmd": DIAGRAM}
    words = {
        "@@": MARK,
        "NAME_": name,
        "ID": ident,
        "TITLE": ident.replace("-", " ").capitalize(),
        "PROOF": proof.removeprefix("tests/reference/"),
        "MODULE": module,
    }

    def filled(text: str) -> str:
        return re.sub("@@|NAME_|PROOF|MODULE|TITLE|ID", lambda match: words[match[0]], text)

    taken = [path for path in new if (ROOT / path).exists()]
    if taken or ident in catalogue.patterns():
        raise SystemExit(f"{ident} is there already: {', '.join(taken) or page}. Nothing was written.")
    for path, text in new.items():
        (ROOT / path).write_text(filled(text))
    edited = {f"skills/{skill}/SKILL.md": _row_added, "CHANGELOG.md": _change_added}
    for path, add in edited.items():
        (ROOT / path).write_text(add((ROOT / path).read_text(), filled))
    catalogue.patterns.cache_clear()
    (ROOT / page).write_text(sync.rendered(ROOT / page))
    return [ROOT / path for path in (*new, *edited)]


def _row_added(text: str, filled: Callable[[str], str]) -> str:
    """A last row in the table of the pages."""
    rows = list(re.finditer(r"^\| .*\(references/.*\|$", text, re.MULTILINE))
    if not rows:
        raise SystemExit("the skill has no table of its pages")
    end = rows[-1].end()
    return f"{text[:end]}\n{filled(ROW)}{text[end:]}"


def _change_added(text: str, filled: Callable[[str], str]) -> str:
    first = re.search(r"^(## .*\n\n?)", text, re.MULTILINE)
    if first is None:
        raise SystemExit("CHANGELOG.md has no release to add to")
    return text[: first.end()] + filled(CHANGE) + text[first.end() :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="like slow-start")
    parser.add_argument("skill", choices=SKILLS, help="the skill of its page")
    args = parser.parse_args()
    for path in lay_out(args.name, args.skill):
        print(f"fill in: {path.relative_to(ROOT)}")
    print("Then: make sync lint test, and make faults ARGS='-k …' for the figures. CONTRIBUTING.md tells the rest.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
