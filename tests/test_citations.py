"""Every citation can be followed: what comments and docstrings name is in this repository.

A citation is a document in docs/, with the numbers of its sections (`docs/design.md section 9`,
`docs/protocol-facts.md sections 1.7 to 1.9`) and often the name of a part (`section 10
("Health")`), or a number alone: `rule 11` and `I5` of docs/design.md, `R8` of
docs/protocol-facts.md.

`breaches` reads one file's text.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ROOT / "docs"

# A document without its directory cannot be found; those of the second line are not in the
# repository.
_HOMELESS = re.compile(
    r"(?<![\w./-])(?<!\"docs\" / \")(?:bodies|design|protocol-facts|specification|verify)\.md"
    r"|(?<![\w-])(?:house|inside|readability|spec|style|throughput)\.md"
    r"|\.\./shared"
)
# Two projects have a directory of that name too.
_CITED = re.compile(r"(?<!nydus )(?<!stargz-snapshotter )docs/([\w-]+\.md)")
# What may stand between the name of a document and its numbers, and between these.
_BETWEEN = re.compile(r'(?:\s|,|;|\band\b|\bto\b|\bsections?\b|\([^()"]*\))+')
_NUMBER = re.compile(r"(\d+(?:\.\d+)*)(?:-\d+)?(?![\w%]|\.\d)(?!\s+(?:[KMGT]i?B|m?s|minutes)\b)")
_TRAPS = re.compile(r"[\s,]*traps?\s+((?:\d+(?:,\s*|\s+and\s+)?)+)")
# `section 9 "Body path" and "Time-outs"`, `section 7, "Vouching"`, `section 10 ("Health")`
_NAMED = re.compile(r'[\s,]+\(?((?:"[^"]+"(?:,\s+|\s+and\s+)?)+)')

_RULES = re.compile(r"(?<!\w)rules?\s+(\d+(?:(?:,\s*|\s+and\s+|\s+to\s+)\d+)*)")
_INVARIANT = re.compile(r"(?<![\w.])I(\d{1,2})(?![\w.(]\w|\w)")
_THREAT = re.compile(r"(?<![\w.])R(\d{1,2})(?![\w.(]\w|\w)")


@dataclass(frozen=True)
class Document:
    """What of a document can be cited."""

    text: str
    sections: frozenset[str]


def sections_of(text: str) -> Iterator[str]:
    """Return the numbers of a document's headings, and `N.M.K` for item K of a list in section N.M."""
    section = ""
    for line in text.splitlines():
        heading = re.match(r"#{2,3} (\d+(?:\.\d+)*)\.? ", line)
        if heading is not None:
            section = heading[1]
            yield section
        item = re.match(r"(\d+)\. ", line)
        if item is not None and section:
            yield f"{section}.{item[1]}"


def read_documents() -> dict[str, Document]:
    documents: dict[str, Document] = {}
    for path in DOCUMENTS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        documents[path.name] = Document(text, frozenset(sections_of(text)))
    return documents


DOCUMENT = read_documents()


def part_of(name: str, heading: str) -> str:
    """Return a document's text from one heading to the next of its level or above."""
    _, _, rest = DOCUMENT[name].text.partition(f"\n{heading}")
    assert rest, f"docs/{name} has no heading {heading!r}"
    level = len(heading) - len(heading.lstrip("#"))
    return re.split(rf"(?m)^#{{1,{level}}} ", rest)[0]


def numbers_in(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text)}


RULES = numbers_in(r"(?m)^(\d+)\. ", part_of("design.md", "## 6. "))
INVARIANTS = numbers_in(r"(?m)^- I(\d+): ", part_of("design.md", "## 7. "))
THREATS = numbers_in(r"(?m)^\| R(\d+) \|", part_of("protocol-facts.md", "### 9.2 "))
TRAPS = numbers_in(r"(?m)^(\d+)\. ", part_of("bodies.md", "### Traps"))


def breaches(text: str, name: str = "module.py") -> list[str]:
    """Return what a file cites and nobody can find."""
    flat = re.sub(r"\s*\n\s*(?:#+ ?)?", " ", text)
    found = [f"{match[0]} is not a place in this repository" for match in _HOMELESS.finditer(flat)]
    for match in _CITED.finditer(flat):
        document = DOCUMENT.get(match[1])
        if document is None:
            found.append(f"{match[0]} does not exist")
        else:
            found += misses(flat, match.end(), match[0], document)
    if name.endswith(".py"):
        flat = " ".join(remarks(text))
    numbered = (("rule ", RULES, _RULES), ("I", INVARIANTS, _INVARIANT), ("R", THREATS, _THREAT))
    for prefix, known, pattern in numbered:
        for match in pattern.finditer(flat):
            numbers = (int(number) for number in re.findall(r"\d+", match[1]))
            found += [
                f"{prefix}{number} is defined nowhere" for number in numbers if number not in known
            ]
    return found


def misses(flat: str, position: int, cited: str, document: Document) -> Iterator[str]:
    """Follow what comes after the name of a document: sections, traps, names of parts."""
    numbered = False
    while True:
        named = _NAMED.match(flat, position)
        if named is not None and numbered:
            for part in re.findall(r'"([^"]+)"', named[1]):
                if part.lower() not in document.text.lower():
                    yield f'{cited} has no "{part}"'
        between = _BETWEEN.match(flat, position)
        number = _NUMBER.match(flat, between.end()) if between is not None else None
        if number is None:
            break
        numbered = True
        position = number.end()
        if number[1] not in document.sections:
            yield f"{cited} has no section {number[1]}"
    traps = _TRAPS.match(flat, position)
    if traps is not None:
        for trap in re.findall(r"\d+", traps[1]):
            if int(trap) not in TRAPS:
                yield f"{cited} has no trap {trap}"


def remarks(source: str) -> Iterator[str]:
    """Return a module's comments and the texts in three quotes: there numbers are citations."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#")
        elif token.type == tokenize.STRING and token.string.rstrip().endswith('"""'):
            yield re.sub(r"\s+", " ", token.string)


def test_the_numbers_are_those_that_are_cited() -> None:
    assert set(range(1, 17)) == RULES
    assert set(range(1, 13)) == INVARIANTS
    assert set(range(1, 21)) == THREATS
    assert set(range(1, 12)) == TRAPS
    assert {str(number) for number in range(1, 16)} <= DOCUMENT["design.md"].sections


CITING = [
    ROOT / "README.md",
    ROOT / "conformance" / "README.md",
    ROOT / "pyproject.toml",
    ROOT / "regsync.py",
    *(
        path
        for place in ("_regsync", "conformance", "tools", "tests")
        for path in sorted((ROOT / place).rglob("*.py"))
        if path != Path(__file__).resolve()
    ),
]


@pytest.mark.parametrize("path", CITING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_citation_can_be_followed(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8"), path.name) == []


@pytest.mark.parametrize("name", sorted(DOCUMENT))
def test_the_documents_find_each_other(name: str) -> None:
    text = DOCUMENT[name].text
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (DOCUMENTS / target).exists(), target
    for target, section in re.findall(r"\]\(([\w-]+\.md)\), section (\d+(?:\.\d+)*)", text):
        assert section in DOCUMENT[target].sections, f"{target} has no section {section}"
    labels = set(re.findall(r"(?m)^\[([a-z0-9-]+)\]: https://\S+$", text))
    assert set(re.findall(r"\]\[([a-z0-9-]+)\]", text)) - {"a-z0-9"} == labels
