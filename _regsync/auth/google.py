"""Logging in to Artifact Registry by Google's application default credentials.

Owns: where an identity is looked for, the kinds of credential files, the exchange of each kind.
May not know: sockets, challenges.
Invariants: a place that is named, or broken, is never passed over. Secrets go by https, or to this
machine and its metadata server, and into no message.
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
from _regsync.config.model import Registry
from _regsync.errors import AuthError, WireError
from _regsync.text import json_object, mask_unless_word, one_line, printable, redact, redacting

_FILE_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
_METADATA_VARIABLES = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
_METADATA_ADDRESS = "169.254.169.254"

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_URN = "urn:ietf:params:oauth:"
_TOKENS_URL = "https://oauth2.googleapis.com/token"

# The field of a file that names an account to act for.
_IMPERSONATION = "service_account_impersonation_url"

_LOGIN_HINT = "run `gcloud auth application-default login`"
_ATTACH_HINT = "attach a service account to this machine"
_GRANT_HINT = (
    "grant roles/iam.serviceAccountTokenCreator (to a workload: roles/iam.workloadIdentityUser) "
    "on that account"
)

_LIFE = 3600  # seconds for which a token is asked to serve
_PAUSES = (1.0, 2.0)  # seconds between attempts

# Seconds for an answer of a metadata server. The last attempt is short: it is the only one where
# nothing says that there is such a server.
_METADATA_SECONDS = 3.0
_LAST_METADATA_SECONDS = 1.0

# Where secrets may go to and come from. Metadata services have no https.
_SAFE_URL = r"(https://[^/?#@\s]+|http://(localhost|127\.[0-9.]+|\[::1\]|169\.254\.[0-9.]+)(:[0-9]+)?)([/?]\S*)?"


class _Kind(NamedTuple):
    """How one kind of credential file asks for a token."""

    url_field: str
    default_url: str
    grant_type: str
    form_fields: tuple[str, ...]
    hint: str


_KINDS = {
    "authorized_user": _Kind(
        "token_uri",
        _TOKENS_URL,
        "refresh_token",
        ("refresh_token", "client_id", "client_secret"),
        _LOGIN_HINT,
    ),
    "external_account_authorized_user": _Kind(
        "token_url", "", "refresh_token", ("refresh_token",), _LOGIN_HINT
    ),
    "service_account": _Kind(
        "token_uri",
        _TOKENS_URL,
        f"{_URN}grant-type:jwt-bearer",  # RFC 7523
        (),
        "check the key, and the clock of this machine",
    ),
    "external_account": _Kind(
        "token_url",
        "https://sts.googleapis.com/v1/token",
        f"{_URN}grant-type:token-exchange",  # RFC 8693
        ("audience", "subject_token_type"),
        "check issuer, audiences and conditions of the pool's provider",
    ),
}


def is_configured(machine: CloudEnvironment) -> bool:
    """Return whether a variable or a file names a Google identity. No request is made."""
    if any(machine.environ.get(name) for name in (_FILE_VARIABLE, *_METADATA_VARIABLES)):
        return True
    path = _well_known_file(machine)
    return bool(path) and machine.read(path) is not None


def _well_known_file(machine: CloudEnvironment) -> str:
    """Return the path at which gcloud leaves its credentials; empty without a home directory."""
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
    """Log in by the first identity that there is; AuthError where there is none.

    With `probing_metadata`, only the metadata server is asked; None where it does not answer.
    """
    if probing_metadata:
        try:
            return await _ask_metadata(machine, pauses=())
        except AuthError:
            return None

    file = _find_file(machine)
    if file is not None:
        return await file.log_in()
    try:
        return await _ask_metadata(machine, pauses=_PAUSES)
    except AuthError as error:
        path = _well_known_file(machine) or "no home directory"
        places = f"the environment variable {_FILE_VARIABLE}, {path}, {error}"
        raise AuthError(
            f"registry {registry.alias!r}: no Google identity for {registry.authority}; looked at {places}",
            hint=f"{_LOGIN_HINT}, name a key file in {_FILE_VARIABLE}, or {_ATTACH_HINT}; "
            "for public images use auth_type: anonymous",
            fatal=True,
        ) from error


def _find_file(machine: CloudEnvironment) -> _CredentialFile | None:
    """Return the file that the variable names, or else the well-known one; None where neither is
    there.
    """
    named = machine.environ.get(_FILE_VARIABLE)
    path = named or _well_known_file(machine)
    if not path:
        return None
    place = _Place(machine, f"{named} ({_FILE_VARIABLE})" if named else path)
    text = machine.read(path)
    if text is not None:
        return _CredentialFile(place, json_object(text) or {})
    if named:
        raise place.error("the file does not exist", f"correct or unset {_FILE_VARIABLE}")
    return None


async def _ask_metadata(machine: CloudEnvironment, *, pauses: tuple[float, ...]) -> Login:
    """Log in by the token that the metadata server has for this machine's account; AuthError where it
    gives none. A server that does not answer yet is asked again after each of the `pauses`.
    """
    addresses = (machine.environ.get(name) for name in _METADATA_VARIABLES)
    host = one_line(next(filter(None, addresses), _METADATA_ADDRESS), 100)
    server = _Place(machine, f"the metadata server {host}")
    if machine.environ.get("NO_GCE_CHECK") == "true":
        raise server.error("not asked because of NO_GCE_CHECK")

    account = f"http://{host}/computeMetadata/v1/instance/service-accounts/default"
    url = f"{account}/token?scopes={quote(_SCOPE, safe='')}"
    answer = await server.ask("GET", url, [("Metadata-Flavor", "Google")], pauses=pauses)
    # Another server may answer at this address, so the answer has to say that it is Google's.
    if answer.headers.get("metadata-flavor") != "Google":
        raise server.error("the answer is not Google's")
    return server.read_token(answer, _ATTACH_HINT)


class _Place(NamedTuple):
    """What gives a token, or the way to one: a credential file, an object in it, or a service."""

    machine: CloudEnvironment
    name: str  # for messages

    def error(self, text: str, hint: str | None = None, code: str = AuthError.code) -> AuthError:
        """Return an error that names this place."""
        return AuthError(f"{self.name}: {text}", hint=hint, fatal=True, code=code)

    async def ask(
        self,
        method: str,
        url: str,
        headers: list[Pair],
        body: bytes = b"",
        *,
        secrets: tuple[str, ...] = (),
        pauses: tuple[float, ...] = _PAUSES,
    ) -> Answer:
        """Make a request. While the connection breaks, or the status is a temporary one, repeat it after
        each of the `pauses`. Return the last answer, of whatever status; AuthError where there is
        none.

        `secrets` are in the request; no message may show them.
        """
        # A metadata server is asked by plain http. It may refuse for a while after the start of a
        # pod (section 5.4).
        is_metadata = not url.startswith("https:")
        temporary_statuses = (403, 404, 429) if is_metadata else (429,)
        pauses_left = [*pauses]
        while True:
            is_last = not pauses_left
            seconds = None
            if is_metadata:
                seconds = _LAST_METADATA_SECONDS if is_last else _METADATA_SECONDS
            try:
                with redacting(lambda: secrets):
                    answer = await self.machine.fetch(method, url, headers, body, seconds)
            except WireError as error:
                if is_last:
                    raise self.error(error.message, error.hint, error.code) from error
            else:
                is_temporary = answer.status >= 500 or answer.status in temporary_statuses
                if is_last or not is_temporary:
                    return answer
            await anyio.sleep(pauses_left.pop(0))

    def read_token(
        self, answer: Answer, hint: str, *, secrets: tuple[str, ...] = (), life: object = None
    ) -> Login:
        """Return the login that the access token in an answer is; AuthError where there is none.

        `life`: how many seconds the token serves, where the answer does not say. `secrets` were in
        the request; the answer may repeat them.
        """
        document = json_object(answer.body) or {}
        token = document.get("access_token") or document.get("accessToken")
        if answer.status == 200 and isinstance(token, str) and re.fullmatch("[!-~]+", token):
            lifetime = str(document.get("expires_in", life))  # STS may send a string
            seconds = float(lifetime) if re.fullmatch("[0-9]{1,9}", lifetime) else math.inf
            credential = Credential("oauth2accesstoken", token, found_at=self.name)
            return Login(credential, self.machine.wall() + seconds)

        reason = ""  # the body of a 200 is not shown: there may be a token in it
        if answer.status != 200:
            all_secrets = (*secrets, str(token or ""))
            reason = printable(redact(answer.body.decode("utf-8", "replace"), all_secrets), 200)
        code = WireError.code if answer.status >= 500 else AuthError.code
        raise self.error(f"status {answer.status}, no token {reason}", hint, code)


class _CredentialFile(NamedTuple):
    """A credential file, or an object in one."""

    place: _Place
    fields: dict[str, object]

    def __repr__(self) -> str:
        return "<CredentialFile>"  # it holds secrets

    def text(self, name: str, default: str = "", pattern: str = "(?s).+") -> str:
        """Return a text field, or else `default`; AuthError where there is none, or a URL does not match
        its `pattern`.
        """
        value = self.fields.get(name) or default
        if isinstance(value, str) and re.fullmatch(pattern, value):
            return value
        problem = f"{name} is not an https URL" if value else f"{name} is missing"
        raise self.place.error(problem)

    def google_url(self, name: str, default: str = "") -> str:
        """Return the field of a URL that secrets are sent to; AuthError unless its host is Google's,
        of the universe that the file names, or this machine (section 5.3).
        """
        url = self.text(name, default, _SAFE_URL)
        host = re.split("[/?:]+", url)[1].lower()
        universe = str(self.fields.get("universe_domain") or "googleapis.com")
        is_google = f".{host}".endswith((".googleapis.com", f".{universe}"))
        is_this_machine = url.startswith("http:")  # `_SAFE_URL` lets no other host be asked so
        if is_google or is_this_machine:
            return url
        raise self.place.error(f"{name} names {printable(host, 100)}, which is not Google's")

    def part(self, name: str) -> _CredentialFile:
        """Return an object in this one, empty where there is none."""
        value = self.fields.get(name)
        fields = value if isinstance(value, dict) else {}
        return _CredentialFile(self.place._replace(name=f"{self.place.name}, {name}"), fields)

    def _service_at(self, url: str) -> _Place:
        """Return the service at a URL in this file, by a name that says how it was found."""
        kind = self.fields["type"]
        host = urlsplit(url).netloc
        return self.place._replace(name=f"{self.place.name}, {kind} at {host}")

    # Kinds of identities.

    async def log_in(self) -> Login:
        """Log in with this credential file; AuthError where that gives no access token."""
        kind = str(self.fields.get("type"))
        if kind == "impersonated_service_account":
            # Inside is the file of another identity, whose token may act for the service account.
            source_login = await self.part("source_credentials").log_in()
            return await self._impersonate(source_login.credential.password)

        if kind not in _KINDS:
            known = ", ".join(_KINDS)
            raise self.place.error(
                f"type {mask_unless_word(kind)!r} is not one of {known}, impersonated_service_account"
            )
        login = await self._exchange(kind)
        if _IMPERSONATION in self.fields:
            return await self._impersonate(login.credential.password)
        return login

    async def _exchange(self, kind: str) -> Login:
        """Exchange what is in a file of a kind for a token; AuthError where there is none."""
        row = _KINDS[kind]
        form = await self._token_form(kind)
        url = self.google_url(row.url_field, row.default_url)

        headers = [("Content-Type", "application/x-www-form-urlencoded")]
        client = Credential(
            str(self.fields.get("client_id") or ""), str(self.fields.get("client_secret") or "")
        )
        # Of the other kinds, one has the client in the form, and one needs none.
        is_client_in_header = kind.startswith("external")
        if client.basic and is_client_in_header:
            headers.append(("Authorization", client.basic))
        proofs = (form.get(name, "") for name in ("assertion", "refresh_token", "subject_token"))
        secrets = (*client.secrets, *proofs)
        body = urlencode(form, errors="surrogatepass").encode()
        service = self._service_at(url)
        answer = await service.ask("POST", url, headers, body, secrets=secrets)
        return service.read_token(answer, row.hint, secrets=secrets)

    async def _token_form(self, kind: str) -> dict[str, str]:
        """Return the form that asks for a token, and proves this identity (section 5.3)."""
        row = _KINDS[kind]
        form = {"grant_type": row.grant_type}
        form |= {name: self.text(name) for name in row.form_fields}
        if kind == "service_account":
            form["assertion"] = self._assertion()
        if kind == "external_account":
            # An exchange without a client names the project of a workforce pool instead.
            project = self.fields.get("workforce_pool_user_project")
            if project and not self.fields.get("client_id"):
                form["options"] = quote(json.dumps({"userProject": project}))
            form["scope"] = _SCOPE
            form["requested_token_type"] = f"{_URN}token-type:access_token"
            form["subject_token"] = await self.part("credential_source").subject_token()
        return form

    async def _impersonate(self, token: str) -> Login:
        """Get a token of the service account that this file names, by the `token` of an identity that
        may act for it.
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
        answer = await service.ask("POST", url, headers, body, secrets=secrets)
        return service.read_token(answer, _GRANT_HINT, secrets=secrets, life=life)

    def _assertion(self) -> str:
        """Return a JWT signed with the account's key; AuthError for a key that cannot be used."""
        from _regsync.crypto import sign_rs256

        now = int(self.place.machine.wall())
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
            raise self.place.error(f"private_key {error}") from error
        return f"{signed}.{_base64url(signature)}"

    async def subject_token(self) -> str:
        """Return the token of another identity provider that this object, a `credential_source`, leads
        to (section 5.3); AuthError where there is none.
        """
        content = await self._source_content()
        content_format = self.part("format")
        if content_format.fields.get("type") == "json":
            token_field = content_format.text("subject_token_field_name")
            document = json_object(content) or {}
        else:
            token_field = "token"
            document = {token_field: content.decode("utf-8", "replace").strip()}
        # An error about the content names the same place as one about the file.
        return _CredentialFile(self.place, document).text(token_field)

    async def _source_content(self) -> bytes:
        """Return what is in the file or at the URL of a `credential_source`, empty where nothing is."""
        if "file" in self.fields:
            return self.place.machine.read(self.text("file")) or b""

        # With `environment_id` the source is AWS: its `url` gives keys for signing, and no token.
        is_aws = "environment_id" in self.fields
        if "url" in self.fields and not is_aws:
            url = self.text("url", pattern=_SAFE_URL)
            headers = [(name, str(value)) for name, value in self.part("headers").fields.items()]
            secrets = tuple(value for _, value in headers)
            answer = await self.place.ask("GET", url, headers, secrets=secrets)
            return answer.body if answer.status == 200 else b""

        field_names = ", ".join(self.fields) or "nothing"
        raise self.place.error(
            f"a credential_source with {field_names} is not supported: use `file` or `url`"
        )


def _base64url(data: str | bytes) -> str:
    if isinstance(data, str):
        data = data.encode()
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
