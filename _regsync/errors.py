"""The exceptions that are reported to the user, with their codes, exit statuses and hints.

Invariants: a message never contains a credential, a signed URL or a whole body. Text from a
registry has been made printable by `text.printable`.
Follows: docs/protocol-facts.md section 9.2, R10 and R18.
"""

from __future__ import annotations

import enum
import re
from typing import Any, NamedTuple

from _regsync.text import strip_userinfo

# Matches the beginning of an ECR registry's host name.
_ECR_HOST = r"(?P<account>[0-9]{12})\.dkr[.-]ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\."

# Error statuses below 500 after which the same request may succeed (docs/design.md section 9).
_TEMPORARY_STATUSES = (408, 429)

# Error statuses above 500 after which the same request will fail again.
_LASTING_SERVER_ERRORS = (501, 505)


class Side(enum.Enum):
    SOURCE = "source"
    TARGET = "target"


class Problem(NamedTuple):
    """One error in a configuration file."""

    file: str
    line: int  # from 1; 0 if unknown
    column: int  # from 1
    path: str  # the keys that lead to the value; "" for the whole document
    message: str

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return ": ".join(filter(None, (location, self.path, self.message)))


class RegsyncError(Exception):
    """Base class of all errors that are reported to the user as one line."""

    code = "INTERNAL_ERROR"  # the kind of error in reports
    exit_status = 2  # of a command that ends with this error

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint  # what the user can do about the error; None if unknown

    def drop_frames(self) -> None:
        """Delete the traceback and the causes of an error that is stored.

        Their stack frames reference whole bodies, and a run may store many errors.
        """
        self.__traceback__ = None
        self.__cause__ = None
        self.__context__ = None


class ConfigError(RegsyncError):
    """The configuration, the command line or a file that they refer to is unusable.

    It is raised before any request is sent.
    """

    code = "CONFIG_ERROR"
    exit_status = 3

    def __init__(
        self, message: str, *, problems: tuple[Problem, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(strip_userinfo(message), hint=hint)
        self.problems = problems  # the errors in the configuration file, if there are any


class SyncError(RegsyncError):
    """An operation at a registry failed.

    Most errors are raised without their context: side, operation and reference. A caller adds it by
    `add_context`.
    """

    retryable = False  # whether the same request may succeed if it is repeated
    side: Side | None = None
    operation: str | None = None  # for the message, such as "push manifest"
    reference: str | None = None  # the operand: HOST/REPOSITORY[:TAG][@DIGEST]
    retries = 0  # attempts after the first

    # The host (`registry.limits.HostLimits`) that was away when the request failed, or takes no more of
    # its kind, if that is the reason.
    away: Any = None
    # Whether the next attempt enters no lane of that host, which would make it wait: a token is asked
    # for, or a registry has led there.
    enters_no_lane = False

    @property
    def code(self) -> str:  # type: ignore[override]
        return "TARGET_ERROR" if self.side is Side.TARGET else "SOURCE_ERROR"

    def add_context(self, side: Side | None, operation: str, reference: str) -> SyncError:
        """Set side, operation and reference unless they are set already. Return the same error.

        `reference` is the operand of `operation`: `HOST/REPOSITORY[:TAG][@DIGEST]`.
        """
        self.side = self.side or side
        self.operation = self.operation or operation
        self.reference = self.reference or reference
        return self

    def copy_without_context(self) -> SyncError:
        """Return a copy without side, operation and reference.

        One failed login may fail requests of many images. Each needs a copy with its own context.
        """
        # `__init__` is not called, because the subclasses have different parameters.
        clone = type(self).__new__(type(self), *self.args)
        clone.__dict__.update(self.__dict__, side=None, operation=None, reference=None, retries=0)
        return clone

    def __str__(self) -> str:
        context = " ".join(filter(None, (self.operation, self.reference)))
        text = f"{context}: {self.message}" if context else self.message
        return f"{text} (tried {self.retries + 1} times)" if self.retries else text


class adding_context:
    """A context that adds these (`SyncError.add_context`) to each SyncError raised in it."""

    # A class, because a generator takes five times its CPU, and each request has such a context.
    def __init__(self, side: Side, operation: str, reference: str) -> None:
        self._context = side, operation, reference

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if isinstance(error, SyncError):
            error.add_context(*self._context)


class WireError(SyncError):
    """The connection to a peer failed, or the peer broke the HTTP protocol."""

    code = "NETWORK_ERROR"
    retryable = True


class ConnectFailed(WireError):
    """No connection could be established: name resolution, TCP, TLS or the proxy failed."""

    is_unknown_name = False  # whether the name servers report that the host name does not exist


class TimedOut(WireError):
    """The peer did not answer, or sent or accepted no bytes, within the time-out."""


class Disconnected(WireError):
    """The connection ended in the middle of a request or an answer."""


class LoginExpired(SyncError):
    """A login was refused, and the whole operation must start again with a new login.

    Either the registry refused a request with a body, which cannot be repeated, or it refused the
    same login to another request while this request was waiting.
    """

    code = "AUTH_ERROR"
    retryable = True


class ProtocolBroken(WireError):
    """The peer's bytes violate the HTTP protocol. The same request would fail again."""

    retryable = False


class AuthError(SyncError):
    """Credentials are missing, refused, or must not be sent."""

    code = "AUTH_ERROR"
    exit_status = 4

    def __init__(
        self, message: str, *, hint: str | None = None, fatal: bool = False, code: str = code
    ) -> None:
        super().__init__(message, hint=hint)
        self.fatal = fatal  # whether every request to this registry would fail
        self.code = code  # NETWORK_ERROR if a login service could not be reached


class RegistryError(SyncError):
    """A registry answered with an error status."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        codes: tuple[str, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.codes = codes  # the error codes in the body
        self.retry_after = retry_after  # seconds

        # Whether the upload session has ended, so that the blob can be uploaded in a new session.
        # `upload` also sets it if a registry reports this in another way.
        self.is_session_gone = status == 404 and "BLOB_UPLOAD_UNKNOWN" in codes
        is_failure_of_server = status >= 500 and status not in _LASTING_SERVER_ERRORS
        # Whether it says nothing of what was asked for, also where it is final: the registry may ask
        # for a longer wait than a run makes, or was waited for long enough.
        self.is_temporary = status in _TEMPORARY_STATUSES or is_failure_of_server
        self.retryable = self.is_temporary or self.is_session_gone

    def add_context(self, side: Side | None, operation: str, reference: str) -> SyncError:
        """Set the context, and a hint for this status. Return the same error.

        An error that has a hint keeps the hint.
        """
        super().add_context(side, operation, reference)
        if self.hint is not None or self.side is None:
            return self
        # The hints are about repositories and manifests.
        is_about_blob = self.is_session_gone or any("BLOB" in code for code in self.codes)
        if not is_about_blob:
            self.hint = _remedy_for_status(self.status, self.side, self.reference or "")
        return self

    @property
    def code(self) -> str:  # type: ignore[override]
        return AuthError.code if self.status in (401, 403) else super().code


class ListingBroken(SyncError):
    """A listing of several pages cannot be read completely. The same request would fail again."""


def _remedy_for_status(status: int, side: Side, reference: str) -> str | None:
    """Return advice for the user on an error status, or None if there is no advice.

    `reference` is `HOST/REPOSITORY[:TAG][@DIGEST]`.
    """
    if status < 400:
        return "check whether a proxy or a login page answers in place of the registry"
    if status == 429:
        return "run again later, or log in with an account that has a higher limit"
    if status >= 500:
        return "see the registry's logs or status page; the next run copies only what is missing"

    name, _, digest = reference.partition("@")
    host, _, path = name.partition("/")
    repository, _, tag = path.partition(":")
    if side is Side.SOURCE:
        # A digest comes from a manifest, so that the user cannot have mistyped it.
        if status != 404 or digest:
            return None
        if tag:
            command = f"`regsync tags {host}/{repository}`, with the same -c FILE if there is one,"
            return f"check the name: {command} lists what is there"
        return "check the name of the repository"

    if status == 404:
        remedy = "create the repository, or the project that it belongs to, at the target first"
        if ecr := re.match(_ECR_HOST, host):
            command = f"aws ecr create-repository --repository-name {repository}"
            remedy += f": {command} --registry-id {ecr['account']} --region {ecr['region']}"
        return remedy
    if status == 405:
        return "name a registry that accepts pushes: this one may be read-only, or a cache"
    if status == 413:
        return (
            "raise the size limit for requests, at the registry or at a proxy in front of it"
            " (nginx: client_max_body_size)"
        )
    return None


class ContentError(SyncError):
    """Content contradicts its digest, size or media type, or cannot be copied unchanged."""

    code = "CONTENT_ERROR"


class WrongBytes(ContentError):
    """Content does not match its digest or size. Another download may return the right bytes."""

    def add_context(self, side: Side | None, operation: str, reference: str) -> SyncError:
        """Set the context, and a hint if the side is the source. Return the same error."""
        super().add_context(side, operation, reference)
        if self.hint is None and self.side is Side.SOURCE:
            self.hint = "check whether a proxy changes what passes it; if none does, push again"
        return self
