"""README and the user's documents, held to the program: what they show runs, what they name exists.

A new user reads nothing else, so every claim in them that a machine can look at is looked at here:
command lines, options, keys, examples of tag rules, recipes (run between registries), codes, files,
links.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from _regsync import __version__
from _regsync.config import ConfigFile, load
from _regsync.errors import RegsyncError
from _regsync.tags import select
from tests.pages import PAGES_FOR_USERS
from tests.unit.configs import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES_FOR_USERS)


def test_the_documents_agree_on_whether_there_is_a_release():
    changes = (ROOT / "docs" / "changes.md").read_text(encoding="utf-8")
    latest = re.findall(r"(?m)^## (.*)$", changes)[0]
    assert latest.partition(" ")[0] == __version__
    is_unreleased = latest.endswith("(not released yet)")
    for page in ("README.md", "docs/install.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert ("No release has been published yet" in text) is is_unreleased, page


# --- the configuration
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_every_key_is_named(section):
    for key in SECTIONS[section]:
        assert re.search(rf"\b{key}\b", TEXT), f"{section}.{key}"


# --- tag rules
# --------------------------------------------------------------------------------------------

PREAMBLE = re.search(r"(?s)From the tags\s(.*?) and a\ssignature\s`(sha256-….sig)`", TEXT)
RULES = re.findall(r"(?m)^\| `(\{.*\})` \| (.*) \|$", TEXT)


@pytest.mark.parametrize(("rule", "selected"), RULES, ids=[rule for rule, _ in RULES])
def test_a_tag_rule_selects_what_its_row_says(rule, selected):
    assert PREAMBLE is not None
    listed = re.findall(r"`([^`]+)`", PREAMBLE[1])
    listed.append(PREAMBLE[2].replace("…", "0" * 64))
    mapping = {"from": "a", "tags": yaml.safe_load(rule)}
    registries = {"s": {"url": "s.example"}, "t": {"url": "t.example"}}
    text = json.dumps(
        {"registries": registries, "mappings": [{**mapping, "source": "s", "targets": ["t"]}]}
    )
    found = load(ConfigFile(text.encode(), name="x", environ={}, base_dir=None, home=None))
    kept = list(select(listed, found.mappings[0].tags).kept)
    told = re.findall(r"`([^`]+)`", selected)
    assert kept == (told or listed[:-1])


def test_there_are_examples_of_every_tag_rule_that_selects():
    named = {name for rule, _ in RULES for name in yaml.safe_load(rule)}
    assert named == set(SECTIONS["tags"]) - {"immutable_tags"}
    assert len(RULES) == 11


# --- failures, files
# ----------------------------------------------------------------------------------------


def test_every_code_has_a_row_and_every_row_a_code():
    known = {"INTERNAL_ERROR", "SOURCE_ERROR", "TARGET_ERROR"}
    pending = [RegsyncError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        known |= {kind.code} if isinstance(kind.code, str) else set()
    assert set(re.findall(r"(?m)^\| `([A-Z_]+)` \|", TEXT)) == known
