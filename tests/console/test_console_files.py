"""The console's files: nothing that a strict content security policy would refuse, nothing from elsewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = ROOT / "queuesmith" / "console" / "static"
VIEWS = ROOT / "reference" / "studyhall" / "console"  # served as a folder of the console's
FILES = sorted(path for folder in (CONSOLE, VIEWS) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_text_never_becomes_markup_and_nothing_comes_from_elsewhere(path):
    text = path.read_text()
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert re.findall(markup, text) == []
    addresses = {url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in url}
    assert addresses == set()


def test_page_has_no_inline_script_or_style():
    page = (CONSOLE / "index.html").read_text()
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", page) == []


def test_every_module_that_is_imported_exists():
    for path in FILES:
        if path.suffix == ".js":
            for name in re.findall(r'from "(\.[^"]+)"', path.read_text()):
                folder = CONSOLE / "studyhall" if path.parent == VIEWS else path.parent
                assert (folder / name).resolve().is_file(), f"{path.name} imports {name}"
