"""Names of images: repositories, tags, digests, references.

Owns: the grammar of these names, the supported digest algorithms, the names of referrers tags.
May not know: registries, configuration, HTTP.
Invariants: every name that a function of this module returns is valid, because names become parts
of URLs, headers and file names (docs/protocol-facts.md section 9.2, R11 to R14).
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

# The grammar of digests of any algorithm.
_DIGEST = r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[a-zA-Z0-9=_-]+"
_MAX_DIGEST = 999  # at most this many characters are matched against the grammar

_REFERRER_TAG = r"sha(?:256|512)-[a-f0-9]{64}(?:\.(?:sig|att|sbom))?"

# The scheme of the address of an image layout: `oci-layout:PATH` takes the place of a host.
LAYOUT_SCHEME: Final = "oci-layout"

_HOST = r"(?:\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::[0-9]{1,5})?"
_DEFAULT_HOST = "docker.io"


def is_repository(text: str) -> bool:
    return len(text) <= _MAX_REPOSITORY and re.fullmatch(_REPOSITORY, text) is not None


def is_tag(text: str) -> bool:
    return re.fullmatch(_TAG, text) is not None


def is_digest(reference: str) -> bool:
    """Report whether a tag or digest is a digest. Tags contain no colon."""
    return ":" in reference


def check_digest(text: str) -> str:
    """Return `text` unchanged. Raises ContentError unless it is a sha256 or sha512 digest."""
    algorithm, _, encoded = text.partition(":")
    length = DIGEST_HEX_LENGTHS.get(algorithm)  # None for an algorithm that is not supported
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
    """Return the algorithm and the hexadecimal part of a valid digest."""
    algorithm, _, encoded = digest.partition(":")
    return algorithm, encoded


def digest_of(body: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hash_hex(algorithm, body)}"


def referrers_tag(digest: str) -> str:
    """Return the fallback tag that holds the list of a digest's referrers.

    Both parts of the digest are truncated to 64 characters (docs/protocol-facts.md section 1.10).
    """
    algorithm, encoded = split_digest(digest)
    return f"{algorithm[:64]}-{encoded[:64]}"


def is_referrer_tag(tag: str) -> bool:
    """Report whether a tag is a fallback tag or one of cosign's tags (docs/design.md section 5)."""
    return re.fullmatch(_REFERRER_TAG, tag) is not None


def full_name(host: str, repository: str) -> str:
    """Join a host or an image layout (`oci-layout:PATH`) and a repository."""
    separator = "//" if host.startswith(f"{LAYOUT_SCHEME}:") else "/"
    return f"{host}{separator}{repository}"


def begins_with_host(name: str) -> bool:
    """Report whether a name begins with a host: a part with a dot or a port, or `localhost`."""
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def image_name(repository: str, reference: str) -> str:
    """Join a repository and a tag or digest."""
    separator = "@" if is_digest(reference) else ":"
    return f"{repository}{separator}{reference}"


def split_full_name(name: str) -> tuple[str, str]:
    """Split a name made by `full_name` into the host or layout and the repository.

    If the name ends in a tag or digest, the second result ends in it too.
    """
    if name.startswith(f"{LAYOUT_SCHEME}:"):
        layout, _, rest = name.rpartition("//")  # a path may have `//` too
        return layout, rest
    host, _, rest = name.partition("/")
    return host, rest


class Reference(NamedTuple):
    """A parsed reference to an image or a repository."""

    host: str  # with the port, if there is one; of an image layout: the path of its directory
    repository: str  # may be empty in an image layout
    tag: str | None = None
    digest: str | None = None
    # "https", "http" or "oci-layout". None if the reference is written without a scheme.
    scheme: str | None = None

    @property
    def is_in_layout(self) -> bool:
        return self.scheme == LAYOUT_SCHEME

    @property
    def registry(self) -> str:
        """The address of the registry: `[SCHEME://]HOST[:PORT]` or `oci-layout:PATH`."""
        if self.is_in_layout:
            return f"{LAYOUT_SCHEME}:{self.host}"
        return f"{self.scheme}://{self.host}" if self.scheme else self.host

    def __str__(self) -> str:
        name = full_name(self.registry, self.repository)
        if self.digest:
            return f"{name}@{self.digest}"
        return f"{name}:{self.tag}" if self.tag else name


def parse_reference(text: str) -> Reference:
    """Parse a reference to an image or repository.

    The forms are `[[https://|http://]HOST[:PORT]/]REPO[:TAG|@DIGEST]`, where the default host is
    docker.io, and `oci-layout:PATH[//REPO[:TAG|@DIGEST]]`. Raises ConfigError if the reference is
    invalid.
    """
    try:
        if text.startswith(f"{LAYOUT_SCHEME}:"):
            return _parse_in_layout(text)
        return _parse_in_registry(text)
    except (ContentError, ValueError) as error:
        raise ConfigError(f"reference {printable(text, 300)!r}: {printable(str(error))}") from error


def _parse_in_registry(text: str) -> Reference:
    name, at, digest = text.partition("@")
    # In `USER:PASSWORD@HOST/REPO`, the `@` follows a password, which no message may show.
    is_like_digest = digest.startswith(("sha256:", "sha512:"))
    may_have_password = at and ("/" in digest or (":" in name and not is_like_digest))
    if may_have_password:
        raise ConfigError(
            "a reference cannot hold a user name or password: put them into the configuration; "
            "a digest begins with sha256:"
        )
    reference = _parse_name(name)
    if not at:
        return reference
    if reference.tag:
        raise ValueError("has a tag and a digest; leave out the tag, the digest says what to copy")
    return reference._replace(digest=check_digest(digest))


def _parse_in_layout(text: str) -> Reference:
    """Parse a reference into an image layout. The path of the layout ends at the last `//`."""
    path_and_name = text.removeprefix(f"{LAYOUT_SCHEME}:")
    if "//" in path_and_name:
        path, _, name = path_and_name.rpartition("//")
    else:
        path = path_and_name
        name = ""
    if not path:
        shown = printable(text, 300)
        raise ConfigError(
            f"reference {shown!r} names no directory; write {LAYOUT_SCHEME}:PATH//REPO:TAG"
        )
    if not name:
        return Reference(path, "", scheme=LAYOUT_SCHEME)
    # The name has the form REPO[:TAG|@DIGEST], as after any host. The path replaces the host.
    reference = _parse_in_registry(f"any.host/{name}")
    return reference._replace(host=path, scheme=LAYOUT_SCHEME)


def _parse_name(text: str) -> Reference:
    """Parse `[[SCHEME://]HOST[:PORT]/]REPO[:TAG]`. Raises ValueError if it is invalid."""
    scheme, rest = _split_scheme(text)
    host, name = _split_host(rest, has_scheme=scheme is not None)
    if not re.fullmatch(_HOST, host):
        raise ValueError(f"{host!r} is not a host; write NAME[:PORT] or [IPV6][:PORT]")

    repository, colon, tag = name.partition(":")
    if not is_repository(repository):
        grammar = "lower case and digits, '.', '_' or '-' between, parts joined by '/'"
        raise ValueError(
            f"{repository!r} is not a repository ({grammar}); write HOST/REPOSITORY[:TAG]"
        )
    if colon and not is_tag(tag):
        shown = tag[:140]  # longer than any valid tag
        raise ValueError(
            f"{shown!r} is not a tag: 1 to 128 of letters, digits, '_', and '.-' inside"
        )
    return Reference(host, repository, tag or None, scheme=scheme)


def _split_scheme(text: str) -> tuple[str | None, str]:
    """Split a reference into its scheme and the text after `://`. The scheme is None without `://`.

    Raises ValueError if the scheme is neither https nor http.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return None, text
    if scheme.lower() not in ("https", "http"):
        raise ValueError(f"leave out {scheme + separator!r}, write HOST/REPOSITORY[:TAG]")
    return scheme.lower(), rest


def _split_host(text: str, *, has_scheme: bool) -> tuple[str, str]:
    """Split a reference without its scheme into the host and the name. The default is docker.io.

    As in docker, the first part of the text is a host if it contains a dot or a port or is
    `localhost`. After a scheme the first part is always a host.
    """
    first, slash, rest = text.partition("/")
    label, colon, _ = first.partition(":")
    has_port = slash and colon  # without a slash, the text after the colon is a tag
    is_host = has_scheme or "." in label or label.lower() == "localhost" or has_port
    if is_host:
        return first.lower(), rest
    return _DEFAULT_HOST, text
