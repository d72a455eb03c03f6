"""Every error that a user can see, and the one way to make foreign text safe to print. Owns: the
exception tree, the codes of docs/design.md section 2, `Side`. May not know: any other module, so
that all import it. Invariant: a message never holds a credential, a signed URL or a whole body;
text from a registry passes `clean` first. Follows docs/protocol-facts.md section 9.2, R10 and R18.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from _regsync.text import without_logins


class Side(enum.Enum):
    SOURCE = "source"
    TARGET = "target"


class Problem(NamedTuple):
    """One thing wrong with a configuration: a place (1-based; 0 when unknown), a key path, the
    trouble.
    """

    file: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class RegsyncError(Exception):
    """Base of all errors that are told to the user as one line; `exit_status`: of a command that it
    ends.
    """

    code = "INTERNAL_ERROR"
    exit_status = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def shed(self) -> None:
        """Let go of frames and causes before it is kept: they hold whole bodies, and a source can
        make many errors.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None


class ConfigError(RegsyncError):
    """The configuration, the command line or a file that they name is unusable: nothing was
    attempted.
    """

    code = "CONFIG_ERROR"
    exit_status = 3

    def __init__(
        self, message: str, *, problems: tuple[Problem, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(without_logins(message), hint=hint)
        self.problems = problems


class SyncError(RegsyncError):
    """Something failed at a registry, raised bare, then `located`; `retryable`: the same exchange
    may succeed again.
    """

    retryable = False
    side: Side | None = None
    operation: str | None = None
    reference: str | None = None
    retries = 0

    def located(self, side: Side | None, operation: str, reference: str) -> SyncError:
        """Fill in what is not known yet, and return the same error."""
        self.side = self.side or side
        self.operation = self.operation or operation
        self.reference = self.reference or reference
        return self

    def again(self) -> SyncError:
        """Return a copy for another asker, which adds its own side and reference."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__, side=None, operation=None, reference=None, retries=0)
        return twin

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.operation, self.reference)))
        often = f" (tried {self.retries + 1} times)" if self.retries else ""
        return (f"{place}: {self.message}" if place else self.message) + often


class WireError(SyncError):
    """The network or the peer's HTTP failed; `code` is NETWORK_ERROR."""

    code = "NETWORK_ERROR"
    retryable = True


class ConnectFailed(WireError):
    """No connection to the host could be made: name, address, TLS or proxy."""


class TimedOut(WireError):
    """The peer did not answer, or did not move, in the time that the policy allows."""


class Disconnected(WireError):
    """The connection ended in the middle of an exchange."""


class LoginExpired(SyncError):
    """A body was refused for its login, and there is a new one: what was sent begins again."""

    code = "AUTH_ERROR"
    retryable = True


class ProtocolBroken(WireError):
    """The peer's bytes are not the HTTP that was agreed on; asking again would give the same."""

    retryable = False


class AuthError(SyncError):
    """Credentials are missing, refused, or must not be sent; `fatal`: the whole registry is beyond
    use.
    """

    code = "AUTH_ERROR"
    exit_status = 4

    def __init__(
        self, message: str, *, hint: str | None = None, fatal: bool = False, code: str = code
    ) -> None:
        super().__init__(message, hint=hint)
        # another code where a login service could not be asked
        self.fatal = fatal
        self.code = code


_REMEDIES = {
    (404, Side.SOURCE): "check the name{tags}",
    (404, Side.TARGET): "create the repository, or the project that it is in, there first{command}",
    (
        405,
        Side.TARGET,
    ): "is it read-only, or a pull-through cache? name the registry that takes pushes",
    (
        413,
        Side.TARGET,
    ): "the registry or a proxy before it limits requests (nginx: client_max_body_size)",
}


class RegistryError(SyncError):
    """A registry answered with an error status; `codes` and `digests` are its body's, `retry_after`
    is seconds.
    """

    paced = final = False  # the next attempt waits in front of its window; there is none

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
        self.codes = codes
        self.digests = digests
        self.retry_after = retry_after

    def located(self, side: Side | None, operation: str, reference: str) -> SyncError:
        super().located(side, operation, reference)
        tagged, by_digest, _ = (self.reference or "").partition("@")
        host, name, tag = re.findall("([^/]*)/?([^:]*):?(.*)", tagged)[0]
        ecr = re.match(r"([0-9]{12})\.dkr[.-]ecr(?:-fips)?\.([a-z0-9-]+)\.", host)
        place = f" --registry-id {ecr[1]} --region {ecr[2]}" if ecr else ""
        command = f": aws ecr create-repository --repository-name {name}{place}" if ecr else ""
        tags = (
            f": `regsync tags {host}/{name}` shows what is there" if tag else " of the repository"
        )
        # What an image names and its own registry lacks is missing for another reason than its
        # name.
        named = not (by_digest and self.side is Side.SOURCE) and not any(
            "BLOB" in code for code in self.codes
        )
        if (
            self.hint is None
            and self.side
            and named
            and (remedy := _REMEDIES.get((self.status, self.side)))
        ):
            self.hint = remedy.format(tags=tags, command=command)
        return self

    @property
    def code(self) -> str:  # type: ignore[override]
        end = "TARGET_ERROR" if self.side is Side.TARGET else "SOURCE_ERROR"
        return "AUTH_ERROR" if self.status in (401, 403) else end

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        # docs/design.md section 9: 408, 429 and 5xx; 501 and 505 say that asking again is
        # pointless. A session that was forgotten before its body came is opened anew.
        again = self.status in (408, 429) or (self.status >= 500 and self.status not in (501, 505))
        return not self.final and (again or self.forgot_session)

    @property
    def forgot_session(self) -> bool:
        return self.status == 404 and "BLOB_UPLOAD_UNKNOWN" in self.codes


class MappingConflict(SyncError):
    """Two mappings want one target tag from different sources; the later one loses."""

    code = "TARGET_ERROR"


class ContentError(SyncError):
    """Bytes are not what their digest, size or media type says, or a document that cannot be
    copied.
    """

    code = "CONTENT_ERROR"
