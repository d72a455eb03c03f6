"""The README, held to the program: its example loads, and what it names exists.

It is the only thing that a new user reads, so every claim in it that a machine can look at is looked at
here: commands, options, keys, exit statuses, references, files.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from _regsync import cli, config, oci
from _regsync.config import Config
from _regsync.errors import ConfigError
from _regsync.fields import SECTIONS
from tests.ends import run_regsync
from tools import build_zipapp

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 220

# Named there as missing; each has to be missing indeed.
MISSING = re.search(r"(?s)## Not in this version\n(.*?)\n## ", README)
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", README)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command."""
    return {name: cli._parser(name) for name in cli._COMMANDS}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def shell_lines() -> Iterator[list[str]]:
    """Give each line of the README's shell blocks, in words."""
    for language, block in BLOCKS:
        if not language:
            for line in block.splitlines():
                yield shlex.split(line)


def load(**environ: str) -> Config:
    (example,) = (block for language, block in BLOCKS if language == "yaml")
    return config.load(example.encode(), name="mirror.yaml", environ=environ, base_dir="/etc", home=None)


def test_it_is_short() -> None:
    assert README.count("\n") < LONGEST
    assert max(map(len, README.splitlines())) <= 120


def test_the_example_is_a_valid_configuration() -> None:
    found = load(MIRROR_PASSWORD="secret")
    assert [(each.source_repository, each.target_repository) for each in found.mappings] == [
        ("library/alpine", "base/alpine"),
        ("library/nginx", "library/nginx"),
    ]
    assert found.registries["mine"].password == "secret"
    assert not found.warnings


def test_the_example_needs_the_variable_that_the_text_names() -> None:
    with pytest.raises(ConfigError) as caught:
        load()
    (problem,) = caught.value.problems
    assert "MIRROR_PASSWORD" in problem.message


def test_every_command_is_there_and_has_a_line() -> None:
    named = {words[1] for words in shell_lines() if words[0] == "regsync"}
    assert named == set(commands())


def test_every_copy_example_is_understood() -> None:
    examples = [
        words[1:] for words in shell_lines() if words[:2] == ["regsync", "copy"] and "SRC" not in words
    ]
    assert len(examples) == 3
    for words in examples:
        arguments = cli._parse(words)
        source = arguments.src.replace("…", "0" * 64)
        assert oci.parse_reference(source).repository
        assert oci.parse_reference(arguments.dst).host in {"registry.example.com", "localhost:5000"}
        assert all(isinstance(each, oci.Platform) for each in arguments.platform or ())


def test_every_option_exists_and_every_option_is_named() -> None:
    assert MISSING is not None
    real = {name for parser in commands().values() for name in options_of(parser)}
    tools = {"--python", "--help"}
    text = README.replace(MISSING[1], "")
    named = set(re.findall(r"(?<![\w:-])(--?[a-z][a-z-]*)(?![\w-])", text)) - {"-k", "-m"}
    assert named - real - tools - {"-vv"} == set()
    assert real - named == {"-h", "--config"}


def test_what_is_said_to_be_missing_is_missing() -> None:
    assert MISSING is not None
    assert not {"watch", "analyze", "auth"} & set(commands())
    assert "--dry-run" not in {name for parser in commands().values() for name in options_of(parser)}
    for name in ("ecr", "gar", "gcr", "acr"):
        assert f"`{name}`" in MISSING[1]


def test_the_exit_statuses_are_those_of_the_help() -> None:
    table = dict(re.findall(r"(?m)^\| ([\d, ]+) \| (.*) \|$", README))
    helped = dict(re.findall(r"(?m)^  (\d)    (.*)$", cli._STATUSES))
    interrupted = table.pop("130, 143")
    assert table == helped
    assert interrupted == "interrupted by SIGINT, SIGTERM, with work left undone"


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_every_key_is_named(section: str) -> None:
    for field in SECTIONS[section]:
        assert re.search(rf"\b{field.name}\b", README), f"{section}.{field.name}"


def test_every_file_is_there() -> None:
    for name in set(re.findall(r"\b(?:tools|tests|conformance)/[\w.]*", README)):
        assert (ROOT / name).exists(), name
    for wheel in build_zipapp.BUNDLE[:4]:
        assert wheel.name in README


def test_refused_references_need_no_network() -> None:
    for words in (["copy", "docker://a/b", "c"], ["copy", "a/B", "c"], ["sync"], ["sync", "-c", ""]):
        ran = run_regsync(*words)
        assert ran.status == 3
        assert ran.err.startswith("error: CONFIG_ERROR: ")
        assert not ran.out


def test_an_abbreviated_option_is_none() -> None:
    ran = run_regsync("version", "--jso")
    assert ran.status == 3
    assert "--jso" in ran.err
