"""Names of images: repositories, tags, digests, references.

Owns: the grammar of these names, which digests can be verified, the names of referrers tags.
May not know: registries, configuration, HTTP.
Invariants: no name leaves unchecked, as each may become part of a URL, header or file name
(docs/protocol-facts.md section 9.2, R11 to R14).
Follows: docs/protocol-facts.md section 1.1, docs/design.md section 2.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from _regsync.crypto import DIGEST_HEX_LENGTHS, hash_hex
from _regsync.errors import ConfigError, ContentError
from _regsync.text import printable

_NAME_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_REPOSITORY = rf"{_NAME_PART}(?:/{_NAME_PART})*"
_MAX_REPOSITORY = 255  # characters

_TAG = r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}"

# The grammar of all digests, whatever their algorithm.
_DIGEST = r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[a-zA-Z0-9=_-]+"
_MAX_DIGEST = 999  # characters that are matched with the grammar

_REFERRER_TAG = r"sha(?:256|512)-[a-f0-9]{64}(?:\.(?:sig|att|sbom))?"

# What the address of an image layout begins with, where a registry has its host.
LAYOUT_SCHEME: Final = "oci-layout"

_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::[0-9]{1,5})?"
_DEFAULT_HOST = "docker.io"


def is_repository(text: str) -> bool:
    return len(text) <= _MAX_REPOSITORY and re.fullmatch(_REPOSITORY, text) is not None


def is_tag(text: str) -> bool:
    return re.fullmatch(_TAG, text) is not None


def is_digest(reference: str) -> bool:
    """Say whether a reference, which is a tag or a digest, is a digest. No tag has a colon."""
    return ":" in reference


def check_digest(text: str) -> str:
    """Return `text` when it is a digest that this program can verify; ContentError otherwise."""
    algorithm, _, encoded = text.partition(":")
    length = DIGEST_HEX_LENGTHS.get(algorithm)
    if length and re.fullmatch(f"[a-f0-9]{{{length}}}", encoded):
        return text
    is_of_other_algorithm = length is None and re.fullmatch(_DIGEST, text[:_MAX_DIGEST])
    if is_of_other_algorithm:
        name = printable(algorithm, 40)
        raise ContentError(f"digests of {name} cannot be verified here, only sha256 and sha512 can")
    raise ContentError(
        f"{printable(text, 140)!r} is not a digest (sha256: and 64 lower-case hex digits)"
    )


def split_digest(digest: str) -> tuple[str, str]:
    """Return the algorithm and the hexadecimal part of a checked digest."""
    algorithm, _, encoded = digest.partition(":")
    return algorithm, encoded


def digest_of(body: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hash_hex(algorithm, body)}"


def referrers_tag(digest: str) -> str:
    """Return the fallback tag under which a list of a digest's referrers is found.

    Both parts of the digest are cut at 64 characters (docs/protocol-facts.md section 1.10).
    """
    algorithm, encoded = split_digest(digest)
    return f"{algorithm[:64]}-{encoded[:64]}"


def is_referrer_tag(tag: str) -> bool:
    """Ask whether a tag names referrers or cosign's attachments (docs/design.md section 5)."""
    return re.fullmatch(_REFERRER_TAG, tag) is not None


def full_name(host: str, repository: str) -> str:
    """Return a repository with its host, or with the layout that it is in."""
    separator = "//" if host.startswith(f"{LAYOUT_SCHEME}:") else "/"
    return f"{host}{separator}{repository}"


def image_name(repository: str, reference: str) -> str:
    """Return the name of what a repository has under a tag or digest."""
    separator = "@" if is_digest(reference) else ":"
    return f"{repository}{separator}{reference}"


def split_full_name(name: str) -> tuple[str, str]:
    """Return the host or layout of what `full_name` has made, also with a tag or digest behind it, and
    the rest.
    """
    if name.startswith(f"{LAYOUT_SCHEME}:"):
        layout, _, rest = name.rpartition("//")  # a path may have `//` too
        return layout, rest
    host, _, rest = name.partition("/")
    return host, rest


class Reference(NamedTuple):
    """An image by host (and port), repository, and tag or digest or neither.

    Of an image layout `host` is the path of its directory, and `repository` may be empty.
    """

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None
    scheme: str | None = None  # "https" or "http" where it is written, or "oci-layout"

    @property
    def is_in_layout(self) -> bool:
        return self.scheme == LAYOUT_SCHEME

    @property
    def registry(self) -> str:
        """The address of its registry: `[SCHEME://]HOST[:PORT]` or `oci-layout:PATH`."""
        if self.is_in_layout:
            return f"{LAYOUT_SCHEME}:{self.host}"
        return f"{self.scheme}://{self.host}" if self.scheme else self.host

    def __str__(self) -> str:
        name = full_name(self.registry, self.repository)
        if self.digest:
            return f"{name}@{self.digest}"
        return f"{name}:{self.tag}" if self.tag else name


def parse_reference(text: str) -> Reference:
    """Read `[[https://|http://]HOST[:PORT]/]REPO[:TAG|@DIGEST]`; without a host, Docker Hub is meant.
    Or `oci-layout:PATH[//REPO[:TAG|@DIGEST]]`.

    ConfigError says what is wrong and what to write instead.
    """
    if text.startswith(f"{LAYOUT_SCHEME}:"):
        return _parse_in_layout(text)
    name, at, digest = text.partition("@")
    ends_in_digest = digest.startswith(("sha256:", "sha512:"))
    # `USER:PASSWORD@HOST/REPO` has an `@` too.
    may_have_password = "/" in digest or (at and ":" in name and not ends_in_digest)
    if may_have_password:  # the text is not shown
        raise ConfigError(
            "a reference cannot hold a user name or password: put them into the configuration; "
            "a digest begins with sha256:"
        )
    try:
        reference = _parse_name(name)
        if not at:
            return reference
        if reference.tag:
            raise ValueError(
                "has a tag and a digest; leave out the tag, the digest says what to copy"
            )
        return reference._replace(digest=check_digest(digest))
    except (ContentError, ValueError) as error:
        raise ConfigError(f"reference {printable(text, 300)!r}: {printable(str(error))}") from error


def _parse_in_layout(text: str) -> Reference:
    """Read a reference into an image layout, whose path ends at the last `//`."""
    _, _, rest = text.partition(":")
    path, separator, name = rest.rpartition("//")
    if not separator:
        path = rest
        name = ""
    if not path:
        shown = printable(text, 300)
        raise ConfigError(
            f"reference {shown!r} names no directory; write {LAYOUT_SCHEME}:PATH//REPO:TAG"
        )
    if not name:
        return Reference(path, "", scheme=LAYOUT_SCHEME)
    # With a host in front of it, the name is read like any other.
    inner = parse_reference(f"layout.invalid/{name}")
    return inner._replace(host=path, scheme=LAYOUT_SCHEME)


def _parse_name(text: str) -> Reference:
    """Read `[[SCHEME://]HOST[:PORT]/]REPO[:TAG]`; ValueError says what is wrong and what to write."""
    scheme, text = _split_scheme(text)
    host, name = _split_host(text, has_scheme=scheme is not None)
    if not re.fullmatch(_HOST, host):
        raise ValueError(f"{host!r} is not a host; write NAME[:PORT] or [IPV6][:PORT]")

    repository, colon, tag = name.partition(":")
    if not is_repository(repository):
        grammar = "lower case and digits, '.', '_' or '-' between, parts joined by '/'"
        raise ValueError(
            f"{repository!r} is not a repository ({grammar}); write HOST/REPOSITORY[:TAG]"
        )
    if colon and not is_tag(tag):
        shown = tag[:140]  # a few characters more than a tag can have
        raise ValueError(
            f"{shown!r} is not a tag: 1 to 128 of letters, digits, '_', and '.-' inside"
        )
    return Reference(host, repository, tag or None, scheme=scheme)


def _split_scheme(text: str) -> tuple[str | None, str]:
    """Return the scheme of a reference, None where none is written, and what follows it."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return None, text
    if scheme.lower() not in ("https", "http"):
        raise ValueError(f"leave out {scheme + separator!r}, write HOST/REPOSITORY[:TAG]")
    return scheme.lower(), rest


def _split_host(text: str, *, has_scheme: bool) -> tuple[str, str]:
    """Return the host of a reference, Docker Hub's where none is written, and what follows it.

    As in docker, the first part of a name is a host where it has a dot or a port or is `localhost`.
    Behind a scheme it always is. `text` is without the scheme.
    """
    first, slash, rest = text.partition("/")
    label, colon, _ = first.partition(":")
    has_port = slash and colon  # without a slash, a tag follows the colon
    is_host = has_scheme or "." in label or label.lower() == "localhost" or has_port
    return (first.lower(), rest) if is_host else (_DEFAULT_HOST, text)
