"""The manifests: five files that must agree, and an icon."""

import json
import re
import tomllib
from pathlib import Path

from PIL import Image

from queuesmith.stacks import STACKS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
SLUG = REPOSITORY.removeprefix("https://github.com/")


def manifest(name):
    return json.loads((ROOT / name).read_text())


PORTABLE, CLAUDE, MARKET = (
    manifest(name) for name in ("plugin.json", ".claude-plugin/plugin.json", ".claude-plugin/marketplace.json")
)
# Where other clients differ. Fields: schemas/plugin.schema.json of cursor/plugins, docs/extensions of gemini-cli.
OTHERS = {name: manifest(name) for name in (".cursor-plugin/plugin.json", "gemini-extension.json")}


def test_version_and_description_are_the_same_everywhere():
    """Updates reach users only when the version changes, so one that lags behind hides a release."""
    assert PORTABLE["version"] == CLAUDE["version"] == PROJECT["version"]
    for key in ("name", "description", "author", "homepage", "repository", "license", "keywords"):
        assert PORTABLE[key] == CLAUDE[key], key
    for name, other in OTHERS.items():
        assert {key: PORTABLE[key] for key in other if key not in ("author", "displayName")}.items() <= other.items(), (
            name
        )
        assert {"name", "version", "description"} <= set(other)
    assert set(OTHERS[".cursor-plugin/plugin.json"]["author"]) <= {"name", "email"}
    assert "version" not in MARKET["plugins"][0], "the version lives in plugin.json alone"


def test_portable_manifest_keeps_to_its_closed_schema():
    assert PORTABLE["$schema"] == "https://agent-plugins.org/schemas/1.0.0/plugin.schema.json"
    allowed = {"$schema", "name", "version", "description", "author", "homepage", "repository", "license", "keywords"}
    assert set(PORTABLE) <= allowed | {"extensions"}
    assert set(PORTABLE["author"]) <= {"name", "email", "url"}


def test_marketplace_offers_this_repository_as_its_one_plugin():
    assert [plugin["source"] for plugin in MARKET["plugins"]] == ["./"]
    assert MARKET["plugins"][0]["name"] == CLAUDE["name"] == MARKET["name"] == "queuesmith"


def test_components_are_found_by_their_place_not_listed():
    for each in (PORTABLE, CLAUDE):
        assert not {"skills", "agents", "commands", "hooks", "mcpServers"} & set(each)
    assert not (ROOT / "agents" / "README.md").exists(), "every file in agents/ is an agent"


def test_repository_address_comes_from_one_place():
    """pyproject.toml names it; every other mention must be the same."""
    assert {PORTABLE["repository"], CLAUDE["repository"], PORTABLE["homepage"]} == {REPOSITORY}
    files = [
        ROOT / "README.md",
        ROOT / "copier.yml",
        *ROOT.glob("skills/**/*.md"),
        *ROOT.glob("guide/**/*.md"),
        *ROOT.glob(".claude-plugin/*.json"),
    ]
    named = {
        match[1].rstrip(".")
        for path in files
        if path.exists() and path.name != "wrong-findings.md"  # of other people's code
        for match in re.finditer(r"(?:gh:|github\.com/|marketplace add )([\w-]+/[\w.-]+)", path.read_text())
    }
    # A stack's own library is named where it is installed.
    assert named - {stack.install.rpartition("github.com/")[2].partition("@")[0] for stack in STACKS.values()} == {SLUG}


def test_icon_is_square_and_small():
    icon = ROOT / ".claude-plugin" / "icon.png"
    with Image.open(icon) as picture:
        width, height = picture.size
        assert picture.format == "PNG"
    assert width == height
    assert 512 <= width <= 1024
    assert icon.stat().st_size < 50_000
