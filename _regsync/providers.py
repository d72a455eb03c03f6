"""The table of registry products: which kind a host is, and what is known of each kind.

Owns: the patterns of host names, Docker Hub's names, one row of facts for each kind.
May not know: configuration, HTTP, credentials.
Invariants: the whole host name decides the kind, never a suffix of it: a cloud's login goes to
hosts of its kind (CVE-2026-105769; docs/protocol-facts.md section 9.2, R8).
Follows: docs/design.md sections 3 and 9, docs/protocol-facts.md sections 1.8 and 4 to 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["ecr", "ecr_public", "dockerhub", "gar", "gcr", "ghcr", "acr", "unknown"]

# How a body follows the POST that starts an upload (docs/protocol-facts.md section 1.7).
# put: one PUT with the body.
# patch: one PATCH without Content-Range, then an empty PUT.
# chunks: PATCHes with `Content-Range: start-end`, then an empty PUT.
UploadStyle = Literal["put", "patch", "chunks"]


class Pace(NamedTuple):
    """One window (docs/specification.md section 8.1) and the token bucket that feeds it.

    `rate` and `burst` together never exceed the limit that the registry publishes.
    """

    actions: str  # the actions that share the window, with blanks between
    start: int = 4  # how many requests the window lets in at first
    rate: int = 0  # tokens a second; 0: no limit is published or known
    burst: int = 1  # tokens at once


class Product(NamedTuple):
    """What is known of one kind of registry.

    Mounts are tried on every kind (docs/design.md section 6, rule 10).
    """

    hosts: str | None  # a pattern of whole host names
    source: str  # where the facts of this row are from
    paces: tuple[Pace, ...]

    upload: UploadStyle = "put"
    fallback: UploadStyle | None = None  # when `upload` is refused or reset
    put_limit: int | None = None  # bytes; a larger body goes by `chunks` of at most that size
    allows_foreign_uploads: bool = True  # whether an upload's Location may be on another host

    # How one POST asks for a blob and starts its upload where it is absent (docs/design.md section
    # 6, rule 11): by `mount=<digest>&from=<itself>`, or by `mount` alone. None: a HEAD has to ask.
    probe: Literal["from", "bare"] | None = "from"

    page_size: int = 1000  # tags in one answer
    listing_has_digests: bool = False
    per_project: bool = False  # whether each first segment of a repository has its own windows

    # The action that `ratelimit-remaining` counts; None: that of the answer with this header.
    quota_action: str | None = None


# Actions that several windows name.

_HEADS = "manifest_head blob_head"
_READS = f"tag_list manifest_get blob_get {_HEADS}"
_UPLOADS = "upload_start upload_body upload_finish"
_WRITES = f"manifest_put {_UPLOADS}"


# Amazon ECR.

# docs/protocol-facts.md section 4.1. Dual-stack names are under on.aws only; China's, and that of
# ECR Public, are not verified.
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/ecr-requests.html
_AWS_SUFFIXES = (
    r"amazonaws\.(?:com(?:\.cn)?|eu)|c2s\.ic\.gov|sc2s\.sgov\.gov|cloud\.adc-e\.uk"
    r"|csp\.hci\.ic\.gov"
)
_ECR_HOSTS = (
    rf"[0-9]{{12}}\.(?:dkr\.ecr(?:-fips)?\.[a-z0-9-]+\.(?:{_AWS_SUFFIXES})"
    r"|dkr-ecr(?:-fips)?\.[a-z0-9-]+\.on\.aws)"
)

_ECR_SOURCE = "docs/protocol-facts.md sections 4.1 (hosts), 4.8 (rates), 4.9 (mounts), 7.9 (upload)"

_ECR = Product(
    _ECR_HOSTS,
    _ECR_SOURCE,
    # A mount is answered 201 only where a committed manifest of its source names the blob. So a 202
    # does not say that the blob is absent.
    # https://docs.aws.amazon.com/AmazonECR/latest/userguide/blob-mounting.html
    probe=None,
    # PutImage 10 a second, InitiateLayerUpload and CompleteLayerUpload 100, UploadLayerPart 500.
    # Bursts of 18 leave room for requests that arrive late, behind a handshake.
    # https://docs.aws.amazon.com/AmazonECR/latest/userguide/service-quotas.html
    paces=(
        Pace("tag_list", 8),
        Pace("manifest_head", 8),
        Pace("blob_head", 8),
        Pace("manifest_get"),
        Pace("blob_get"),
        Pace("manifest_put", rate=9),
        Pace("upload_start", rate=80, burst=18),
        Pace("upload_body", rate=400, burst=50),
        Pace("upload_finish", rate=80, burst=18),
    ),
)

_ECR_PUBLIC = Product(
    r"public\.ecr\.aws",
    _ECR_SOURCE,
    probe=None,  # as in ECR
    # Authenticated pulls, PutImage, InitiateLayerUpload and CompleteLayerUpload 10 a second,
    # UploadLayerPart 260.
    # https://docs.aws.amazon.com/AmazonECR/latest/public/public-service-quotas.html
    paces=(
        Pace(_READS, rate=9),
        Pace("upload_start", rate=9),
        Pace("upload_finish", rate=9),
        Pace("manifest_put", rate=9),
        Pace("upload_body", rate=200, burst=30),
    ),
)


# Docker Hub.

# One registry under several names (docs/protocol-facts.md section 7.2); the last one is what people
# copy from its web pages.
_DOCKER_HUB_NAME = "docker.io"  # the name that is used here
_DOCKER_HUB_API = "registry-1.docker.io"  # the host that answers requests
DOCKER_HUB_HOSTS = (_DOCKER_HUB_NAME, "index.docker.io", _DOCKER_HUB_API, "registry.hub.docker.com")

_DOCKER_HUB = Product(
    "|".join(re.escape(host) for host in DOCKER_HUB_HOSTS),
    "docs/protocol-facts.md sections 7.2 (names, quota), 1.8 (mounts), 7.9 (upload)",
    # The quota of pulls counts GETs of manifests and no HEADs, though the answers to both carry it.
    # https://github.com/docker/docs/blob/bb3cdd21c88e3ca4ac1bbf88d75238e7622d5997/content/manuals/docker-hub/usage/pulls.md
    quota_action="manifest_get",
    paces=(Pace(_HEADS, 8), Pace("manifest_get", 1), Pace(f"tag_list blob_get {_WRITES}")),
)


# Google.

_ARTIFACT_REGISTRY = Product(
    # Other package types live under *.pkg.dev too: only the names with -docker are registries.
    # https://docs.cloud.google.com/artifact-registry/docs/reference/docker-api
    r"[a-z0-9-]+-docker\.pkg\.dev",
    "docs/protocol-facts.md sections 5.1 (hosts), 5.5 (upload, listing, rates), 1.8 (bare mount)",
    # `mount` without `from` only looks whether the blob is there. Chunks are not supported, so
    # there is no fallback from PUT.
    # https://github.com/google/go-containerregistry/blob/d1e67cf25ac607e7cf7d49ee881647a28d0a0ce6/pkg/v1/remote/write.go
    probe="bare",
    page_size=10000,
    listing_has_digests=True,
    # 18,000 writes a minute, for each project.
    # https://cloud.google.com/artifact-registry/quotas
    per_project=True,
    paces=(Pace(f"{_READS} {_WRITES}", rate=240, burst=30),),
)

# Artifact Registry serves these hosts today, within the same limits.
_CONTAINER_REGISTRY = _ARTIFACT_REGISTRY._replace(hosts=r"(?:[a-z]+\.)?gcr\.io")


# GitHub.

_GHCR = Product(
    r"ghcr\.io",
    "docs/protocol-facts.md section 7.1 (host, upload, rate)",
    # Reports of its PATCH with Content-Range contradict each other. All reports agree that a whole
    # body without that header is safe.
    # cirruslabs/tart#179, https://github.com/ocx-sh/ocx/pull/237
    fallback="patch",
    # 2,000 requests a minute: users report it, GitHub does not document it.
    # https://github.com/clowdhaus/ocync/blob/7d433c5caee1b1cf8e2420c62086c528bb111064/docs/src/content/registries/ghcr.md
    paces=(Pace(f"{_READS} {_WRITES}", rate=20, burst=10),),
)


# Azure.

_ACR = Product(
    r"[a-z0-9-]+\.azurecr\.(?:io|cn|us)",
    "docs/protocol-facts.md sections 6.1 (hosts), 6.5 (upload, rates)",
    # A PUT above about 20 MB is answered 413 or reset.
    # https://github.com/goharbor/harbor/issues/23015
    put_limit=16 * 1024 * 1024,
    # An upload stays at its host (docs/specification.md section 8.2).
    allows_foreign_uploads=False,
    # 10,000 reads and 2,000 writes a minute in the Premium tier.
    # https://learn.microsoft.com/en-ca/azure/container-registry/container-registry-skus
    paces=(Pace(_READS, rate=130, burst=30), Pace(_WRITES, rate=26, burst=10)),
)


# All others.

_UNKNOWN = Product(
    None,
    "docs/protocol-facts.md sections 7.9 (upload), 1.8 (mounts)",
    fallback="patch",
    paces=(
        Pace(f"tag_list {_HEADS}", 8),
        Pace("manifest_get"),
        Pace("blob_get", 32),
        Pace(_UPLOADS, 32),
        Pace("manifest_put"),
    ),
)


PRODUCTS: Mapping[Kind, Product] = {
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
    """Return the kind of a registry by its host name (no port, no brackets).

    Where the name does not tell, an `auth_type` that is the name of a kind does.
    """
    name = host.lower()
    if not any(letter.isalpha() for letter in name):
        return "unknown"  # an address belongs to no product
    for kind, product in PRODUCTS.items():
        if product.hosts is not None and re.fullmatch(product.hosts, name):
            return kind
    return next((kind for kind in PRODUCTS if kind == auth_type), "unknown")


def canonical_host(host: str) -> str:
    """Return the name that a host has here: one for all names of Docker Hub."""
    return _DOCKER_HUB_NAME if _is_docker_hub(host) else host.lower()


def api_host(host: str) -> str:
    """Return the host that answers the requests for a host."""
    return _DOCKER_HUB_API if _is_docker_hub(host) else host.lower()


def api_repository(host: str, repository: str) -> str:
    """Return the repository as requests name it: Docker Hub's official images are in `library/`."""
    if _is_docker_hub(host) and "/" not in repository:
        return f"library/{repository}"
    return repository


def _is_docker_hub(host: str) -> bool:
    return host.lower() in DOCKER_HUB_HOSTS
