"""Kinds by host name, Docker Hub's names, and the rows of facts."""

from __future__ import annotations

import typing

import pytest

from _regsync.providers import DIALECTS, Kind, api_host, api_repository, canonical_host, kind_of
from conformance.providers.rates import ACTIONS, READS, WRITES

KINDS = [
    ("123456789012.dkr.ecr.us-east-1.amazonaws.com", "ecr"),
    ("123456789012.dkr.ecr-fips.us-gov-west-1.amazonaws.com", "ecr"),
    ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", "ecr"),
    ("123456789012.dkr.ecr.eusc-de-east-1.amazonaws.eu", "ecr"),
    ("123456789012.dkr.ecr.us-iso-east-1.c2s.ic.gov", "ecr"),
    ("123456789012.dkr-ecr.eu-west-1.on.aws", "ecr"),
    ("123456789012.dkr-ecr-fips.us-east-2.on.aws", "ecr"),
    ("123456789012.DKR.ECR.us-east-1.AmazonAWS.com", "ecr"),
    ("public.ecr.aws", "ecr_public"),
    ("docker.io", "dockerhub"),
    ("index.docker.io", "dockerhub"),
    ("registry-1.docker.io", "dockerhub"),
    ("europe-west1-docker.pkg.dev", "gar"),
    ("us-docker.pkg.dev", "gar"),
    ("gcr.io", "gcr"),
    ("eu.gcr.io", "gcr"),
    ("ghcr.io", "ghcr"),
    ("team.azurecr.io", "acr"),
    ("team-a1b2.azurecr.cn", "acr"),
    ("team.azurecr.us", "acr"),
    ("quay.io", "unknown"),
    ("localhost", "unknown"),
]

LOOK_ALIKES = [
    "123456789012.dkr.ecr.us-east-1.amazonaws.com.evil.example",
    "12345678901.dkr.ecr.us-east-1.amazonaws.com",
    "x123456789012.dkr.ecr.us-east-1.amazonaws.com",
    "123456789012.dkr-ecr.us-east-1.amazonaws.com",
    "123456789012.dkr.ecr.us-east-1.on.aws",
    "123456789012.dkr.ecr.us-east-1xamazonaws.com",
    "١٢٣٤٥٦٧٨٩٠١٢.dkr.ecr.us-east-1.amazonaws.com",
    "public.ecr.aws.evil.example",
    "notpublic.ecr.aws",
    "evildocker.io",
    "hub.docker.io",
    "us-npm.pkg.dev",
    "docker.pkg.dev",
    "evil.example-docker.pkg.dev.evil.example",
    "evilgcr.io",
    "a.b.gcr.io",
    "ghcr.io.evil.example",
    "evilghcr.io",
    "team.azurecr.io.evil.example",
    "evilazurecr.io",
    "team.azurecr.de",
    "a.team.azurecr.io",
    "team.azurecr.io\n",
    "",
]


@pytest.mark.parametrize(("host", "kind"), KINDS, ids=[host for host, _ in KINDS])
def test_kind_follows_the_whole_host_name(host: str, kind: str) -> None:
    assert kind_of(host) == kind


def test_an_address_belongs_to_no_product_whatever_its_login() -> None:
    assert kind_of("10.0.0.1", "ecr") == "unknown"
    assert kind_of("fe80::1", "ecr") == "unknown"
    assert kind_of("registry.internal", "ecr") == "ecr"


@pytest.mark.parametrize("host", LOOK_ALIKES)
def test_a_look_alike_of_a_cloud_host_is_of_no_kind(host: str) -> None:
    assert kind_of(host) == "unknown"


@pytest.mark.parametrize(
    "host",
    [
        "docker.io",
        "index.docker.io",
        "registry-1.docker.io",
        "registry.hub.docker.com",
        "Docker.IO",
    ],
)
def test_docker_hub_is_one_registry_under_all_its_names(host: str) -> None:
    assert canonical_host(host) == "docker.io"
    assert api_host(host) == "registry-1.docker.io"


def test_other_hosts_are_only_lower_cased() -> None:
    assert canonical_host("Quay.IO") == "quay.io"
    assert api_host("Quay.IO") == "quay.io"


@pytest.mark.parametrize(
    ("host", "repository", "requested"),
    [
        ("docker.io", "alpine", "library/alpine"),
        ("index.docker.io", "alpine", "library/alpine"),
        ("docker.io", "grafana/loki", "grafana/loki"),
        ("quay.io", "alpine", "alpine"),
    ],
)
def test_library_goes_before_one_segment_names_of_docker_hub_only(
    host: str, repository: str, requested: str
) -> None:
    assert api_repository(host, repository) == requested


def test_every_kind_has_a_row() -> None:
    assert set(DIALECTS) == set(typing.get_args(Kind))


def test_rows_say_what_the_design_says() -> None:
    rows = DIALECTS
    assert [kind for kind in rows if rows[kind].probe is None] == ["ecr", "ecr_public"]
    assert [kind for kind in rows if rows[kind].probe == "bare"] == ["gar", "gcr"]
    assert [kind for kind in rows if rows[kind].page_size == 10000] == ["gar", "gcr"]
    assert [kind for kind in rows if rows[kind].put_limit] == ["acr"]
    assert rows["ghcr"].takes_chunks
    assert not rows["gar"].takes_chunks, "Google refuses PATCH"


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        ("ecr", 9),
        ("ecr_public", 5),
        ("dockerhub", 3),
        ("gar", 1),
        ("gcr", 1),
        ("ghcr", 1),
        ("acr", 2),
        ("unknown", 5),
    ],
)
def test_each_kind_has_the_windows_of_the_specification(kind: Kind, windows: int) -> None:
    paces = DIALECTS[kind].limits
    assert len(paces) == windows
    named = [action for pace in paces for action in pace.actions.split()]
    assert sorted(named) == sorted(ACTIONS), "each action in one window"
    assert DIALECTS[kind].per_project == (kind in ("gar", "gcr"))


# Per second, from docs/protocol-facts.md sections 4.8, 5.5, 6.5 and 7.1.
PUBLISHED = {
    "ecr": {"manifest_put": 10, "upload_start": 100, "upload_finish": 100, "upload_body": 500},
    "ecr_public": {**dict.fromkeys(ACTIONS - {"upload_body"}, 10), "upload_body": 260},
    "gar": dict.fromkeys(ACTIONS, 300),  # 18,000 a minute, which writes may have
    "gcr": dict.fromkeys(ACTIONS, 300),
    "ghcr": dict.fromkeys(ACTIONS, 33),
    "acr": {**dict.fromkeys(WRITES, 36), **dict.fromkeys(READS, 166)},
    "dockerhub": {},
    "unknown": {},
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_rate_and_burst_are_never_more_than_a_registry_publishes(kind: Kind) -> None:
    rates = {
        action: pace
        for pace in DIALECTS[kind].limits
        for action in pace.actions.split()
        if pace.rate
    }
    assert set(rates) == set(PUBLISHED[kind])
    for action, pace in rates.items():
        assert pace.rate + pace.burst <= PUBLISHED[kind][action]


def test_windows_start_as_designed() -> None:
    def starts(kind: Kind) -> dict[str, int]:
        return {
            action: pace.start for pace in DIALECTS[kind].limits for action in pace.actions.split()
        }

    assert starts("dockerhub")["manifest_get"] == 1
    assert {starts("dockerhub")[action] for action in ("manifest_head", "blob_head")} == {8}
    heads = {"tag_list", "manifest_head", "blob_head"}
    assert starts("ecr") == {action: 8 if action in heads else 4 for action in ACTIONS}
    # Nothing is known of their limits, and four at a time would make 64 small layers take twice as
    # long.
    free = {"blob_get", "upload_start", "upload_body", "upload_finish"}
    assert starts("unknown") == {
        action: 8 if action in heads else 32 if action in free else 4 for action in ACTIONS
    }
