"""What the name of a host says: whose product it is and what is known of that, and whether a Location
may lead there.
"""

from __future__ import annotations

import typing

import pytest

from _regsync.addresses import Origin, check_foreign, resolve_location
from _regsync.errors import ProtocolBroken
from _regsync.providers import DIALECTS, Kind, api_host, api_repository, canonical_host, kind_of
from conformance.rates import ACTIONS, READS, WRITES

# Kinds by host name.

KINDS = {
    "ecr": "123456789012.dkr.ecr.us-east-1.amazonaws.com 123456789012.dkr.ecr-fips.us-gov-west-1.amazonaws.com "
    "123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn 123456789012.dkr.ecr.eusc-de-east-1.amazonaws.eu "
    "123456789012.dkr.ecr.us-iso-east-1.c2s.ic.gov 123456789012.dkr-ecr.eu-west-1.on.aws "
    "123456789012.dkr-ecr-fips.us-east-2.on.aws 123456789012.DKR.ECR.us-east-1.AmazonAWS.com",
    "ecr_public": "public.ecr.aws",
    "dockerhub": "docker.io index.docker.io registry-1.docker.io registry.hub.docker.com Docker.IO",
    "gar": "europe-west1-docker.pkg.dev us-docker.pkg.dev",
    "gcr": "gcr.io eu.gcr.io",
    "ghcr": "ghcr.io",
    "acr": "team.azurecr.io team-a1b2.azurecr.cn team.azurecr.us team.eastus2.geo.azurecr.io",
    "unknown": "quay.io localhost hub.docker.io us-npm.pkg.dev docker.pkg.dev evilgcr.io a.b.gcr.io "
    "12345678901.dkr.ecr.us-east-1.amazonaws.com x123456789012.dkr.ecr.us-east-1.amazonaws.com "
    "123456789012.dkr.ecr.us-east-1.amazonaws.com.evil.example 123456789012.dkr-ecr.us-east-1.amazonaws.com "
    "123456789012.dkr.ecr.us-east-1.on.aws 123456789012.dkr.ecr.us-east-1xamazonaws.com "
    "١٢٣٤٥٦٧٨٩٠١٢.dkr.ecr.us-east-1.amazonaws.com public.ecr.aws.evil.example notpublic.ecr.aws evildocker.io "
    "evil.example-docker.pkg.dev.evil.example ghcr.io.evil.example evilghcr.io team.azurecr.io.evil.example "
    "evilazurecr.io team.azurecr.de a.team.azurecr.io "
    "team.eastus2.data.azurecr.io geo.azurecr.io.evil.example",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kind_follows_the_whole_host_name_and_a_look_alike_has_none(kind):
    assert {host: kind_of(host) for host in KINDS[kind].split()} == dict.fromkeys(
        KINDS[kind].split(), kind
    )


def test_an_address_belongs_to_no_product_whatever_its_login():
    hosts = ("10.0.0.1", "fe80::1", "registry.internal", "team.azurecr.io\n", "")
    found = [kind_of(host, "ecr") for host in hosts]
    assert found == ["unknown", "unknown", "ecr", "ecr", "unknown"]
    assert kind_of("team.azurecr.io\n") == kind_of("registry.internal", "basic") == "unknown"


def test_docker_hub_is_one_registry_under_all_its_names_and_has_a_library():
    for host in KINDS["dockerhub"].split():
        assert (canonical_host(host), api_host(host)) == ("docker.io", "registry-1.docker.io")
        assert api_repository(host, "alpine") == "library/alpine"
        assert api_repository(host, "grafana/loki") == "grafana/loki"
    assert canonical_host("Quay.IO") == api_host("Quay.IO") == "quay.io"
    assert api_repository("quay.io", "alpine") == "alpine"


# What is known of each kind.


def test_rows_say_what_the_design_says():
    rows = DIALECTS
    assert set(rows) == set(typing.get_args(Kind))
    assert [kind for kind in rows if rows[kind].probe is None] == ["ecr", "ecr_public"]
    assert [kind for kind in rows if rows[kind].probe == "bare"] == ["gar", "gcr"]
    assert [kind for kind in rows if rows[kind].page_size == 10000] == ["gar", "gcr"]
    assert {kind: rows[kind].put_limit for kind in rows if rows[kind].put_limit} == {"acr": 1 << 24}
    assert [kind for kind in rows if rows[kind].takes_chunks] == ["ghcr", "unknown"]
    assert [kind for kind in rows if rows[kind].per_project] == ["gar", "gcr"]


# How many windows each kind has by the specification, and what its registry publishes per second
# (docs/protocol-facts.md sections 4.8, 5.5, 6.5 and 7.1).
PUBLISHED = {
    "ecr": (9, {"manifest_put": 10, "upload_start": 100, "upload_finish": 100, "upload_body": 500}),
    "ecr_public": (5, {**dict.fromkeys(ACTIONS, 10), "upload_body": 260}),
    "gar": (1, dict.fromkeys(ACTIONS, 300)),  # 18,000 a minute, which writes may have
    "gcr": (1, dict.fromkeys(ACTIONS, 300)),
    "ghcr": (1, dict.fromkeys(ACTIONS, 33)),
    "acr": (2, {**dict.fromkeys(WRITES, 36), **dict.fromkeys(READS, 166)}),
    "dockerhub": (3, {}),
    "unknown": (5, {}),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_each_kind_has_its_windows_and_no_rate_and_burst_above_what_is_published(kind):
    windows, published = PUBLISHED[kind]
    paces = DIALECTS[kind].limits
    named = [(action, pace) for pace in paces for action in pace.actions.split()]
    assert len(paces) == windows
    assert sorted(action for action, _ in named) == sorted(ACTIONS), "each action in one window"
    assert {action for action, pace in named if pace.rate} == set(published)
    for action, pace in named:
        assert not pace.rate or pace.rate + pace.burst <= published[action]


def test_windows_start_as_designed():
    def starts(kind):
        paces = DIALECTS[kind].limits
        return {action: pace.start for pace in paces for action in pace.actions.split()}

    assert starts("dockerhub")["manifest_get"] == 1
    assert {starts("dockerhub")[action] for action in ("manifest_head", "blob_head")} == {8}
    heads = {"tag_list", "manifest_head", "blob_head"}
    assert starts("ecr") == {action: 8 if action in heads else 4 for action in ACTIONS}
    # Nothing is known of their limits, and four at a time would make 64 small layers take twice as
    # long.
    free = {"blob_get", "upload_start", "upload_body", "upload_finish"}
    others = {action: 8 if action in heads else 32 if action in free else 4 for action in ACTIONS}
    assert starts("unknown") == others


# Locations.

PUBLIC, PRIVATE = Origin("https", "registry.example", 443), Origin("http", "127.0.0.1", 5000)
SECURE = Origin("https", "registry.example", 8443)
OTHER = Origin("https", "o.example", 443)
PRIVATE_HOSTS = """127.0.0.1 10.0.0.1 169.254.169.254 192.168.1.1 0.0.0.0 ::1 fe80::1 fd00::1 ::ffff:10.0.0.1
    64:ff9b::a9fe:a9fe 2002:a00:1::1 224.0.0.1 127.1 2130706433 0x7f000001 localhost localhost. api.localhost
    metadata.google.internal"""  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE_HOSTS.split())
def test_a_public_registry_cannot_send_us_to_a_private_address(host):
    with pytest.raises(ProtocolBroken, match="private address"):
        check_foreign(PUBLIC, Origin("https", host, 443))
    check_foreign(PRIVATE, Origin("http", host, 80))


@pytest.mark.parametrize("host", ["storage.example", "1.1.1.1", "2606:4700::1111", "1password.com"])
def test_a_public_registry_may_send_us_to_a_public_host_over_https_only(host):
    check_foreign(PUBLIC, Origin("https", host, 443))
    with pytest.raises(ProtocolBroken, match="https to"):
        check_foreign(PUBLIC, Origin("http", host, 80))


@pytest.mark.parametrize(
    ("base", "location", "origin", "path"),
    [
        (PRIVATE, "/v2/a?b=%2F&c", PRIVATE, "/v2/a?b=%2F&c"),
        (PRIVATE, "?s=1", PRIVATE, "/v2/x/uploads/?s=1"),
        (PRIVATE, "u-1?x=%41~", PRIVATE, "/v2/x/uploads/u-1?x=%41~"),
        (PUBLIC, "//o.example/u", OTHER, "/u"),
        (PUBLIC, "https://O.example:8443", OTHER._replace(port=8443), "/"),
        (PUBLIC, " https://o.example/token\n", OTHER, "/token"),
        (PUBLIC, "https://o.example/u?", OTHER, "/u"),
        (PRIVATE, "https://o.example/u;?q;", OTHER, "/u;?q;"),
        (PUBLIC, "http://registry.example/u?s=1", PUBLIC, "/u?s=1"),
        (SECURE, "http://registry.example:8443/u", SECURE, "/u"),
        (SECURE, "http://registry.example:80/u", Origin("http", "registry.example", 80), "/u"),
    ],
    ids=["a path", "a query", "a relative path", "a host", "a url", "a line break behind a variable",
        "no query", "empty parameters", "scheme lost, no port", "scheme lost, same port", "another port"],
)  # fmt: skip
def test_locations_keep_their_bytes(base, location, origin, path):
    assert resolve_location(base, "/v2/x/uploads/", location) == (origin, path)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("file:///etc/passwd", "https URL"),
        ("http://a:b@127.0.0.1/x", "https URL"),
        ("http://ex\xe4mple.test/x", "no URL"),
        ("/v2/a b", "no URL"),
        ("http://[::1/x", "a URL"),
        ("//[::1/x", "a URL"),
    ],
)
def test_a_location_that_is_none_is_refused(location, words):
    with pytest.raises(ProtocolBroken, match=words):
        resolve_location(PRIVATE, "/v2/x/uploads/", location)
