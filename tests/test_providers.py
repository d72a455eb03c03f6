"""Kinds by host name, Docker Hub's names, and the rows of facts."""

from __future__ import annotations

import typing

import pytest

from _regsync import providers

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
    assert providers.kind_of(host) == kind


@pytest.mark.parametrize("host", LOOK_ALIKES)
def test_a_look_alike_of_a_cloud_host_is_of_no_kind(host: str) -> None:
    assert providers.kind_of(host) == "unknown"


@pytest.mark.parametrize("host", ["docker.io", "index.docker.io", "registry-1.docker.io", "Docker.IO"])
def test_docker_hub_is_one_registry_under_three_names(host: str) -> None:
    assert providers.canonical_host(host) == "docker.io"
    assert providers.api_host(host) == "registry-1.docker.io"


def test_other_hosts_are_only_lower_cased() -> None:
    assert providers.canonical_host("Quay.IO") == "quay.io"
    assert providers.api_host("Quay.IO") == "quay.io"


@pytest.mark.parametrize(
    ("host", "repository", "requested"),
    [
        ("docker.io", "alpine", "library/alpine"),
        ("index.docker.io", "alpine", "library/alpine"),
        ("docker.io", "grafana/loki", "grafana/loki"),
        ("quay.io", "alpine", "alpine"),
    ],
)
def test_library_goes_before_one_segment_names_of_docker_hub_only(host: str, repository: str, requested: str) -> None:
    assert providers.api_repository(host, repository) == requested


def test_every_kind_has_a_row_that_names_its_source() -> None:
    assert set(providers.ROWS) == set(typing.get_args(providers.Kind))
    for row in providers.ROWS.values():
        assert row.source.startswith("protocol-facts.md section")


def test_rows_say_what_the_design_says() -> None:
    rows = providers.ROWS
    assert [kind for kind in rows if rows[kind].probe is None] == ["ecr", "ecr_public"]
    assert [kind for kind in rows if rows[kind].probe == "bare"] == ["gar", "gcr"]
    assert [kind for kind in rows if rows[kind].page_size == 10000] == ["gar", "gcr"]
    assert [kind for kind in rows if rows[kind].put_limit] == ["acr"]
    assert rows["ghcr"].fallback == "patch"
    assert rows["gar"].fallback is None, "Google refuses PATCH"
    assert {row.upload for row in rows.values()} == {"put"}
