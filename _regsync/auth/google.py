"""Login to Google Artifact Registry with Application Default Credentials.

Owns: the search for an identity, the types of credential files, the token request of each type.
May not know: sockets, challenges.
Invariants: if a configured source is broken, no other source is used instead. Secrets are only sent
by https, to this machine, or to the metadata server. They appear in no message.
Follows: docs/protocol-facts.md sections 5.2 to 5.4.
"""

from __future__ import annotations

import json
import math
import os
import re
from base64 import urlsafe_b64encode
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import anyio

from _regsync.auth.cloud import Answer, CloudEnvironment, Login
from _regsync.auth.credentials import Credential, Pair
from _regsync.config import Registry
from _regsync.errors import AuthError, WireError
from _regsync.text import json_object, mask_unless_word, one_line, printable, redact, redacting

_FILE_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_METADATA_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
_METADATA_ADDRESS = "169.254.169.254"

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_URN = "urn:ietf:params:oauth:"
_TOKENS_URL = "https://oauth2.googleapis.com/token"

# The field of a credential file with the URL that issues tokens of a service account to
# impersonate.
_IMPERSONATION = "service_account_impersonation_url"

_LOGIN_HINT = "run `gcloud auth application-default login`"
_ATTACH_HINT = "attach a service account to this machine"
_GRANT_HINT = (
    "grant roles/iam.serviceAccountTokenCreator (to a workload: roles/iam.workloadIdentityUser) "
    "on that account"
)

_LIFE = 3600  # the lifetime of the tokens to request, in seconds
_PAUSES = (1.0, 2.0)  # seconds before the second and third attempt

# Seconds. Timeouts for the metadata server, for all attempts but the last, and for the last. The
# last timeout is short because it is also used for a probe, when there may be no metadata server.
_METADATA_SECONDS = 3.0
_LAST_METADATA_SECONDS = 1.0

# Statuses below 500 after which the same request may succeed. Metadata servers may refuse requests
# shortly after a pod's start (section 5.4).
_TEMPORARY_STATUSES_OF_METADATA = (403, 404, 429)

# URLs that secrets may be sent to and read from. http is only allowed for this machine and for
# metadata services, which do not support https.
_SAFE_URL = r"(https://[^/?#@\s]+|http://(localhost|127\.[0-9.]+|\[::1\]|169\.254\.[0-9.]+)(:[0-9]+)?)([/?]\S*)?"


class _Grant(NamedTuple):
    """How to request a token for one type of credential file."""

    url_field: str  # the field of the file with the URL of the token service
    default_url: str  # if the file does not have this field
    grant_type: str
    form_fields: tuple[str, ...]  # fields of the file that are copied into the form
    is_client_in_header: bool  # whether the fields `client_id` and `client_secret` are sent there
    hint: str  # for the error if the token service refuses the request


# By the `type` of a credential file (section 5.3).
_GRANTS = {
    "authorized_user": _Grant(
        url_field="token_uri",
        default_url=_TOKENS_URL,
        grant_type="refresh_token",
        form_fields=("refresh_token", "client_id", "client_secret"),
        is_client_in_header=False,
        hint=_LOGIN_HINT,
    ),
    "external_account_authorized_user": _Grant(
        url_field="token_url",
        default_url="",
        grant_type="refresh_token",
        form_fields=("refresh_token",),
        is_client_in_header=True,
        hint=_LOGIN_HINT,
    ),
    "service_account": _Grant(
        url_field="token_uri",
        default_url=_TOKENS_URL,
        grant_type=f"{_URN}grant-type:jwt-bearer",  # RFC 7523
        form_fields=(),
        is_client_in_header=False,
        hint="check the key, and the clock of this machine",
    ),
    "external_account": _Grant(
        url_field="token_url",
        default_url="https://sts.googleapis.com/v1/token",
        grant_type=f"{_URN}grant-type:token-exchange",  # RFC 8693
        form_fields=("audience", "subject_token_type"),
        is_client_in_header=True,
        hint="check issuer, audiences and conditions of the pool's provider",
    ),
}


def is_configured(machine: CloudEnvironment) -> bool:
    """Report whether an environment variable or a file provides a Google identity."""
    if any(machine.environ.get(name) for name in (_FILE_VARIABLE, *_METADATA_VARIABLES)):
        return True
    path = _well_known_file(machine)
    return bool(path) and machine.read(path) is not None


def _well_known_file(machine: CloudEnvironment) -> str:
    """Return the path of gcloud's credential file. Returns "" if there is no home directory."""
    folder = machine.environ.get("CLOUDSDK_CONFIG")
    if not folder and os.name == "nt":
        folder = _path_below(machine.environ.get("APPDATA"), "gcloud")
    elif not folder:
        folder = _path_below(machine.home, ".config/gcloud")
    return _path_below(folder, "application_default_credentials.json")


def _path_below(folder: str | None, name: str) -> str:
    return os.path.join(folder, name) if folder else ""


async def log_in(
    machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
) -> Login | None:
    """Request an access token for the first identity that is available on this machine.

    Raises AuthError if there is no identity. If `probing_metadata` is true, only the metadata
    server is used, and the function returns None if it issues no token.
    """
    if probing_metadata:
        try:
            return await _log_in_by_metadata(machine, pauses=())
        except AuthError:
            return None

    credential_file = _find_credential_file(machine)
    if credential_file is not None:
        return await credential_file.log_in()
    try:
        return await _log_in_by_metadata(machine, pauses=_PAUSES)
    except AuthError as error:
        path = _well_known_file(machine) or "no home directory"
        places = f"the environment variable {_FILE_VARIABLE}, {path}, {error}"
        raise AuthError(
            f"registry {registry.alias!r}: no Google identity for {registry.authority}; looked at {places}",
            hint=f"{_LOGIN_HINT}, name a key file in {_FILE_VARIABLE}, or {_ATTACH_HINT}; "
            "for public images use auth_type: anonymous",
            fatal=True,
        ) from error


def _find_credential_file(machine: CloudEnvironment) -> _CredentialFile | None:
    """Read the credential file: the path in GOOGLE_APPLICATION_CREDENTIALS, or gcloud's own file.

    Returns None if the variable is not set and gcloud's file does not exist. Raises AuthError if
    the variable is set and its file does not exist.
    """
    configured_path = machine.environ.get(_FILE_VARIABLE)
    path = configured_path or _well_known_file(machine)
    text = machine.read(path) if path else None
    source = _Source(machine, f"{path} ({_FILE_VARIABLE})" if configured_path else path)
    if text is not None:
        return _CredentialFile(source, json_object(text) or {})
    if configured_path:
        raise source.error("the file does not exist", f"correct or unset {_FILE_VARIABLE}")
    return None


async def _log_in_by_metadata(machine: CloudEnvironment, *, pauses: tuple[float, ...]) -> Login:
    """Request a token for this machine's service account from the metadata server.

    A request that fails temporarily is repeated after each of the `pauses`. Raises AuthError if the
    server issues no token.
    """
    addresses = (machine.environ.get(name) for name in _METADATA_VARIABLES)
    host = one_line(next(filter(None, addresses), _METADATA_ADDRESS), 100)
    server = _Source(machine, f"the metadata server {host}")
    if machine.environ.get("NO_GCE_CHECK") == "true":
        raise server.error("not asked because of NO_GCE_CHECK")

    account = f"http://{host}/computeMetadata/v1/instance/service-accounts/default"
    url = f"{account}/token?scopes={quote(_SCOPE, safe='')}"
    answer = await server.fetch("GET", url, [("Metadata-Flavor", "Google")], pauses=pauses)
    # Outside of Google's cloud, another server may have this address.
    if answer.headers.get("metadata-flavor") != "Google":
        raise server.error("the answer is not Google's")
    return server.read_token(answer, _ATTACH_HINT)


class _Source(NamedTuple):
    """A source of tokens that errors can name: a credential file, an object in it, or a service."""

    machine: CloudEnvironment
    name: str  # for messages

    def error(self, text: str, hint: str | None = None, code: str = AuthError.code) -> AuthError:
        """Build an error that names this source."""
        return AuthError(f"{self.name}: {text}", hint=hint, fatal=True, code=code)

    async def fetch(
        self,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes = b"",
        *,
        secrets: tuple[str, ...] = (),
        pauses: tuple[float, ...] = _PAUSES,
    ) -> Answer:
        """Send a request, and return the answer. Its status may be an error.

        If the connection fails or the status is temporary, the request is repeated after each of
        the `pauses`, in seconds. Raises AuthError if the last attempt has no answer. `secrets` are
        the secrets in the request; they are masked in messages.
        """
        is_metadata = not url.startswith("https:")  # only metadata servers use plain http
        temporary_statuses = _TEMPORARY_STATUSES_OF_METADATA if is_metadata else (429,)
        pauses_left = [*pauses]
        while True:
            is_last = not pauses_left
            timeout = None  # only the timeouts of the connection apply
            if is_metadata:
                timeout = _LAST_METADATA_SECONDS if is_last else _METADATA_SECONDS
            try:
                with redacting(lambda: secrets):
                    answer = await self.machine.fetch(method, url, headers, body, timeout)
            except WireError as error:
                if is_last:
                    raise self.error(error.message, error.hint, error.code) from error
            else:
                is_temporary = answer.status >= 500 or answer.status in temporary_statuses
                if is_last or not is_temporary:
                    return answer
            await anyio.sleep(pauses_left.pop(0))

    def read_token(
        self,
        answer: Answer,
        hint: str,
        *,
        secrets: tuple[str, ...] = (),
        requested_life: object = None,
    ) -> Login:
        """Return a registry login with the access token in an answer.

        Raises AuthError with `hint` if the answer contains no token. `requested_life` is the
        token's lifetime in seconds if the answer has no `expires_in`. It comes from a file, and may
        not be a number. `secrets` are the secrets of the request. They are masked in the error,
        because the answer may repeat them.
        """
        document = json_object(answer.body) or {}
        token = document.get("access_token") or document.get("accessToken")
        if answer.status == 200 and isinstance(token, str) and re.fullmatch("[!-~]+", token):
            # Some services send the lifetime as a string.
            lifetime = str(document.get("expires_in", requested_life))
            is_number = re.fullmatch("[0-9]{1,9}", lifetime) is not None
            expires = self.machine.wall() + float(lifetime) if is_number else math.inf
            credential = Credential(
                username="oauth2accesstoken", password=token, found_at=self.name
            )
            return Login(credential, expires)

        reason = ""
        if answer.status != 200:  # the body of a 200 may contain a token in an unknown field
            all_secrets = (*secrets, str(token or ""))
            reason = printable(redact(answer.body.decode("utf-8", "replace"), all_secrets), 200)
        code = WireError.code if answer.status >= 500 else AuthError.code
        raise self.error(f"status {answer.status}, no token {reason}", hint, code)


class _CredentialFile(NamedTuple):
    """The fields of a credential file, or of an object inside a credential file."""

    source: _Source  # names the file or object in errors
    fields: dict[str, object]

    def __repr__(self) -> str:
        return "<CredentialFile>"  # the fields are secret

    def text(self, name: str, default: str = "") -> str:
        """Return a text field, or `default` if the field is missing or empty.

        Raises AuthError if both are empty, or if the field is not a text.
        """
        value = self.fields.get(name) or default
        if isinstance(value, str) and value:
            return value
        raise self.source.error(f"{name} is not a text" if value else f"{name} is missing")

    def safe_url(self, name: str, default: str = "") -> str:
        """Return a field with a URL to which secrets may be sent. Raises AuthError for another URL."""
        url = self.text(name, default)
        if re.fullmatch(_SAFE_URL, url):
            return url
        raise self.source.error(f"{name} is not an https URL")

    def google_url(self, name: str, default: str = "") -> str:
        """Return a field with a URL that secrets are sent to.

        Raises AuthError unless the URL's host belongs to Google, to the file's `universe_domain`,
        or to this machine (section 5.3).
        """
        url = self.safe_url(name, default)
        host = re.split("[/?:]+", url)[1].lower()  # the part after the scheme
        universe = str(self.fields.get("universe_domain") or "googleapis.com")
        is_google = f".{host}".endswith((".googleapis.com", f".{universe}"))
        is_this_machine = url.startswith("http:")  # see `_SAFE_URL`
        if is_google or is_this_machine:
            return url
        raise self.source.error(f"{name} names {printable(host, 100)}, which is not Google's")

    def part(self, name: str) -> _CredentialFile:
        """Return the object in a field. Its fields are empty if the object is missing."""
        value = self.fields.get(name)
        fields = value if isinstance(value, dict) else {}
        return _CredentialFile(self.source._replace(name=f"{self.source.name}, {name}"), fields)

    def _service_at(self, url: str) -> _Source:
        """Return the service at a URL. Its errors name this file, the file's type and the host."""
        file_type = self.fields["type"]
        host = urlsplit(url).netloc
        return self.source._replace(name=f"{self.source.name}, {file_type} at {host}")

    # Types of credential files.

    async def log_in(self) -> Login:
        """Request an access token with this credential file.

        Raises AuthError if there is no token.
        """
        file_type = str(self.fields.get("type"))
        if file_type == "impersonated_service_account":
            # The file contains the credential file of another identity, which may impersonate the
            # service account.
            source_login = await self.part("source_credentials").log_in()
            return await self._impersonate(source_login.credential.password)

        if file_type not in _GRANTS:
            known = ", ".join(_GRANTS)
            raise self.source.error(
                f"type {mask_unless_word(file_type)!r} is not one of {known}, impersonated_service_account"
            )
        login = await self._request_token(file_type)
        if _IMPERSONATION in self.fields:
            return await self._impersonate(login.credential.password)
        return login

    async def _request_token(self, file_type: str) -> Login:
        """Request an access token from the token service for this `file_type`.

        Raises AuthError if a field of the file is missing, or if the service issues no token.
        """
        grant = _GRANTS[file_type]
        form = await self._token_form(file_type)
        url = self.google_url(grant.url_field, grant.default_url)

        headers = [("Content-Type", "application/x-www-form-urlencoded")]
        client = Credential(  # of the OAuth2 application; empty if the file names none
            username=str(self.fields.get("client_id") or ""),
            password=str(self.fields.get("client_secret") or ""),
        )
        if client.basic and grant.is_client_in_header:
            headers.append(("Authorization", client.basic))
        proof_fields = ("assertion", "refresh_token", "subject_token")
        proofs = [form.get(name, "") for name in proof_fields]
        secrets = (*client.secrets, *proofs)
        body = urlencode(form, errors="surrogatepass").encode()
        service = self._service_at(url)
        answer = await service.fetch("POST", url, headers, body, secrets=secrets)
        return service.read_token(answer, grant.hint, secrets=secrets)

    async def _token_form(self, file_type: str) -> dict[str, str]:
        """Build the form of a token request, including the proof of identity (section 5.3).

        The subject token of an external account is read from a file or requested from a service.
        Raises AuthError if a field or the subject token is missing.
        """
        grant = _GRANTS[file_type]
        form = {"grant_type": grant.grant_type}
        form |= {name: self.text(name) for name in grant.form_fields}
        if file_type == "service_account":
            form["assertion"] = self._assertion()
        if file_type == "external_account":
            # A workforce pool needs the project that is billed for the request, unless the request
            # has a client.
            project = self.fields.get("workforce_pool_user_project")
            has_client = bool(self.fields.get("client_id"))
            if project and not has_client:
                form["options"] = quote(json.dumps({"userProject": project}))
            form["scope"] = _SCOPE
            form["requested_token_type"] = f"{_URN}token-type:access_token"
            form["subject_token"] = await self.part("credential_source").subject_token()
        return form

    async def _impersonate(self, token: str) -> Login:
        """Request an access token of the service account in this file.

        `token` is the access token of an identity that may impersonate the service account.
        """
        options = self.part("service_account_impersonation").fields
        life = options.get("token_lifetime_seconds") or _LIFE
        request = {
            "delegates": self.fields.get("delegates") or [],
            "scope": [_SCOPE],
            "lifetime": f"{life}s",
        }
        url = self.google_url(_IMPERSONATION)
        headers = [("Content-Type", "application/json"), ("Authorization", f"Bearer {token}")]
        secrets = (token, str(self.fields.get("client_secret") or ""))
        service = self._service_at(url)
        body = json.dumps(request).encode()
        answer = await service.fetch("POST", url, headers, body, secrets=secrets)
        return service.read_token(answer, _GRANT_HINT, secrets=secrets, requested_life=life)

    def _assertion(self) -> str:
        """Build a JWT signed with the service account's key.

        Raises AuthError if the key is unusable.
        """
        from _regsync.crypto import sign_rs256

        now = int(self.source.machine.wall())
        header = {"typ": "JWT", "alg": "RS256", "kid": self.text("private_key_id")}
        claims = {
            "iat": now,
            "exp": now + _LIFE,
            "iss": self.text("client_email"),
            "aud": _TOKENS_URL,
            "scope": _SCOPE,
        }
        signed = f"{_base64url(json.dumps(header))}.{_base64url(json.dumps(claims))}"
        try:
            signature = sign_rs256(self.text("private_key"), signed.encode())
        except ValueError as error:
            raise self.source.error(f"private_key {error}") from error
        return f"{signed}.{_base64url(signature)}"

    async def subject_token(self) -> str:
        """Return the token of another identity provider.

        This object must be a `credential_source`, which names the file or the URL with the token
        (section 5.3). The content is the token itself or a JSON object. Raises AuthError if there
        is no token.
        """
        content = await self._source_content()
        content_format = self.part("format")
        if content_format.fields.get("type") == "json":
            token_field = content_format.text("subject_token_field_name")
            return _CredentialFile(self.source, json_object(content) or {}).text(token_field)

        token = content.decode("utf-8", "replace").strip()
        if not token:
            raise self.source.error("token is missing")
        return token

    async def _source_content(self) -> bytes:
        """Read the file or the URL of a `credential_source`.

        Returns b"" if the file does not exist, or if the URL answers with an error status. Raises
        AuthError if there is neither a file nor a URL, or if the URL does not answer.
        """
        if "file" in self.fields:
            return self.source.machine.read(self.text("file")) or b""

        # `environment_id` marks an AWS source, whose `url` returns AWS keys instead of a token.
        is_aws = "environment_id" in self.fields
        if "url" in self.fields and not is_aws:
            url = self.safe_url("url")
            headers = [(name, str(value)) for name, value in self.part("headers").fields.items()]
            secrets = tuple(value for _, value in headers)
            answer = await self.source.fetch("GET", url, headers, secrets=secrets)
            return answer.body if answer.status == 200 else b""

        field_names = ", ".join(self.fields) or "nothing"
        raise self.source.error(
            f"a credential_source with {field_names} is not supported: use `file` or `url`"
        )


def _base64url(data: str | bytes) -> str:
    if isinstance(data, str):
        data = data.encode()
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
