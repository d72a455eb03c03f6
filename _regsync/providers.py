"""The ledger of registry facts: which kind a host is, and what is known of each kind. Owns: the
anchored host patterns, Docker Hub's names, one row of facts per kind. May not know: configuration,
HTTP, credentials. Invariant: a kind is decided by the whole host name, never by a suffix, as cloud
tokens follow the kind (CVE-2026-105769; docs/protocol-facts.md section 9.2, R8). Follows
docs/design.md sections 3, 9; a row names what it rests on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["ecr", "ecr_public", "dockerhub", "gar", "gcr", "ghcr", "acr", "unknown"]


# After a POST, put: one PUT with the body; patch: one PATCH without Content-Range, an empty PUT;
# chunks: PATCHes with `Content-Range: start-end`, an empty PUT.
UploadStyle = Literal["put", "patch", "chunks"]


# docs/protocol-facts.md section 7.2: the name known here (`canonical_host`), others, who answers
# requests (`api_host`).
_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")


# docs/protocol-facts.md section 4.1. Dual-stack names are under on.aws only; China's and
# ecr_public's are not verified.
_AWS_SUFFIXES = r"amazonaws\.(?:com(?:\.cn)?|eu)|c2s\.ic\.gov|sc2s\.sgov\.gov|cloud\.adc-e\.uk|csp\.hci\.ic\.gov"


_ECR = rf"[0-9]{{12}}\.(?:dkr\.ecr(?:-fips)?\.[a-z0-9-]+\.(?:{_AWS_SUFFIXES})|dkr-ecr(?:-fips)?\.[a-z0-9-]+\.on\.aws)"


class Pace(NamedTuple):
    """One window (docs/specification.md section 8.1): the actions that share it, how many of them
    are let in at first, and the bucket that feeds it: requests a second, and at once. Their sum is
    never above the registry's own cap."""

    actions: str
    start: int = 4
    rate: int = 0  # none is published, or known
    burst: int = 1


_HEADS = "manifest_head blob_head"


_UPLOADS = "upload_start upload_body upload_finish"


_READS = f"tag_list manifest_get blob_get {_HEADS}"


_WRITES = f"manifest_put {_UPLOADS}"


# Rates stay below what docs/protocol-facts.md sections 4.8, 5.5, 6.5 and 7.1 say (docs/design.md
# section 9; ECR's bursts of 18 leave room for what arrives late, behind a handshake).
_ECR_PACES = (
    *(Pace(action, 8) for action in ("tag_list", "manifest_head", "blob_head")),
    Pace("manifest_get"),
    Pace("blob_get"),
    Pace("manifest_put", rate=9),
    Pace("upload_start", rate=80, burst=18),
    Pace("upload_body", rate=400, burst=50),
    Pace("upload_finish", rate=80, burst=18),
)


_ECR_PUBLIC_PACES = (
    *(
        Pace(actions, rate=9)
        for actions in (_READS, "upload_start", "upload_finish", "manifest_put")
    ),
    Pace("upload_body", rate=200, burst=30),
)


_UNKNOWN_PACES = (
    Pace(f"tag_list {_HEADS}", 8),
    Pace("manifest_get"),
    Pace("blob_get", 32),
    Pace(_UPLOADS, 32),
    Pace("manifest_put"),
)


class _Row(NamedTuple):
    """What is known of one kind of registry. Mounts are tried on every kind (docs/design.md section
    6, rule 10).
    """

    hosts: str | None
    source: str
    upload: UploadStyle = "put"
    fallback: UploadStyle | None = None  # tried when `upload` is refused or reset
    put_limit: int | None = None  # bodies above it go by `chunks` of at most that size
    foreign_uploads: bool = True  # whether an upload's Location may be on another host
    # One POST asks, else starts (docs/design.md 6, rule 11): by `mount=<digest>&from=<itself>`, or
    # `mount` alone; None: HEAD
    probe: Literal["from", "bare"] | None = "from"
    page_size: int = 1000
    listing_has_digests: bool = False
    paces: tuple[Pace, ...] = _UNKNOWN_PACES
    per_project: bool = (
        False  # whether the first segment of a repository's name has windows of its own
    )
    quota: str | None = (
        None  # the action that `ratelimit-remaining` is about, where not the one that was answered
    )


_ECR_SOURCE = "docs/protocol-facts.md sections 4.1 (hosts), 4.9 (mounts), 7.9 (upload)"


# Other package types live under *.pkg.dev too: only the -docker names are registries.
_GAR = _Row(
    r"[a-z0-9-]+-docker\.pkg\.dev",
    "docs/protocol-facts.md sections 5.1 (hosts), 5.5 (upload, listing), 1.8 (bare mount)",
    probe="bare",
    page_size=10000,
    listing_has_digests=True,
    per_project=True,
    paces=(Pace(f"{_READS} {_WRITES}", rate=240, burst=30),),
)


ROWS: Mapping[Kind, _Row] = {
    # A mount is answered 201 only for a source with a committed manifest (4.9): no word about the
    # repository itself.
    "ecr": _Row(_ECR, _ECR_SOURCE, probe=None, paces=_ECR_PACES),
    "ecr_public": _Row(r"public\.ecr\.aws", _ECR_SOURCE, probe=None, paces=_ECR_PUBLIC_PACES),
    "dockerhub": _Row("|".join(map(re.escape, _DOCKER_HUB)),
        "docs/protocol-facts.md sections 7.2 (names, quota), 1.8 (mounts), 7.9 (upload)", quota="manifest_get",
        paces=(Pace(_HEADS, 8), Pace("manifest_get", 1), Pace(f"tag_list blob_get {_WRITES}"))),
    "gar": _GAR,
    "gcr": _GAR._replace(hosts=r"(?:[a-z]+\.)?gcr\.io"),
    # Three reports of its chunked PATCH contradict each other; a whole body is safe by all.
    "ghcr": _Row(r"ghcr\.io", "docs/protocol-facts.md section 7.1 (host, upload)", fallback="patch",
        paces=(Pace(f"{_READS} {_WRITES}", rate=20, burst=10),)),
    # A whole PUT above about 20 MB is answered 413 or reset. An upload stays at its host:
    # docs/specification.md section 8.2.
    "acr": _Row(r"[a-z0-9-]+\.azurecr\.(?:io|cn|us)", "docs/protocol-facts.md sections 6.1 (hosts), 6.5 (upload)",
        put_limit=16 * 1024 * 1024, foreign_uploads=False,
        paces=(Pace(_READS, rate=130, burst=30), Pace(_WRITES, rate=26, burst=10))),
    "unknown": _Row(None, "docs/protocol-facts.md sections 7.9 (upload), 1.8 (mounts)", fallback="patch"),
}  # fmt: skip


def kind_of(host: str, auth_type: str | None = None) -> Kind:
    """Decide the kind of a registry by its host name (no port, no brackets), else by an `auth_type`
    of its name.
    """
    name = host.lower()
    if not any(letter.isalpha() for letter in name):
        return "unknown"  # an address is nobody's; the patterns need not even be compiled
    by_name = (
        kind
        for kind, row in ROWS.items()
        if row.hosts is not None and re.fullmatch(row.hosts, name)
    )
    return (*by_name, *(kind for kind in ROWS if kind == auth_type), "unknown")[0]


def canonical_host(host: str) -> str:
    return _DOCKER_HUB[0] if host.lower() in _DOCKER_HUB else host.lower()


def api_host(host: str) -> str:
    return _DOCKER_HUB[-1] if host.lower() in _DOCKER_HUB else host.lower()


def api_repository(host: str, repository: str) -> str:
    """Return the repository as requests name it: `library/` before Docker Hub's one-segment names."""
    return (
        f"library/{repository}"
        if host.lower() in _DOCKER_HUB and "/" not in repository
        else repository
    )
