"""Which origin goes through which proxy: the Go rules of docs/protocol-facts.md section 8.1, as
tables.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _regsync.errors import ConfigError
from _regsync.net.proxies import Proxy, proxy_for

PROXY = "http://proxy.example:3128"


def is_direct(no_proxy: str, host: str, port: int = 443) -> bool:
    environ = {"HTTPS_PROXY": PROXY, "NO_PROXY": no_proxy}
    return proxy_for("https", host, port, environ) is None


@pytest.mark.parametrize(
    ("no_proxy", "host", "port", "direct"),
    [
        pytest.param("", "registry.example", 443, False, id="nothing-listed"),
        pytest.param("*", "registry.example", 443, True, id="star"),
        pytest.param("a.example, *", "registry.example", 443, True, id="star-among-others"),
        pytest.param("registry.example", "registry.example", 443, True, id="same-name"),
        pytest.param("example", "registry.example", 443, True, id="sub-domain"),
        pytest.param("Registry.EXAMPLE", "registry.example", 443, True, id="case-of-the-item"),
        pytest.param("registry.example", "REGISTRY.example", 443, True, id="case-of-the-host"),
        pytest.param("try.example", "registry.example", 443, False, id="name-ends-alike"),
        pytest.param(".example", "registry.example", 443, True, id="dot-names-sub-domains"),
        pytest.param(".registry.example", "registry.example", 443, False, id="dot-leaves-the-host-out"),
        pytest.param("*.example", "registry.example", 443, True, id="star-dot-names-sub-domains"),
        pytest.param("*.registry.example", "registry.example", 443, False, id="star-dot-leaves-the-host-out"),
        pytest.param(" a.example ,, registry.example ", "registry.example", 443, True, id="blanks-and-gaps"),
        pytest.param("a.example registry.example", "registry.example", 443, False, id="only-commas-separate"),
        pytest.param("registry.example:5000", "registry.example", 5000, True, id="port-matches"),
        pytest.param("registry.example:5000", "registry.example", 443, False, id="port-differs"),
        pytest.param("example:5000", "registry.example", 5000, True, id="sub-domain-with-port"),
        pytest.param(":5000", "registry.example", 5000, False, id="port-alone-is-ignored"),
        pytest.param("192.0.2.7", "192.0.2.7", 443, True, id="address"),
        pytest.param("192.0.2.7:5000", "192.0.2.7", 5000, True, id="address-with-port"),
        pytest.param("192.0.2.7:5000", "192.0.2.7", 443, False, id="address-with-another-port"),
        pytest.param("192.0.2.0/24", "192.0.2.7", 443, True, id="cidr"),
        pytest.param("192.0.2.9/24", "192.0.2.7", 443, True, id="cidr-with-host-bits"),
        pytest.param("192.0.3.0/24", "192.0.2.7", 443, False, id="cidr-elsewhere"),
        pytest.param("192.0.2.0/24", "registry.example", 443, False, id="cidr-never-resolves-names"),
        pytest.param("192.0.2.0/99", "192.0.2.7", 443, False, id="cidr-malformed"),
        pytest.param("2001:db8::/32", "2001:db8::5", 443, True, id="cidr-v6"),
        pytest.param("2001:db8::/32", "192.0.2.7", 443, False, id="cidr-of-the-other-family"),
        pytest.param("2001:db8::5", "2001:db8::5", 443, True, id="v6-bare"),
        pytest.param("[2001:db8::5]", "2001:db8::5", 443, True, id="v6-in-brackets"),
        pytest.param("[2001:db8::5]:443", "2001:db8::5", 443, True, id="v6-with-port"),
        pytest.param("[2001:db8::5]:5000", "2001:db8::5", 443, False, id="v6-with-another-port"),
        pytest.param("2001:db8:0::5", "2001:db8::5", 443, True, id="v6-other-spelling"),
        pytest.param("192.0.2.7", "::ffff:192.0.2.7", 443, True, id="v4-mapped"),
        pytest.param("2.7", "192.0.2.7", 443, False, id="end-of-an-address-is-no-sub-domain"),
    ],
)  # fmt: skip
def test_no_proxy_names_origins_as_go_does(
    no_proxy: str, host: str, port: int, direct: bool
) -> None:
    assert is_direct(no_proxy, host, port) is direct


@pytest.mark.rule("R20")
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST",
        "127.0.0.1",
        "127.8.9.10",
        "::1",
        "::ffff:127.0.0.1",
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "169.254.129.2",
        "fe80::1",
        "fd00:ec2::254",
        "fd00:0ec2:0::23",
        "metadata.google.internal",
        # The same, written otherwise.
        "localhost.",
        "registry.localhost",
        "127.0.0.1.",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "2852039166",
        "169.254.43518",
        "0xa9fea9fe",
        "::ffff:169.254.169.254",
        "::ffff:a9fe:a9fe",
        "0:0:0:0:0:0:0:1",
        "fe80::1%eth0",
        "METADATA.google.internal.",
    ],
)
def test_loopback_and_metadata_addresses_never_see_a_proxy(host: str) -> None:
    for scheme in ("http", "https"):
        environ = {"HTTP_PROXY": PROXY, "HTTPS_PROXY": PROXY}
        assert proxy_for(scheme, host, 80, environ) is None


@pytest.mark.parametrize(
    ("environ", "scheme", "host", "setting"),
    [
        pytest.param({}, "https", None, None, id="nothing-set"),
        pytest.param({"HTTPS_PROXY": "http://up"}, "https", "up", "HTTPS_PROXY", id="upper"),
        pytest.param({"https_proxy": "http://low"}, "https", "low", "https_proxy", id="lower"),
        pytest.param({"https_proxy": "http://low", "HTTPS_PROXY": "http://up"}, "https", "low", "https_proxy",
            id="both"),
        pytest.param({"https_proxy": " ", "HTTPS_PROXY": "http://up"}, "https", "up", "HTTPS_PROXY",
            id="empty-is-unset"),
        pytest.param({"HTTP_PROXY": PROXY}, "https", None, None, id="other-scheme"),
        pytest.param({"ALL_PROXY": PROXY}, "https", None, None, id="all-proxy-is-not-read"),
        pytest.param({"HTTP_PROXY": "http://up"}, "http", "up", "HTTP_PROXY", id="plain-http"),
        pytest.param({"HTTP_PROXY": "http://up", "REQUEST_METHOD": "GET"}, "http", None, None, id="cgi"),
        pytest.param({"http_proxy": "http://low", "REQUEST_METHOD": "GET"}, "http", "low", "http_proxy",
            id="cgi-lower-case"),
        pytest.param({"https_proxy": PROXY, "no_proxy": "registry.example", "NO_PROXY": "other.example"}, "https",
            None, None, id="lower-no-proxy-first"),
    ],
)  # fmt: skip
def test_the_variable_that_names_the_proxy_is_known(
    environ: dict[str, str], scheme: str, host: str | None, setting: str | None
) -> None:
    proxy = proxy_for(scheme, "registry.example", 443, environ)
    assert (proxy and (proxy.host, proxy.setting)) == (host and (host, setting))


@pytest.mark.parametrize(
    "host", ["registry1.example", "0x7f.example", "1.example", "127.0.0.1.example", "8.8.8.8"]
)
def test_names_that_merely_look_like_such_addresses_go_through_the_proxy(host: str) -> None:
    assert proxy_for("https", host, 443, {"HTTPS_PROXY": PROXY}) is not None


@pytest.mark.parametrize(
    ("host", "no_proxy", "direct"),
    [
        ("storage.example", "", False),
        ("storage.example", "storage.example", True),
        ("127.0.0.1", "", True),
        ("2852039166", "", True),
    ],
)
def test_where_a_registry_with_a_proxy_sends_us_the_lists_count(
    host: str, no_proxy: str, direct: bool
) -> None:
    environ = {"HTTPS_PROXY": "http://other.example:1", "NO_PROXY": no_proxy}
    proxy = proxy_for("https", host, 443, environ, override=PROXY, heeds_exemptions=True)
    assert (proxy is None) is direct
    assert proxy is None or str(proxy) == PROXY


def test_the_registrys_own_proxy_beats_no_proxy_and_loopback() -> None:
    environ = {"HTTPS_PROXY": PROXY, "NO_PROXY": "*"}
    proxy = proxy_for("https", "127.0.0.1", 5000, environ, override="http://mine.example:8080")
    assert proxy == Proxy("mine.example", 8080, "proxy in the configuration")


def test_an_empty_override_leaves_the_decision_to_the_environment() -> None:
    environ = {"HTTPS_PROXY": PROXY}
    proxy = proxy_for("https", "registry.example", 443, environ, override="")
    assert proxy == Proxy("proxy.example", 3128, "HTTPS_PROXY")


def at(host: str, port: int, *login: str) -> Proxy:
    return Proxy(host, port, "HTTPS_PROXY", *login)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("http://proxy.example:3128", at("proxy.example", 3128), id="plain"),
        pytest.param("proxy.example:3128", at("proxy.example", 3128), id="without-scheme"),
        pytest.param("proxy.example", at("proxy.example", 80), id="default-port"),
        pytest.param("HTTP://Proxy.Example:1", at("proxy.example", 1), id="upper-case"),
        pytest.param("http://[2001:db8::1]:3128", at("2001:db8::1", 3128), id="v6"),
        pytest.param("http://u:p@proxy.example", at("proxy.example", 80, "u", "p"), id="user"),
        pytest.param("u:p@proxy.example:81", at("proxy.example", 81, "u", "p"), id="user-no-scheme"),
        pytest.param("http://do%40main:p%3A%2Fss@proxy.example",
            at("proxy.example", 80, "do@main", "p:/ss"), id="percent-decoded"),
        pytest.param("http://u@proxy.example", at("proxy.example", 80, "u"), id="user-without-password"),
    ],
)  # fmt: skip
def test_proxy_values_parse(value: str, expected: Proxy) -> None:
    assert proxy_for("https", "registry.example", 443, {"HTTPS_PROXY": value}) == expected


@pytest.mark.rule("R19")
@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        pytest.param("socks5://user:hunter2@proxy.example:1080", "'socks5' is not supported", id="socks"),
        pytest.param("https://user:hunter2@proxy.example", "'https' is not supported", id="tls-to-the-proxy"),
        pytest.param("ftp://user:hunter2@proxy.example", "'ftp' is not supported", id="ftp"),
        pytest.param("http://user:hunter2@", "not a proxy URL", id="no-host"),
        pytest.param("http://user:hunter2@proxy.example:port", "not a proxy URL", id="port-is-a-word"),
        pytest.param("http://user:hunter2@proxy.example:70000", "not a proxy URL", id="port-too-large"),
        pytest.param("http://user:hunter2@[2001:db8::1:80", "not a proxy URL", id="bracket-open"),
        pytest.param("http://user:hunter2@bad host:80", "not a proxy URL", id="blank-in-host"),
        pytest.param("http://user:12/hunter2@proxy.example:80", "not a proxy URL", id="slash-in-password"),
    ],
)  # fmt: skip
def test_an_unusable_proxy_is_an_error_that_keeps_the_password_secret(
    value: str, complaint: str
) -> None:
    for environ, override, named in (
        ({"HTTPS_PROXY": value}, None, "HTTPS_PROXY"),
        ({}, value, "proxy in the"),
    ):
        with pytest.raises(ConfigError) as caught:
            proxy_for("https", "registry.example", 443, environ, override)
        assert complaint in caught.value.message
        assert named in caught.value.message
        assert caught.value.hint is not None
        assert "hunter2" not in f"{caught.value!r} {caught.value.hint}"


@pytest.mark.rule("R10")
def test_text_of_a_proxy_shows_no_user_info() -> None:
    proxy = at("2001:db8::1", 3128, "someone", "hunter2")
    assert str(proxy) == "http://[2001:db8::1]:3128"
    assert "someone" not in repr(proxy)
    assert "hunter2" not in repr(proxy)


@given(no_proxy=st.text(), value=st.text(), host=st.text(min_size=1))
def test_any_environment_gives_a_decision_or_a_config_error(
    no_proxy: str, value: str, host: str
) -> None:
    try:
        proxy = proxy_for("https", host, 443, {"HTTPS_PROXY": value, "NO_PROXY": no_proxy})
    except ConfigError as error:
        assert error.hint  # noqa: PT017
    else:
        assert proxy is None or 0 < proxy.port < 65536
