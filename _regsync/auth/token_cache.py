"""A cache of one registry's bearer tokens, searched by the scopes that a request needs.

Owns: issued and pending tokens, and the registry's rules for scopes.
May not know: challenges, credentials, the token service.
Invariants: `find` does not return a dropped token.
Follows: docs/design.md section 6 (rule 2), docs/protocol-facts.md sections 2.2 and 2.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import anyio

from _regsync.errors import SyncError
from _regsync.text import forget_secret

# A repository, and the actions that are needed there ("pull" or "pull,push").
Scope = tuple[str, str]

# Repository -> actions ("pull" or "pull,push"), in the order of the scope parameters. The
# repository of the request that needs the token comes first.
Scopes = Mapping[str, str]

# Seconds. The largest age at which a token of unknown lifetime is used for a request that cannot be
# repeated.
_LARGEST_UNCERTAIN_AGE = 60.0

# The number of dropped tokens that are kept to recognize them in the answers to earlier requests.
_MOST_DROPPED = 64


class Use(NamedTuple):
    """The kind of access that a request needs."""

    repository: str
    is_reading: bool  # whether the method is GET or HEAD


def use_of(repository: str, method: str) -> Use:
    return Use(repository, method in ("GET", "HEAD"))


class Token:
    """A bearer token that was requested from the token service.

    While the token request is pending, other tasks may wait for `done`. After that the token has a
    `value` or an `error`. It has neither if the token request was cancelled, or was refused because
    of its number of scopes. In this case each waiting task must request a token again.
    """

    def __init__(self, scopes: Scopes, covers_more: bool, requested_at: float) -> None:
        self.scopes = scopes
        # Whether `scopes` contains more than the scopes of the request that needed the token.
        self.covers_more = covers_more
        self.requested_at = requested_at  # seconds of the event loop's clock

        self.done = anyio.Event()  # set when the token request has ended
        self.value = ""  # the token itself, a secret
        self.is_dropped = False  # whether the cache has dropped the token
        self.error: SyncError | None = None  # the failure of the token request

        # Seconds of the event loop's clock. None if the token's lifetime is unknown.
        self.renew_at: float | None = None
        self.accepted_for: set[Use] = (
            set()
        )  # the uses for which the registry has accepted the token


class TokenCache:
    """The bearer tokens of one registry, issued and pending."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now  # the event loop's clock, in seconds
        # Issued tokens, by their set of (repository, actions).
        self._tokens: dict[frozenset[Scope], Token] = {}
        self._by_value: dict[str, Token] = {}  # the same tokens, by their values
        # Tokens that were dropped recently. A late answer may refer to a dropped token.
        self._dropped = deque[Token](maxlen=_MOST_DROPPED)
        self.pending: list[Token] = []  # tokens whose request to the token service has not ended

        # Whether a request may only carry a token whose scopes are exactly the scopes that the
        # request needs. Set if the registry has refused a token that covers more.
        self.needs_exact_scopes = False
        # The scope that the registry uses for every repository (ECR Public: `aws`). Usually empty.
        self.scope_for_all = ""

    def token_in(self, authorization: str | None) -> Token | None:
        """Return the token that an Authorization header contains, even if it was dropped recently.

        Returns None if the header contains no token of this registry.
        """
        value = (authorization or "").removeprefix("Bearer ")
        token = self._by_value.get(value)
        if token is not None:
            return token
        return next((token for token in self._dropped if token.value == value), None)

    def is_live(self, token: Token, can_repeat: bool) -> bool:
        """Report whether a token will remain valid long enough to send a request with it.

        `can_repeat` tells whether the request can be sent again after a 401.
        """
        if token.renew_at is not None:
            return self._now() < token.renew_at
        # The token's lifetime is unknown.
        return can_repeat or self._now() - token.requested_at < _LARGEST_UNCERTAIN_AGE

    def is_sufficient(self, token: Token, needed: Scopes) -> bool:
        """Report whether a token's scopes allow a request that needs the scopes `needed`."""
        if self.needs_exact_scopes:
            return token.scopes == needed
        if self.scope_for_all:
            return True
        return all(
            _actions_in(actions) <= _actions_in(token.scopes.get(repository, ""))
            for repository, actions in needed.items()
        )

    def find(self, needed: Scopes, can_repeat: bool) -> Token | None:
        """Return the newest live token whose scopes allow a request.

        If no issued token is suitable, returns a pending token, for which the caller must wait.
        Returns None if a new token must be requested. `can_repeat` is the same as for `is_live`.
        """
        if self.needs_exact_scopes:
            # At most one token is suitable. There may be thousands of tokens, so look it up.
            exact = self._tokens.get(frozenset(needed.items()))
            issued = [exact] if exact else []
        else:
            issued = [*self._tokens.values()]
        for tokens in (issued, self.pending):
            suitable = [
                token
                for token in tokens
                if self.is_sufficient(token, needed) and self.is_live(token, can_repeat)
            ]
            if suitable:
                return max(suitable, key=lambda token: token.requested_at)
        return None

    def covered_scopes(self, can_repeat: bool) -> set[Scope]:
        """Return the scopes of all live tokens, issued and pending."""
        tokens = [*self._tokens.values(), *self.pending]
        return {
            scope
            for token in tokens
            if self.is_live(token, can_repeat)
            for scope in token.scopes.items()
        }

    def add(self, new_token: Token) -> None:
        """Add an issued token. Drop the old token with the same scopes, and all expired tokens."""
        key = frozenset(new_token.scopes.items())
        # Without this, expired tokens would accumulate in a run of many days.
        outdated = [
            old_key
            for old_key, token in self._tokens.items()
            if old_key == key or not self.is_live(token, can_repeat=True)
        ]
        forget_secret(*(self._remove(old_key).value for old_key in outdated))
        self._tokens[key] = new_token
        self._by_value[new_token.value] = new_token

    def drop(self, refused: Token, needed: Scopes) -> list[str]:
        """Drop a refused token, and the tokens that would be refused for the same request.

        `needed` are the scopes of the refused request. Returns the values of all dropped tokens.
        """

        def would_be_refused(token: Token) -> bool:
            # The token service may have issued the same value for other scopes, too.
            if token.value == refused.value:
                return True
            # A token that was issued before the refused token has probably ended too.
            return token.requested_at <= refused.requested_at and self.is_sufficient(token, needed)

        keys = [key for key, token in self._tokens.items() if would_be_refused(token)]
        return [self._remove(key).value for key in keys]

    def _remove(self, key: frozenset[Scope]) -> Token:
        """Move a token from the cache to the dropped tokens, and return the token."""
        token = self._tokens.pop(key)
        token.is_dropped = True
        if self._by_value.get(token.value) is token:  # otherwise a newer token has the same value
            del self._by_value[token.value]
        self._dropped.append(token)
        return token


def _actions_in(text: str) -> set[str]:
    return set(text.split(","))


def union_of(first: str, second: str) -> str:
    """Combine two lists of actions: `push` and `pull` become `pull,push`.

    The actions are sorted, because registries compare the text (docs/protocol-facts.md section
    2.2).
    """
    return ",".join(sorted(_actions_in(first) | _actions_in(second)))
