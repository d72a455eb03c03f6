"""The kinds of registries: how a host is recognized as one, and the limits and quirks of each.

Owns: the patterns of host names, Docker Hub's names, one `Dialect` for each kind of registry.
May not know: configuration, HTTP, credentials.
Invariants: a pattern must match the whole host name, never only its end, because a cloud's
credentials are sent to hosts of the matching kind (CVE-2026-105769; docs/protocol-facts.md section
9.2, R8).
Follows: docs/design.md sections 3 and 9, docs/protocol-facts.md sections 1.8 and 4 to 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

Kind = Literal["ecr", "ecr_public", "dockerhub", "gar", "gcr", "ghcr", "acr", "unknown"]

# Bytes of one request for registries that accept no larger body (docs/specification.md section 8.2).
CHUNK = 16 * 1024 * 1024


class Limits(NamedTuple):
    """The limits of a group of actions: a window of concurrent requests and a token bucket.

    The window is described in docs/specification.md section 8.1. The sum of `rate` and `burst`
    never exceeds the limit that the registry publishes.
    """

    actions: str  # the actions that share the window, separated by blanks
    start: int = 4  # initial size of the window, in requests
    rate: int = 0  # tokens per second; 0: no limit is published or known
    burst: int = 1  # capacity of the token bucket


class Dialect(NamedTuple):
    """The limits and quirks of one kind of registry.

    Mounts are tried on every kind (docs/design.md section 6, rule 10).
    """

    hosts: str | None  # a pattern that matches whole host names; None: no host matches
    limits: tuple[Limits, ...]  # every action is in exactly one of them

    takes_chunks: bool = False  # whether chunks are tried where a PUT is refused or reset
    put_limit: int = 0  # bytes; a larger body is sent in chunks of this size; 0: no limit
    allows_foreign_uploads: bool = True  # whether the Location of an upload may be on another host

    # The query of a POST that starts an upload unless the repository has the blob (docs/design.md
    # section 6, rule 11). "from": `mount=<digest>&from=<the same repository>`. "bare": only
    # `mount=<digest>`. None: the registry has no such query, and a HEAD is needed.
    probe: Literal["from", "bare"] | None = "from"

    page_size: int = 1000  # tags requested per page of a listing
    listing_has_digests: bool = False  # whether a listing has the digest of each tag
    per_project: bool = False  # whether each first segment of a repository has its own windows


# Actions that occur in several windows.

_HEADS = "manifest_head blob_head"
_READS = f"tag_list manifest_get blob_get {_HEADS}"
_UPLOADS = "upload_start upload_body upload_finish"
_WRITES = f"manifest_put {_UPLOADS}"


# Amazon ECR.

# docs/protocol-facts.md section 4.1. Dual-stack names are only under on.aws. The dual-stack names
# of China and of ECR Public are not included because they could not be verified.
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/ecr-requests.html
_AWS_SUFFIXES = (
    r"amazonaws\.(?:com(?:\.cn)?|eu)|c2s\.ic\.gov|sc2s\.sgov\.gov|cloud\.adc-e\.uk"
    r"|csp\.hci\.ic\.gov"
)
_ECR_HOSTS = (
    rf"[0-9]{{12}}\.(?:dkr\.ecr(?:-fips)?\.[a-z0-9-]+\.(?:{_AWS_SUFFIXES})"
    r"|dkr-ecr(?:-fips)?\.[a-z0-9-]+\.on\.aws)"
)

# ECR and ECR Public: docs/protocol-facts.md sections 4.1 (hosts), 4.8 (rates), 4.9 (mounts), 7.9
# (upload).
_ECR = Dialect(
    _ECR_HOSTS,
    # ECR answers a mount with 201 only if a committed manifest of the source repository refers to
    # the blob. Therefore a 202 does not mean that the blob is absent.
    # https://docs.aws.amazon.com/AmazonECR/latest/userguide/blob-mounting.html
    probe=None,
    # Per second: PutImage 10, InitiateLayerUpload and CompleteLayerUpload 100, UploadLayerPart 500.
    # A burst of 18 leaves room for requests that arrive late because of a handshake.
    # https://docs.aws.amazon.com/AmazonECR/latest/userguide/service-quotas.html
    limits=(
        Limits("tag_list", 8),
        Limits("manifest_head", 8),
        Limits("blob_head", 8),
        Limits("manifest_get"),
        Limits("blob_get"),
        Limits("manifest_put", rate=9),
        Limits("upload_start", rate=80, burst=18),
        Limits("upload_body", rate=400, burst=50),
        Limits("upload_finish", rate=80, burst=18),
    ),
)

_ECR_PUBLIC = Dialect(
    r"public\.ecr\.aws",
    probe=None,  # as in ECR
    # Per second: authenticated pulls, PutImage, InitiateLayerUpload and CompleteLayerUpload 10,
    # UploadLayerPart 260.
    # https://docs.aws.amazon.com/AmazonECR/latest/public/public-service-quotas.html
    limits=(
        Limits(_READS, rate=9),
        Limits("upload_start", rate=9),
        Limits("upload_finish", rate=9),
        Limits("manifest_put", rate=9),
        Limits("upload_body", rate=200, burst=30),
    ),
)


# Docker Hub.

# Docker Hub has several names (docs/protocol-facts.md section 7.2). Users copy the last one from
# its web pages.
_DOCKER_HUB_NAME = "docker.io"  # the canonical name
_DOCKER_HUB_API = "registry-1.docker.io"  # the host to which requests are sent
DOCKER_HUB_HOSTS = (_DOCKER_HUB_NAME, "index.docker.io", _DOCKER_HUB_API, "registry.hub.docker.com")

_DOCKER_HUB = Dialect(
    "|".join(re.escape(host) for host in DOCKER_HUB_HOSTS),
    # docs/protocol-facts.md sections 7.2 (names, quota), 1.8 (mounts), 7.9 (upload)
    # The pull quota counts GETs of manifests but not HEADs. Responses to both have its header.
    # https://github.com/docker/docs/blob/bb3cdd21c88e3ca4ac1bbf88d75238e7622d5997/content/manuals/docker-hub/usage/pulls.md
    limits=(Limits(_HEADS, 8), Limits("manifest_get", 1), Limits(f"tag_list blob_get {_WRITES}")),
)


# Google.

_ARTIFACT_REGISTRY = Dialect(
    # *.pkg.dev also serves other package types. Only names with -docker are container registries.
    # https://docs.cloud.google.com/artifact-registry/docs/reference/docker-api
    r"[a-z0-9-]+-docker\.pkg\.dev",
    # docs/protocol-facts.md sections 5.1 (hosts), 5.5 (upload, listing, rates), 1.8 (bare mount)
    # `mount` without `from` only checks whether the repository has the blob. Chunks are not
    # supported, so PUT has no fallback.
    # https://github.com/google/go-containerregistry/blob/d1e67cf25ac607e7cf7d49ee881647a28d0a0ce6/pkg/v1/remote/write.go
    probe="bare",
    page_size=10000,
    listing_has_digests=True,
    # 18,000 writes per minute and project.
    # https://cloud.google.com/artifact-registry/quotas
    per_project=True,
    limits=(Limits(f"{_READS} {_WRITES}", rate=240, burst=30),),
)

# Artifact Registry serves these hosts, too, with the same limits.
_CONTAINER_REGISTRY = _ARTIFACT_REGISTRY._replace(hosts=r"(?:[a-z]+\.)?gcr\.io")


# GitHub.

_GHCR = Dialect(
    r"ghcr\.io",
    # docs/protocol-facts.md section 7.1 (host, upload, rate)
    # Reports about PATCH with Content-Range contradict each other, so it comes after a PUT that was
    # refused or reset twice: cirruslabs/tart#179, https://github.com/ocx-sh/ocx/pull/237
    takes_chunks=True,
    # 2,000 requests per minute according to users. GitHub does not document the limit.
    # https://github.com/clowdhaus/ocync/blob/7d433c5caee1b1cf8e2420c62086c528bb111064/docs/src/content/registries/ghcr.md
    limits=(Limits(f"{_READS} {_WRITES}", rate=20, burst=10),),
)


# Azure.

_ACR = Dialect(
    r"[a-z0-9-]+(?:\.[a-z0-9]+\.geo)?\.azurecr\.(?:io|cn|us)",
    # docs/protocol-facts.md sections 6.1 (hosts), 6.5 (upload, rates)
    # A PUT of more than about 20 MB is answered with 413, or the connection is reset.
    # https://github.com/goharbor/harbor/issues/23015
    put_limit=CHUNK,
    # docs/specification.md section 8.2.
    allows_foreign_uploads=False,
    # 10,000 reads and 2,000 writes per minute in the Premium tier.
    # https://learn.microsoft.com/en-ca/azure/container-registry/container-registry-skus
    limits=(Limits(_READS, rate=130, burst=30), Limits(_WRITES, rate=26, burst=10)),
)


# All other registries.

_UNKNOWN = Dialect(
    None,
    # docs/protocol-facts.md sections 7.9 (upload), 1.8 (mounts)
    takes_chunks=True,
    limits=(
        Limits(f"tag_list {_HEADS}", 8),
        Limits("manifest_get"),
        Limits("blob_get", 32),
        Limits(_UPLOADS, 32),
        Limits("manifest_put"),
    ),
)


DIALECTS: Mapping[Kind, Dialect] = {
    "ecr": _ECR,
    "ecr_public": _ECR_PUBLIC,
    "dockerhub": _DOCKER_HUB,
    "gar": _ARTIFACT_REGISTRY,
    "gcr": _CONTAINER_REGISTRY,
    "ghcr": _GHCR,
    "acr": _ACR,
    "unknown": _UNKNOWN,
}


def kind_of(host: str, auth_type: str | None = None) -> Kind:
    """Return the kind whose pattern matches a host name, without port and brackets.

    If no pattern matches, it is the kind that has the same name as the `auth_type`, for example of
    a proxy in front of ECR. Returns "unknown" if there is none, or if the host is an IP address.
    """
    name = host.lower()
    is_ip_address = ":" in name or not any(letter.isalpha() for letter in name)
    if is_ip_address:
        return "unknown"
    for kind, dialect in DIALECTS.items():
        if dialect.hosts is not None and re.fullmatch(dialect.hosts, name):
            return kind
    if auth_type in DIALECTS:  # many an `auth_type`, such as `basic`, is not a kind
        return cast(Kind, auth_type)
    return "unknown"


def canonical_host(host: str) -> str:
    """Return a host name in lower case, or docker.io for every name of Docker Hub."""
    return _DOCKER_HUB_NAME if _is_docker_hub(host) else host.lower()


def api_host(host: str) -> str:
    """Return the host to which requests for the registry `host` are sent."""
    return _DOCKER_HUB_API if _is_docker_hub(host) else host.lower()


def api_repository(host: str, repository: str) -> str:
    """Return the name of a repository in requests.

    Docker Hub's official images are in `library/`.
    """
    if _is_docker_hub(host) and "/" not in repository:
        return f"library/{repository}"
    return repository


def _is_docker_hub(host: str) -> bool:
    return host.lower() in DOCKER_HUB_HOSTS
