"""The tokens of one registry: which scopes each covers, and which of them serves a request.

Owns: tokens given and pending, what a registry has taught of its scopes.
May not know: challenges, credentials, how a token is asked for.
Invariants: a dropped token is not given out again.
Follows: docs/design.md section 6 (rule 2), docs/protocol-facts.md sections 2.2 and 2.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import anyio

from _regsync.auth.credentials import Pair
from _regsync.errors import SyncError

# Repository -> actions ("pull" or "pull,push"). The repository that is needed now stands first.
Scopes = Mapping[str, str]

# Seconds. A body cannot be sent twice, so a token of unknown life that is older does not go with
# it.
_UNKNOWN_LIFE_BEFORE_BODY = 60.0

# How many dropped tokens are remembered: requests that carry them may be under way.
_MOST_DROPPED = 64


class Use(NamedTuple):
    """What a request does with its token."""

    repository: str
    is_reading: bool


def use_of(repository: str, method: str) -> Use:
    return Use(repository, method in ("GET", "HEAD"))


class Token:
    """A bearer token, from the moment in which it is asked for.

    While its exchange with the token service runs, other requests may wait for `done`. After that
    there is a `value`, or an `error`. There is neither where the exchange was cancelled, or was
    refused because of too many scopes: then whoever needs the token asks again.
    """

    def __init__(self, scopes: Scopes, covers_more: bool, requested_at: float) -> None:
        self.scopes = scopes
        # Whether `scopes` has more than the request needs for which the token was asked.
        self.covers_more = covers_more
        self.requested_at = requested_at

        self.done = anyio.Event()
        self.value = ""
        self.error: SyncError | None = None

        self.renew_at: float | None = None  # None: nobody knows how long it lives
        self.worked_for: set[Use] = set()  # what the requests did that it has let in


class TokenCache:
    """The tokens of one registry: those that it has given, and the pending ones."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tokens: dict[frozenset[Pair], Token] = {}  # by scopes
        self._by_value: dict[str, Token] = {}  # the same tokens, by their texts
        self._dropped = deque[Token](maxlen=_MOST_DROPPED)
        self.pending: list[Token] = []  # the exchange for each is under way

        # Two things that refusals teach. Whether a token has to cover exactly what a request touches,
        # and nothing more:
        self.needs_exact = False
        # The one scope that the registry gives for all repositories; empty where it has none such.
        self.scope_for_all = ""

    def values(self) -> list[str]:
        """Return the tokens' own texts, which are secrets."""
        return [token.value for token in self._tokens.values()]

    def sent_in(self, authorization: str | None) -> Token | None:
        """Return the token in an Authorization header, also one that was dropped after the request
        was sent; None for a header without a token of ours.
        """
        value = (authorization or "").removeprefix("Bearer ")
        token = self._by_value.get(value)
        if token is not None:
            return token
        return next((token for token in self._dropped if token.value == value), None)

    def is_in_use(self, token: Token) -> bool:
        """Return whether a token has not been dropped."""
        return self._by_value.get(token.value) is token

    def is_live(self, token: Token, before_body: bool) -> bool:
        """Return whether a token has so much of its life left that a request can be sent with it.

        `before_body`: the request has a body, which cannot be sent again after a 401.
        """
        if token.renew_at is not None:
            return self._now() < token.renew_at
        # Nobody knows when the token ends. A 401 will tell, unless there is a body.
        return not before_body or self._now() - token.requested_at < _UNKNOWN_LIFE_BEFORE_BODY

    def has_rights(self, token: Token, needed: Scopes) -> bool:
        """Return whether a token gives all rights that a request needs."""
        if self.needs_exact:
            return token.scopes == needed
        if self.scope_for_all:
            return True
        return all(
            _actions_in(actions) <= _actions_in(token.scopes.get(name, ""))
            for name, actions in needed.items()
        )

    def find(self, needed: Scopes, before_body: bool) -> Token | None:
        """Return the youngest token that serves a request, a pending one only if there is no other.

        None where a token has to be asked for. `before_body` is that of `is_live`.
        """
        if self.needs_exact:
            # Only one token can serve: there is no need to look at thousands.
            exact = self._tokens.get(frozenset(needed.items()))
            given = [exact] if exact else []
        else:
            given = [*self._tokens.values()]
        for tokens in (given, self.pending):
            serving = [
                token
                for token in tokens
                if self.has_rights(token, needed) and self.is_live(token, before_body)
            ]
            if serving:
                return max(serving, key=lambda token: token.requested_at)
        return None

    def covered_scopes(self, before_body: bool) -> set[Pair]:
        """Return which scopes need no further token: those of all live tokens, given or pending."""
        tokens = [*self._tokens.values(), *self.pending]
        return {
            scope
            for token in tokens
            if self.is_live(token, before_body)
            for scope in token.scopes.items()
        }

    def add(self, new_token: Token) -> None:
        """Keep a new token; drop the old token of the same scopes, and all that have ended."""
        # A run of many days would collect ended tokens without bound.
        key = frozenset(new_token.scopes.items())
        outdated = [
            old_key
            for old_key, token in self._tokens.items()
            if old_key == key or not self.is_live(token, before_body=False)
        ]
        for old_key in outdated:
            self._drop(old_key)
        self._tokens[key] = new_token
        self._by_value[new_token.value] = new_token

    def drop(self, refused: Token, needed: Scopes) -> list[str]:
        """Drop a refused token, and all others with which the same request would be refused too.
        Return the values of all dropped tokens.
        """

        def is_refused_too(token: Token) -> bool:
            # An older token has ended as well.
            is_older = token.requested_at <= refused.requested_at
            return token.value == refused.value or (is_older and self.has_rights(token, needed))

        dropped = [key for key, token in self._tokens.items() if is_refused_too(token)]
        return [self._drop(key).value for key in dropped]

    def _drop(self, key: frozenset[Pair]) -> Token:
        token = self._tokens.pop(key)
        if self.is_in_use(token):
            del self._by_value[token.value]
        self._dropped.append(token)
        return token


def _actions_in(text: str) -> set[str]:
    return set(text.split(","))


def union_of(first: str, second: str) -> str:
    """Return the actions of both texts: `pull,push` for `push` and `pull`.

    They are sorted, because registries compare literally (docs/protocol-facts.md section 2.2).
    """
    return ",".join(sorted(_actions_in(first) | _actions_in(second)))
