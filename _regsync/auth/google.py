"""Login to Google Artifact Registry and gcr.io with Application Default Credentials.

The sources, in this order: the credential file (the one that a variable names, else gcloud's), the
metadata server. A file that is there and does not work is an error. Secrets are only sent to hosts
of Google, to this machine, or to a metadata server; the sender of a token that another provider
issued may be any https URL. They appear in no message.
Follows: docs/protocol-facts.md sections 5.2 to 5.4.
"""

from __future__ import annotations

import json
import math
import os
import re
from base64 import urlsafe_b64encode
from functools import partial
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from _regsync import edge
from _regsync.auth.cloud import ATTEMPTS, Access, Login, Request, ask, first_found, shown_host
from _regsync.auth.credentials import Credential
from _regsync.config import Registry
from _regsync.errors import AuthError
from _regsync.net.wire import Response
from _regsync.text import json_object, keep_passing_secret, mask_unless_word, one_line, printable

_FILE_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_METADATA_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
_METADATA_ADDRESS = "169.254.169.254"

# Seconds for an answer of the metadata server, and where it is only looked for.
_METADATA_SECONDS = 3.0
_PROBE_SECONDS = 1.0

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_URN = "urn:ietf:params:oauth:"
_TOKENS_URL = "https://oauth2.googleapis.com/token"
_SHORTEST_TOKEN = 8  # characters of a token of another identity provider, at least
_LIFE = 3600  # the lifetime of the tokens to request, in seconds

# The field of a credential file with the URL that issues tokens of a service account to
# impersonate.
_IMPERSONATION = "service_account_impersonation_url"

# URLs that secrets may be sent to and read from. http is only allowed for this machine and for
# metadata services, which do not support https.
_SAFE_URL = r"(https://[^/?#@\s]+|http://(localhost|127\.[0-9.]+|\[::1\]|169\.254\.[0-9.]+)(:[0-9]+)?)([/?]\S*)?"

_LOGIN_HINT = "run `gcloud auth application-default login`"
_ATTACH_HINT = "attach a service account to this machine"
_GRANT_HINT = (
    "grant roles/iam.serviceAccountTokenCreator (to a workload: roles/iam.workloadIdentityUser) "
    "on that account"
)


class _Grant(NamedTuple):
    """How one type of credential file becomes an access token."""

    url_field: str  # the field of the file with the URL of the token service
    default_url: str  # if the file does not have this field
    grant_type: str
    form_fields: tuple[str, ...]  # fields of the file that are copied into the form
    hint: str  # for the error if the token service refuses the request


# By the `type` of a credential file (section 5.4).
_GRANTS = {
    "authorized_user": _Grant(
        url_field="token_uri",
        default_url=_TOKENS_URL,
        grant_type="refresh_token",
        form_fields=("refresh_token", "client_id", "client_secret"),
        hint=_LOGIN_HINT,
    ),
    "external_account_authorized_user": _Grant(
        url_field="token_url",
        default_url="",
        grant_type="refresh_token",
        form_fields=("refresh_token",),
        hint=_LOGIN_HINT,
    ),
    "service_account": _Grant(
        url_field="token_uri",
        default_url=_TOKENS_URL,
        grant_type=f"{_URN}grant-type:jwt-bearer",  # RFC 7523
        form_fields=(),
        hint="check the key, and the clock of this machine",
    ),
    "external_account": _Grant(
        url_field="token_url",
        default_url="https://sts.googleapis.com/v1/token",
        grant_type=f"{_URN}grant-type:token-exchange",  # RFC 8693
        form_fields=("audience", "subject_token_type"),
        hint="check issuer, audiences and conditions of the pool's provider",
    ),
}


def is_configured(access: Access) -> bool:
    """Report whether an environment variable or a file provides a Google identity."""
    if any(map(edge.variable, (_FILE_VARIABLE, *_METADATA_VARIABLES))):
        return True
    path = _well_known_file()
    return bool(path) and access.read(path) is not None


async def log_in(access: Access, registry: Registry, *, probing_metadata: bool) -> Login:
    """Request an access token, which is the password of all of Google's registries.

    Raises AuthError if this machine has no identity. If `probing_metadata` is true, only the
    metadata server is asked.
    """
    by_metadata = partial(_log_in_by_metadata, access, is_probe=probing_metadata)
    return await first_found(
        [by_metadata] if probing_metadata else [partial(_log_in_by_file, access), by_metadata],
        registry,
        missing="Google identity",
        hint=f"{_LOGIN_HINT}, name a key file in {_FILE_VARIABLE}, or {_ATTACH_HINT}; "
        "for public images use auth_type: anonymous",
    )


def _well_known_file() -> str:
    """Return the path of gcloud's credential file. Returns "" if there is no home directory."""
    folder = edge.variable("CLOUDSDK_CONFIG")
    if not folder and os.name == "nt":
        folder = _path_below(edge.variable("APPDATA"), "gcloud")
    elif not folder:
        folder = _path_below(edge.home(), ".config/gcloud")
    return _path_below(folder, "application_default_credentials.json")


def _path_below(folder: str | None, name: str) -> str:
    return os.path.join(folder, name) if folder else ""


async def _log_in_by_file(access: Access) -> Login | str:
    """Log in with the credential file. Returns the places looked at if there is none.

    Raises AuthError if the file that the variable names does not exist, or does not work.
    """
    configured_path = edge.variable(_FILE_VARIABLE)
    path = configured_path or _well_known_file()
    text = access.read(path) if path else None
    if text is None and not configured_path:
        return f"the environment variable {_FILE_VARIABLE}, {path or 'no home directory'}"
    name = f"{path} ({_FILE_VARIABLE})" if configured_path else path
    if text is None:
        hint = f"correct or unset {_FILE_VARIABLE}"
        raise AuthError(f"{name}: the file does not exist", hint=hint, fatal=True)
    return await _CredentialFile(access, name, json_object(text) or {}).log_in()


async def _log_in_by_metadata(access: Access, *, is_probe: bool) -> Login | str:
    """Request a token of this machine's service account from the metadata server.

    Returns the server's name, and why it issues no token, if it issues none. A probe, for which
    there may be no such server, is one short attempt.
    """
    addresses = map(edge.variable, _METADATA_VARIABLES)
    host = one_line(next(filter(None, addresses), _METADATA_ADDRESS), 100)
    source = f"the metadata server {shown_host(host)}"
    if edge.variable("NO_GCE_CHECK") == "true":
        return f"{source}: not asked because of NO_GCE_CHECK"

    def read(answer: Response) -> Login | None:
        # Outside of Google's cloud, another server may have this address.
        if answer.headers.get("metadata-flavor") != "Google":
            raise AuthError(f"{source}: the answer is not Google's")
        return _read_login(answer, edge.current().wall(), source)

    account = f"http://{host}/computeMetadata/v1/instance/service-accounts/default"
    url = f"{account}/token?scopes={quote(_SCOPE, safe='')}"
    seconds = _PROBE_SECONDS if is_probe else _METADATA_SECONDS
    headers = [("Metadata-Flavor", "Google")]
    request = Request("GET", url, headers, source=source, seconds=seconds)
    try:
        return await ask(access, request, read, attempts=1 if is_probe else ATTEMPTS)
    except AuthError as error:
        return error.message


def _read_login(
    answer: Response, now: float, source: str, requested_life: object = None
) -> Login | None:
    """Return the registry login with the access token in an answer, or None if it has none.

    `requested_life` is the token's lifetime in seconds if the answer has no `expires_in`. It comes
    from a file, and may not be a number.
    """
    document = json_object(answer.body) or {}
    token = document.get("access_token") or document.get("accessToken")
    if not isinstance(token, str) or not re.fullmatch("[!-~]+", token):
        return None
    lifetime = str(document.get("expires_in", requested_life))  # some services send a string
    is_number = re.fullmatch("[0-9]{1,9}", lifetime) is not None
    credential = Credential("oauth2accesstoken", token, found_at=source)
    return Login(credential, now + float(lifetime) if is_number else math.inf)


class _CredentialFile(NamedTuple):
    """A credential file, or an object inside one."""

    access: Access
    name: str  # of the file and of the object in it, for messages
    fields: dict[str, object]

    def __repr__(self) -> str:
        return "<CredentialFile>"  # the fields are secret

    # The fields.

    def error(self, text: str) -> AuthError:
        return AuthError(f"{self.name}: {text}", fatal=True)

    def text(self, name: str, default: str = "") -> str:
        """Return a text field, or `default` if the field is missing or empty.

        Raises AuthError if both are empty, or if the field is not a text.
        """
        value = self.fields.get(name) or default
        if isinstance(value, str) and value:
            return value
        raise self.error(f"{name} is not a text" if value else f"{name} is missing")

    def safe_url(self, name: str, default: str = "") -> str:
        """Return a field with a URL to which secrets may be sent. Raises AuthError for another URL."""
        url = self.text(name, default)
        if re.fullmatch(_SAFE_URL, url):
            return url
        raise self.error(f"{name} is not an https URL")

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
        raise self.error(f"{name} names {printable(host, 100)}, which is not Google's")

    def part(self, name: str) -> _CredentialFile:
        """Return the object in a field. Its fields are empty if the object is missing."""
        value = self.fields.get(name)
        fields = value if isinstance(value, dict) else {}
        return _CredentialFile(self.access, f"{self.name}, {name}", fields)

    # The logins.

    async def log_in(self) -> Login:
        """Request an access token with this credential file.

        Raises AuthError if there is no token.
        """
        file_type = str(self.fields.get("type"))
        if file_type == "impersonated_service_account":
            # The file contains the credential file of another identity, which may impersonate the
            # service account.
            login = await self.part("source_credentials").log_in()
        elif file_type in _GRANTS:
            login = await self._request_token(file_type, _GRANTS[file_type])
            if _IMPERSONATION not in self.fields:
                return login
        else:
            known = ", ".join(_GRANTS)
            raise self.error(
                f"type {mask_unless_word(file_type)!r} is not one of {known}, impersonated_service_account"
            )
        return await self._impersonate(login.credential.password)

    async def _request_token(self, file_type: str, grant: _Grant) -> Login:
        """Request an access token from the token service of this type (section 5.4).

        Raises AuthError if a field of the file is missing, or if the service issues no token.
        """
        form = {"grant_type": grant.grant_type}
        form |= {name: self.text(name) for name in grant.form_fields}
        if file_type == "service_account":
            form["assertion"] = self._assertion()
        if file_type == "external_account":
            # A workforce pool needs the project that is billed for the request, unless the request
            # has a client.
            project = self.fields.get("workforce_pool_user_project")
            if project and not self.fields.get("client_id"):
                form["options"] = quote(json.dumps({"userProject": project}))
            form["scope"] = _SCOPE
            form["requested_token_type"] = f"{_URN}token-type:access_token"
            form["subject_token"] = await self.part("credential_source").subject_token()

        headers = [("Content-Type", "application/x-www-form-urlencoded")]
        client = Credential(  # of the OAuth2 application; empty if the file names none
            username=str(self.fields.get("client_id") or ""),
            password=str(self.fields.get("client_secret") or ""),
        )
        if client.basic and "client_id" not in form:
            headers.append(("Authorization", client.basic))
        proofs = ("assertion", "refresh_token", "subject_token")
        keep_passing_secret(*client.secrets, *(form.get(name, "") for name in proofs))
        request = Request(
            "POST",
            self.google_url(grant.url_field, grant.default_url),
            headers,
            urlencode(form, errors="surrogatepass").encode(),
            hint=grant.hint,
        )
        return await self._ask(request)

    async def _impersonate(self, token: str) -> Login:
        """Request an access token of the service account in this file.

        `token` is the access token of an identity that may impersonate the service account.
        """
        keep_passing_secret(token, str(self.fields.get("client_secret") or ""))
        options = self.part("service_account_impersonation").fields
        life = options.get("token_lifetime_seconds") or _LIFE
        wanted = {
            "delegates": self.fields.get("delegates") or [],
            "scope": [_SCOPE],
            "lifetime": f"{life}s",
        }
        request = Request(
            "POST",
            self.google_url(_IMPERSONATION),
            [("Content-Type", "application/json"), ("Authorization", f"Bearer {token}")],
            json.dumps(wanted).encode(),
            hint=_GRANT_HINT,
        )
        return await self._ask(request, life)

    async def _ask(self, request: Request, requested_life: object = None) -> Login:
        """Send a token request. Errors name this file, its type and the service's host."""
        source = f"{self.name}, {self.fields['type']} at {urlsplit(request.url).netloc}"

        def read(answer: Response) -> Login | None:
            return _read_login(answer, edge.current().wall(), source, requested_life)

        return await ask(self.access, request._replace(source=source), read)

    def _assertion(self) -> str:
        """Build a JWT signed with the service account's key.

        Raises AuthError if the key is unusable.
        """
        from _regsync.crypto import sign_rs256

        now = int(edge.current().wall())
        header = {"typ": "JWT", "alg": "RS256", "kid": self.text("private_key_id")}
        claims = {
            "iat": now,
            "exp": now + _LIFE,
            "iss": self.text("client_email"),
            "aud": _TOKENS_URL,
            "scope": _SCOPE,
        }
        parts = [json.dumps(part).encode() for part in (header, claims)]
        signed = ".".join(map(_base64url, parts))
        try:
            signature = sign_rs256(self.text("private_key"), signed.encode())
        except ValueError as error:
            raise self.error(f"private_key {error}") from error
        return f"{signed}.{_base64url(signature)}"

    async def subject_token(self) -> str:
        """Return the token of another identity provider.

        This object must be a `credential_source`, which names the file or the URL with the token
        (section 5.4). The content is the token itself or a JSON object. Raises AuthError if there
        is no token.
        """
        content = await self._source_content()
        content_format = self.part("format")
        if content_format.fields.get("type") == "json":
            token_field = content_format.text("subject_token_field_name")
            return self._replace(fields=json_object(content) or {}).text(token_field)
        token = content.decode("utf-8", "replace").strip()
        if not token:
            raise self.error("token is missing")
        return token

    async def _source_content(self) -> bytes:
        """Read the file or the URL of a `credential_source`.

        Returns b"" if the file does not exist. Raises AuthError if there is neither a file nor a
        URL, or if the URL does not answer with a content.
        """
        if "file" in self.fields:
            return self.access.read(self.text("file")) or b""

        # `environment_id` marks an AWS source, whose `url` returns AWS keys instead of a token.
        if "url" in self.fields and "environment_id" not in self.fields:
            headers = [(name, str(value)) for name, value in self.part("headers").fields.items()]
            # The scheme, or `Metadata: True`, is no secret, and would mask parts of names.
            words = (word for _, value in headers for word in value.split())
            keep_passing_secret(*(word for word in words if len(word) >= _SHORTEST_TOKEN))
            request = Request(
                "GET",
                self.safe_url("url"),
                headers,
                source=self.name,
                hint="check url and headers of the credential_source",
            )
            return await ask(self.access, request, lambda answer: answer.body)

        field_names = ", ".join(self.fields) or "nothing"
        raise self.error(
            f"a credential_source with {field_names} is not supported: use `file` or `url`"
        )


def _base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
