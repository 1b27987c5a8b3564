"""Leave in a lock file the hashes of what is installed here: CPython 3.11 to 3.13, Linux with glibc and macOS on arm64.

Sources only of what has no wheel there. Elsewhere (Windows, Alpine) the tests do not run anyway; for Macs
with an Intel processor cryptography has no wheel.

    python lean_lock.py requirements.lock pylock.toml

Of wheels for every Python and machine ever published, four fifths of the file were hashes that nobody needs.
"""

import re
import sys
import tomllib
from pathlib import Path

PYTHON = re.compile(r"-(?:(?:py2\.)?py3|cp31[123]-cp31[123]|cp3\d+-abi3|py3\d?)-")
MACHINE = re.compile(r"-any\.whl$|manylinux.*_(?:x86_64|aarch64)|macosx.*_(?:arm64|universal2)")


def wanted(name: str) -> bool:
    return bool(PYTHON.search(name) and MACHINE.search(name))


def main() -> None:
    lock, details = Path(sys.argv[1]), tomllib.loads(Path(sys.argv[2]).read_text())
    wanted_hashes = set()
    for package in details["packages"]:
        kept = [
            file for file in package.get("wheels", []) if wanted(file.get("name") or file["url"].rpartition("/")[2])
        ]
        wanted_hashes |= {file["hashes"]["sha256"] for file in kept or [package["sdist"]]}
    lines = lock.read_text().splitlines()
    # What the second file does not name is dropped too: wheels for Pythons before ours.
    left = [line for line in lines if "--hash=" not in line or line.strip(" \\").rpartition(":")[2] in wanted_hashes]
    text = "\n".join(left) + "\n"
    # A line for each package: no backslashes and no indentation.
    text = re.sub(r" \\\n *", lambda match: " " if match[0].endswith(" ") else "\n", text)
    lock.write_text(text)


main()
