"""What a challenge says, and whom a registry may send us to for a login."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.addresses import Origin, is_private
from _regsync.auth.challenge import Challenge, check_realm, parse_challenges
from _regsync.errors import AuthError

# Challenges.

CHALLENGES = [
    ([], []),
    ([""], []),
    (['Bearer realm="https://a/t",service="s",scope="repository:x:pull,push"'],
        [Challenge("bearer", "https://a/t", "s", "repository:x:pull,push")]),
    (['Bearer realm="https://gcr.io/v2/token",service=gcr.io'],
        [Challenge("bearer", "https://gcr.io/v2/token", "gcr.io")]),
    (['Basic realm="quay.io", Bearer realm="https://quay.io/v2/auth",service="quay.io"'],
        [Challenge("basic", "quay.io"), Challenge("bearer", "https://quay.io/v2/auth", "quay.io")]),
    (['Basic realm="a"', 'Bearer realm="b"'], [Challenge("basic", "a"), Challenge("bearer", "b")]),
    (['Bearer realm="a" service="b"'], [Challenge("bearer", "a", "b")]),
    (['BEARER Realm = "a" ,, SERVICE="b"'], [Challenge("bearer", "a", "b")]),
    ([r'Bearer realm="a\"b\\c"'], [Challenge("bearer", r'a"b\c')]),
    (['Bearer realm="a,service=b'], [Challenge("bearer", "a,service=b")]),
    (['Bearer realm="a",realm="b"'], [Challenge("bearer", "a")]),
    (['Bearer error="insufficient_scope"'], [Challenge("bearer", error="insufficient_scope")]),
    (["Negotiate YWJj=="], [Challenge("negotiate")]),
    (['realm="a"'], []),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), CHALLENGES)
def test_challenges_are_read_tolerantly(lines, expected):
    assert parse_challenges(lines) == expected


@given(st.lists(st.text() | st.text(alphabet='Bearer="\\, \t')))
def test_any_text_gives_a_list_of_challenges(lines):
    for challenge in parse_challenges(lines):
        assert challenge.scheme == challenge.scheme.lower() != ""


@pytest.mark.parametrize(
    "text", ['"' * 50_000, "a " * 50_000, "a=" + "\\" * 99_999, " " * 100_000, 'a="' * 30_000]
)
def test_long_challenges_are_read_in_linear_time(text):
    """Quadratic work on 100 KB would take minutes, and the run's own time-out would say so."""
    assert len(parse_challenges([text])) <= 50_000


# Realms.

HERE = "registry.example.org"


def realm(url, registry=HERE, scheme="https", *, secret=True):
    check_realm(url, Origin(scheme, registry, 443), has_credentials=secret)
    return url


@pytest.mark.parametrize(
    ("url", "registry"),
    [
        ("https://registry.example.org/token", HERE),
        ("https://registry.example.org:8443/token", HERE),
        ("https://auth.registry.example.org/t?a=1&b=2", HERE),
        ("https://auth.docker.io/token", "registry-1.docker.io"),
        ("https://gitlab.com/jwt/auth", "registry.gitlab.com"),
        ("https://us-docker.pkg.dev/v2/token", "us-docker.pkg.dev"),
        ("https://10.1.2.3:5001/token", "10.1.2.3"),
        ("https://[fd00::1]:5001/token", "fd00::1"),
        ("https://auth.corp.co.uk/t", "registry.corp.co.uk"),
        *(
            (f"https://{service}.aliyuncs.com/auth", f"{registry}.aliyuncs.com")
            for service, registry in (
                ("dockerauth.cn-hangzhou", "registry.cn-hangzhou"),
                ("dockerauth-vpc.ap-southeast-1", "registry-vpc.ap-southeast-1"),
                ("dockerauth-ee.cn-hangzhou", "mine-registry.cn-hangzhou.cr"),
                ("dockerauth-cn-zhangjiakou", "mine-registry.cn-zhangjiakou.cr"),
            )
        ),
        ("https://api.scaleway.com/registry-internal/tokens", "rg.fr-par.scw.cloud"),
    ],
)
def test_realms_of_the_same_owner_get_credentials(url, registry):
    assert realm(url, registry) == url


OTHERS = {
    "another owner": [
        ("https://evil.test/token", HERE),
        ("https://example.org.evil.test/t", HERE),
        ("https://evilexample.org/t", HERE),
        ("https://evil.org/t", "example.org"),
        ("https://evil.azurecr.io/t", "mine.azurecr.io"),
        ("https://evil.pkg.dev/t", "us-docker.pkg.dev"),
        ("https://2.dkr.ecr.eu-west-1.amazonaws.com/t", "1.dkr.ecr.eu-west-1.amazonaws.com"),
        ("https://evil.co.uk/t", "corp.co.uk"),
        ("https://evil.cn-hangzhou.aliyuncs.com/t", "registry.cn-hangzhou.aliyuncs.com"),
        # A customer's storage.
        ("https://dockerauth.oss-cn-hangzhou.aliyuncs.com/t", "registry.cn-hangzhou.aliyuncs.com"),
        ("https://dockerauth.cn-hangzhou.aliyuncs.com/auth", HERE),
        ("https://api.scaleway.com/t", HERE),
        ("https://9.1.2.3/t", "8.1.2.3"),
    ],
    "not an https URL": [
        ("http://registry.example.org/t", HERE),
        ("ftp://registry.example.org/t", HERE),
        ("/token", HERE),
        ("", HERE),
        ("https://", HERE),
        ("https://registry.example.org/#x", HERE),
    ],
    "not a URL": [("https://registry.example.org:x/", HERE), ("https://[::1/", HERE)],
    "characters that no URL may have": [
        ("https://registry.example.org/a b", HERE),
        ("https://registry.example.org/\r\nx: y", HERE),
        ("https://rеgistry.example.org/", HERE),  # a letter of it is Cyrillic
    ],
    "not an http or https URL": [
        ("https://u:p@registry.example.org/", HERE),
        ("https://registry.example.org@evil.test/", HERE),
    ],
}


@pytest.mark.parametrize(
    ("url", "registry", "complaint"),
    [(*row, complaint) for complaint, rows in OTHERS.items() for row in rows],
)
def test_other_realms_get_no_credentials(url, registry, complaint):
    with pytest.raises(AuthError) as caught:
        realm(url, registry)
    assert complaint in caught.value.message
    assert caught.value.message.startswith(f"{registry} asks for a login at")
    assert caught.value.message.isprintable()


ADDRESSES = [
    *("169.254.169.254", "127.0.0.1", "10.0.0.1", "192.168.1.1", "0.0.0.0", "224.0.0.1"),
    *("[::1]", "[fe80::1]", "[fd00:ec2::254]", "[::ffff:127.0.0.1]", "[64:ff9b::a00:1]"),
    *("127.1", "2130706433", "0x7f000001", "0x7f.1", "a.1"),
    *("localhost", "LOCALHOST.", "x.localhost", "metadata.google.internal"),
]


@pytest.mark.parametrize("host", ADDRESSES)
def test_no_stranger_sends_us_to_a_private_address(host):
    assert is_private(host.strip("[]"))
    for secret in (True, False):
        with pytest.raises(AuthError, match=r"private address|not a URL"):
            realm(f"https://{host}/token", secret=secret)


def test_public_names_and_addresses_are_not_private():
    for host in (HERE, "8.8.8.8", "2606:4700::1", "1password.example", "a1.b2", "0x7f.g"):
        assert not is_private(host)


def test_an_anonymous_login_may_go_to_any_public_https_realm():
    assert realm("https://tokens.test/t", secret=False) == "https://tokens.test/t"


def test_a_registry_over_http_may_name_an_http_realm():
    assert realm("http://127.0.0.1:5001/t", "localhost", "http") == "http://127.0.0.1:5001/t"
    assert realm("http://[::1]:5001", "127.0.0.1", "http") == "http://[::1]:5001"
    with pytest.raises(AuthError, match="another owner"):
        realm("http://evil.test/t", "registry.test", "http")


@given(st.text())
def test_any_realm_passes_or_is_an_auth_error(text):
    for url in (text, f"https://{text}", f"https://registry.example.org{text}"):
        try:
            passed = realm(url)
        except AuthError as error:
            assert "\n" not in error.message  # noqa: PT017
        else:
            assert (urlsplit(passed).hostname or "").rstrip(".").endswith("example.org")
