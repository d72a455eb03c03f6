"""What is hidden of secrets in texts, however they are written and wherever a text ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest

from _regsync.text import clean_beginning, forget_all_secrets, keep_secret, mask, printable


def redact(text: str, secrets: Collection[str]) -> str:
    keep_secret(*secrets)
    try:
        return mask(text)
    finally:
        forget_all_secrets()


@contextmanager
def keeping(secret: str) -> Iterator[None]:
    keep_secret(secret)
    yield
    forget_all_secrets()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pre s3cr/t+of many words, and more", "pre ***, and more"),
        ("pre s3cr%2Ft%2Bof%20many%20words", "pre ***"),
        ("pre s3cr%252ft%252bof%2520many%2520words", "pre ***"),
        ('{"pre": "s3cr\\/t+of many words"}', '{"pre": "***"}'),
        ("s3cr/t+o is none, s3cr/t+of many words is", "s3cr/t+o is none, *** is"),
        ("https://s3cr%2ft%2bof%20many%20words.example.test", "https://***.example.test"),
        ("a \x1b[1ms3cr/t+of many\nwords", "a [1m***"),
        ("eyJhbGciOiJ9.first.1 eyJhbGciOiJ9.second.2", "*** ***"),
    ],
)
def test_a_secret_is_hidden_however_a_server_writes_it(text: str, shown: str) -> None:
    secrets = ("eyJhbGciOiJ9.first.1", "", "s3cr/t+of many words", "eyJhbGciOiJ9.second.2")
    assert redact(text, secrets) == shown


@pytest.mark.parametrize("said", ["pa%2541ssword", "pa%252541ssword", "pa%25252541ssword"])
def test_a_secret_that_looks_percent_encoded_is_hidden(said: str) -> None:
    assert redact(f"you sent {said}, did you", ["pa%2541ssword"]) == "you sent ***, did you"


def test_a_secret_in_the_name_of_a_host_is_hidden() -> None:
    assert redact("from abcd-efgh.example.test", ["aBcD-EFGH"]) == "from ***.example.test"


def test_a_secret_that_json_escapes_is_hidden_whole() -> None:
    assert redact('{"said": "pa\\"ssword"}', ['pa"ssword']) == '{"said": "***"}'


def test_of_two_secrets_the_longer_one_is_hidden_whole() -> None:
    assert redact("secret-1, secret-1-and-more", ["secret-1", "secret-1-and-more"]) == "***, ***"


def test_hiding_takes_linear_time() -> None:
    """What a registry signs its URLs with is hidden too, and it may choose that. Quadratic work on
    this is minutes each time, and the run's own time-out would say so.
    """
    secrets = ["a" * (1500 + number) + "b" for number in range(512)]
    for text in ("a" * 60_000, "ab" * 30_000, "s3cr/t+o" * 8000):
        assert "*" not in redact(text, secrets)
    for length in range(30_000, 30_032):
        assert "*" not in redact("a" * 65_000, ["a" * length + "b"])


def test_a_secret_is_found_where_something_like_it_ends() -> None:
    assert redact("ababababababaX, abababab-", ["ababababaX"]) == "abab***, abababab-"
    assert redact("secret-1secret-1secret-2", ["secret-1secret-2"]) == "secret-1***"


@pytest.mark.parametrize("before", [0, 14, 49, 16_370, 16_380, 65_530])
@pytest.mark.parametrize("limit", [20, 60, 5000])
def test_a_cut_leaves_no_part_of_a_secret(before: int, limit: int) -> None:
    """Wherever a secret stands, and however much of the text it is."""
    secret = "0123456789/abcdefghij+KLMNOPQRST" * 3
    for text in (f"{'.' * before}{secret} and more", f"{'.' * before}{secret} " * 700):
        with keeping(secret):
            for shown in (printable(text, limit), clean_beginning(text.encode(), limit)):
                assert len(shown) <= limit
                assert not set(shown) - set("*. andmore…")
    assert printable(secret, 9) == "01234567…", "outside of the block nothing is a secret"


def test_blocks_within_each_other_know_all_secrets() -> None:
    with keeping("outer-secret"), keeping("inner-secret"):
        assert printable("outer-secret inner-secret") == "*** ***"
    with keeping("outer-secret"):
        assert printable("outer-secret inner-secret") == "*** inner-secret"


def test_a_secret_that_the_end_of_a_long_text_cuts_in_two_is_not_shown() -> None:
    secret = "hunter2-and-more"
    for inside in range(1, len(secret) + 1):
        text = "x" * (16 * 1024 - 1 - inside) + secret
        assert "h" not in redact(text, [secret])
