"""Every error that a user can see, and what becomes of a command that it ends.

Owns: the exception tree, the codes and exit statuses of docs/design.md section 2, `Side`, the
remedies for error statuses of registries.
May not know: any other module but `text`, so that all can import it.
Invariants: a message never holds a credential, a signed URL or a whole body; text from a registry
has passed `printable` before.
Follows: docs/protocol-facts.md section 9.2, R10 and R18.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from _regsync.text import strip_userinfo

# The host of an ECR repository: account and region.
_ECR_HOST = r"(?P<account>[0-9]{12})\.dkr[.-]ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\."

# Error statuses below 500 after which the same request may succeed (docs/design.md section 9).
_TEMPORARY_STATUSES = (408, 429)

# Error statuses from 500 on after which the same request will not succeed either.
_LASTING_SERVER_ERRORS = (501, 505)


class Side(enum.Enum):
    SOURCE = "source"
    TARGET = "target"


class Problem(NamedTuple):
    """One thing that is wrong with a configuration."""

    file: str
    line: int  # from 1; 0: unknown
    column: int  # from 1
    path: str  # of keys; "" for the whole document
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class RegsyncError(Exception):
    """Base of all errors that are told to the user as one line.

    `code` is what reports call it; `exit_status` that of a command that it ends; `hint` the remedy,
    where one is known.
    """

    code = "INTERNAL_ERROR"
    exit_status = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def drop_frames(self) -> None:
        """Forget traceback and causes, for an error that is kept.

        Their frames hold whole bodies, and a registry can make many errors.
        """
        self.__traceback__ = None
        self.__cause__ = None
        self.__context__ = None


class ConfigError(RegsyncError):
    """The configuration, the command line or a file that they name is unusable.

    Nothing was attempted.
    """

    code = "CONFIG_ERROR"
    exit_status = 3

    def __init__(
        self, message: str, *, problems: tuple[Problem, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(strip_userinfo(message), hint=hint)
        self.problems = problems


class SyncError(RegsyncError):
    """Something failed at a registry.

    Most are raised without side, operation and reference: callers that know the place add it.
    """

    retryable = False  # whether the same exchange may succeed when it is repeated
    side: Side | None = None
    operation: str | None = None
    reference: str | None = None
    retries = 0  # attempts after the first

    # The peer in whose outage the request failed (`registry.recovery` waits for its end).
    unreachable_peer: object | None = None

    def with_place(self, side: Side | None, operation: str, reference: str) -> SyncError:
        """Add the parts of the place that the error does not have yet, and return the same error.

        `reference` is what `operation` was about: `HOST/REPOSITORY[:TAG][@DIGEST]`.
        """
        self.side = self.side or side
        self.operation = self.operation or operation
        self.reference = self.reference or reference
        return self

    def without_place(self) -> SyncError:
        """Return a copy for another caller, who adds a place of its own: one failed login may fail the
        requests of many images.
        """
        # The classes' own `__init__` would want arguments that are attributes by now.
        copy = type(self).__new__(type(self), *self.args)
        copy.__dict__.update(self.__dict__, side=None, operation=None, reference=None, retries=0)
        return copy

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.operation, self.reference)))
        text = f"{place}: {self.message}" if place else self.message
        return f"{text} (tried {self.retries + 1} times)" if self.retries else text


class WireError(SyncError):
    """The network or the peer's HTTP failed; `code` is NETWORK_ERROR."""

    code = "NETWORK_ERROR"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        address: tuple[str, int] | None = None,
        brief: str = "",
    ) -> None:
        """Where the message names a peer, `address` is its host and port, and `brief` the message
        without that name.
        """
        super().__init__(message, hint=hint)
        self.address = address
        self.brief = brief


class ConnectFailed(WireError):
    """No connection to the host could be made: name, address, TLS or proxy."""

    is_unknown_name = False  # whether the name servers say that nobody has that name


class TimedOut(WireError):
    """The peer did not answer, or did not move, in the time that the policy allows."""


class Disconnected(WireError):
    """The connection ended in the middle of an exchange."""


class LoginExpired(SyncError):
    """A login was refused, to a body or to another request while this one waited: the exchange has
    to begin again with another login.
    """

    code = "AUTH_ERROR"
    retryable = True


class ProtocolBroken(WireError):
    """The peer's bytes are not the HTTP that was agreed on; a repetition would give the same."""

    retryable = False


class AuthError(SyncError):
    """Credentials are missing, refused, or must not be sent."""

    code = "AUTH_ERROR"
    exit_status = 4

    def __init__(
        self, message: str, *, hint: str | None = None, fatal: bool = False, code: str = code
    ) -> None:
        super().__init__(message, hint=hint)
        self.fatal = fatal  # no request to this registry can succeed
        self.code = code  # NETWORK_ERROR where a login service could not be reached


class RegistryError(SyncError):
    """A registry answered with an error status."""

    paced = False  # whether the next attempt only waits for its window, without a pause
    final = False  # whether there is no next attempt

    def __init__(
        self,
        message: str,
        *,
        status: int,
        codes: tuple[str, ...] = (),
        digests: frozenset[str] = frozenset(),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.codes = codes  # the error codes in the body
        self.digests = digests  # the digests that the body names
        self.retry_after = retry_after  # seconds

        # Whether the registry does not know the upload session; it may say so in other words.
        self.is_session_gone = status == 404 and "BLOB_UPLOAD_UNKNOWN" in codes

    def with_place(self, side: Side | None, operation: str, reference: str) -> SyncError:
        """Add the place, and the remedy that follows from it; return the same error."""
        super().with_place(side, operation, reference)
        is_about_blob = self.is_session_gone or any("BLOB" in code for code in self.codes)
        if self.hint is None and self.side and not is_about_blob:
            self.hint = _remedy_for_status(self.status, self.side, self.reference or "")
        return self

    @property
    def code(self) -> str:  # type: ignore[override]
        if self.status in (401, 403):
            return "AUTH_ERROR"
        return "TARGET_ERROR" if self.side is Side.TARGET else "SOURCE_ERROR"

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        if self.final:
            return False
        if self.is_session_gone:  # a new session can take the blob
            return True
        if self.status in _LASTING_SERVER_ERRORS:
            return False
        return self.status in _TEMPORARY_STATUSES or self.status >= 500


class ListingBroken(SyncError):
    """A listing of several pages cannot be read to its end; a repetition would give the same."""

    @property
    def code(self) -> str:  # type: ignore[override]
        return "TARGET_ERROR" if self.side is Side.TARGET else "SOURCE_ERROR"


def _remedy_for_status(status: int, side: Side, reference: str) -> str | None:
    """Return what to do about an error status, None where nobody knows.

    `reference` is `HOST/REPOSITORY[:TAG][@DIGEST]`.
    """
    if status == 429:
        return "run again later, or log in with an account that has a higher limit"
    if status >= 500:
        return "see the registry's logs or status page; the next run copies only what is missing"
    if status == 404:
        tagged, _, digest = reference.partition("@")
        host, _, name = tagged.partition("/")
        repository, _, tag = name.partition(":")
        if side is Side.TARGET:
            return _remedy_for_missing_repository(host, repository)
        return _remedy_for_missing_image(host, repository, tag, digest)
    if side is Side.SOURCE:
        return None
    if status == 405:
        return "name a registry that accepts pushes: this one may be read-only, or a cache"
    if status == 413:
        return (
            "raise the size limit for requests, at the registry or at a proxy in front of it"
            " (nginx: client_max_body_size)"
        )
    return None


def _remedy_for_missing_image(host: str, repository: str, tag: str, digest: str) -> str | None:
    if digest:
        return None  # an image has named it, not the user: its name cannot be wrong
    if tag:
        return f"check the name: `regsync tags {host}/{repository}` lists what is there"
    return "check the name of the repository"


def _remedy_for_missing_repository(host: str, repository: str) -> str:
    remedy = "create the repository, or the project that it belongs to, at the target first"
    ecr = re.match(_ECR_HOST, host)
    if ecr is None:
        return remedy
    command = f"aws ecr create-repository --repository-name {repository}"
    return f"{remedy}: {command} --registry-id {ecr['account']} --region {ecr['region']}"


class MappingConflict(SyncError):
    """Two mappings want one target tag from different sources; the later one loses."""

    code = "TARGET_ERROR"


class ContentError(SyncError):
    """Bytes are not what their digest, size or media type says, or cannot be copied unchanged."""

    code = "CONTENT_ERROR"


class WrongBytes(ContentError):
    """Bytes do not match their digest or size; another reading may bring the right ones."""

    def with_place(self, side: Side | None, operation: str, reference: str) -> SyncError:
        """Add the place and, for bytes of a source, the remedy; return the same error."""
        super().with_place(side, operation, reference)
        if self.hint is None and self.side is Side.SOURCE:
            self.hint = "check whether a proxy changes what passes it; if none does, push again"
        return self
