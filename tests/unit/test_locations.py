"""Where a Location may lead, and what it means."""

from __future__ import annotations

import pytest

from _regsync.addresses import Origin
from _regsync.errors import ProtocolBroken
from _regsync.registry.client import check_foreign, resolve_location

PUBLIC, PRIVATE = Origin("https", "registry.example", 443), Origin("http", "127.0.0.1", 5000)


@pytest.mark.rule("R3", "R4")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "192.168.1.1",
        "0.0.0.0",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:a00:1::1",
        "localhost",
        "api.localhost",
        "224.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "metadata.google.internal",
        "localhost.",
    ],
)
def test_a_public_registry_cannot_send_us_to_a_private_address(host):
    with pytest.raises(ProtocolBroken, match="private address"):
        check_foreign(PUBLIC, Origin("https", host, 443))
    check_foreign(PRIVATE, Origin("http", host, 80))


@pytest.mark.rule("R3", "R4")
@pytest.mark.parametrize("host", ["storage.example", "1.1.1.1", "2606:4700::1111", "1password.com"])
def test_a_public_registry_may_send_us_to_a_public_host_over_https_only(host):
    check_foreign(PUBLIC, Origin("https", host, 443))
    with pytest.raises(ProtocolBroken, match="https to"):
        check_foreign(PUBLIC, Origin("http", host, 80))


SECURE = Origin("https", "registry.example", 8443)


@pytest.mark.parametrize(
    ("base", "location", "origin", "path"),
    [
        pytest.param(PRIVATE, "/v2/a?b=%2F&c", PRIVATE, "/v2/a?b=%2F&c", id="a path"),
        pytest.param(PRIVATE, "?s=1", PRIVATE, "/v2/x/uploads/?s=1", id="a query"),
        pytest.param(
            PRIVATE, "u-1?x=%41~", PRIVATE, "/v2/x/uploads/u-1?x=%41~", id="a relative path"
        ),
        pytest.param(
            PUBLIC, "//other.example/u", Origin("https", "other.example", 443), "/u", id="a host"
        ),
        pytest.param(
            PUBLIC, "https://O.example:8443", Origin("https", "o.example", 8443), "/", id="a url"
        ),
        pytest.param(
            PUBLIC, "http://registry.example/u?s=1", PUBLIC, "/u?s=1", id="scheme lost, no port"
        ),
        pytest.param(
            PUBLIC,
            " https://o.example/token\n",
            Origin("https", "o.example", 443),
            "/token",
            id="a line break behind a variable",
        ),
        pytest.param(
            PUBLIC, "https://o.example/u?", Origin("https", "o.example", 443), "/u", id="no query"
        ),
        pytest.param(
            SECURE, "http://registry.example:8443/u", SECURE, "/u", id="scheme lost, same port"
        ),
        pytest.param(
            SECURE,
            "http://registry.example:80/u",
            Origin("http", "registry.example", 80),
            "/u",
            id="another port is another origin",
        ),
    ],
)
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
