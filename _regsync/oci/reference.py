"""."""

from __future__ import annotations

import re
from typing import NamedTuple

from _regsync.crypto import DIGEST_HEX_LENGTHS, hash_hex
from _regsync.errors import ConfigError, ContentError
from _regsync.text import clean

# docs/protocol-facts.md section 1.1. `re` compiles a pattern when it is first used: a start pays
# for what it needs.
_NAME_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"


_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::[0-9]{1,5})?"


def is_repository(text: str) -> bool:
    return len(text) <= 255 and re.fullmatch(rf"{_NAME_PART}(?:/{_NAME_PART})*", text) is not None


def is_tag(text: str) -> bool:
    return re.fullmatch(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}", text) is not None


def check_digest(text: str) -> str:
    """Return `text` when it is a digest that this program can verify; ContentError otherwise."""
    algorithm, _, encoded = text.partition(":")
    length = DIGEST_HEX_LENGTHS.get(algorithm)
    if length and re.fullmatch(f"[a-f0-9]{{{length}}}", encoded):
        return text
    if length is None and re.fullmatch(
        r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[a-zA-Z0-9=_-]+", text[:999]
    ):
        raise ContentError(
            f"digests of {clean(algorithm, 40)} cannot be verified here, only sha256 and sha512 can"
        )
    raise ContentError(
        f"{clean(text, 140)!r} is not a digest (sha256: and 64 lower-case hex digits)"
    )


def split_digest(digest: str) -> tuple[str, str]:
    """Return the algorithm and the hexadecimal part of a checked digest."""
    return digest.partition(":")[::2]


def digest_of(body: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hash_hex(algorithm, body)}"


def referrers_tag(digest: str) -> str:
    """Return the fallback tag that lists a digest's referrers (docs/protocol-facts.md section
    1.10).
    """
    return "-".join(part[:64] for part in split_digest(digest))


def is_referrer_tag(tag: str) -> bool:
    """Tell whether a tag names referrers or cosign's attachments, not an image (docs/design.md
    section 5).
    """
    return re.fullmatch(r"sha(?:256|512)-[a-f0-9]{64}(?:\.(?:sig|att|sbom))?", tag) is not None


class Reference(NamedTuple):
    """An image by host (and port), repository, and tag or digest or neither."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        end = f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{end}"


def parse_reference(text: str) -> Reference:
    """Read `[HOST[:PORT]/]REPO[:TAG|@DIGEST]`, no host being Docker Hub, no tag none; ConfigError
    with a remedy.
    """
    name, at, digest = text.partition("@")
    if "/" in digest or (
        at and ":" in name and digest[:7] not in ("sha256:", "sha512:")
    ):  # it may be a password
        raise ConfigError(
            "a reference holds no user name or password (the configuration may); a digest is sha256:..."
        )
    try:
        if "://" in name:
            raise ValueError(
                f"leave out {name[: name.index('://') + 3]!r}, write HOST/REPOSITORY[:TAG]"
            )
        host = "docker.io"
        (first, slash, rest) = name.partition("/")
        label, colon, _ = first.partition(":")
        if "." in label or label.lower() == "localhost" or (slash and colon):
            host = first.lower()
            name = rest
        if not re.fullmatch(_HOST, host):
            raise ValueError(f"{host!r} is not a host; write NAME[:PORT] or [IPV6][:PORT]")
        repository, colon, tag = name.partition(":")
        if not is_repository(repository):
            grammar = "lower case and digits, '.', '_' or '-' between, parts joined by '/'"
            raise ValueError(
                f"{repository!r} is not a repository ({grammar}); write HOST/REPOSITORY[:TAG]"
            )
        if colon and not is_tag(tag):
            raise ValueError(
                f"{tag[:140]!r} is not a tag: 1 to 128 of letters, digits, '_', and '.-' inside"
            )
        if colon and at:
            raise ValueError(
                "has a tag and a digest; leave out the tag, the digest says what to copy"
            )
        return Reference(host, repository, tag or None, check_digest(digest) if at else None)
    except (ContentError, ValueError) as error:
        raise ConfigError(f"reference {clean(text, 300)!r}: {clean(str(error))}") from error
