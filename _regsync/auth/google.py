"""Google's application default credentials: an access token by whatever identity the machine has.
Owns: the places' order, the kinds of files, what is asked. May not know: sockets, challenges.
Invariant: a named place that is broken is an error; secrets go by https or to this machine, into no
message. Follows docs/protocol-facts.md 5.2-4."""

from __future__ import annotations

import json
import math
import os
import re
from base64 import urlsafe_b64encode
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import anyio

from _regsync.auth.cloud import Answer, Login, Machine
from _regsync.auth.credentials import Credential, Pair
from _regsync.config.model import Registry
from _regsync.errors import AuthError, WireError
from _regsync.text import clean, hide, json_object, plain

_NAMED = "GOOGLE_APPLICATION_CREDENTIALS"


_METADATA = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")


_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


_URN = "urn:ietf:params:oauth:"


_TOKENS = "https://oauth2.googleapis.com/token"


_ACCOUNT = "service_account_impersonation_url"


_LOGIN = "run `gcloud auth application-default login`"


_ATTACH = "attach a service account to this machine"


_GRANT = "grant roles/iam.serviceAccountTokenCreator (to a workload: roles/iam.workloadIdentityUser) on that account"


# What each kind of file asks with: the field that has the URL, its default, the grant, more fields;
# what may help.
_KINDS = {
    "authorized_user": (
        "token_uri",
        _TOKENS,
        "refresh_token",
        "refresh_token client_id client_secret",
        _LOGIN,
    ),
    "external_account_authorized_user": ("token_url", "", "refresh_token", "refresh_token", _LOGIN),
    "service_account": (
        "token_uri",
        _TOKENS,
        f"{_URN}grant-type:jwt-bearer",
        "",
        "is the key good, the clock right?",
    ),
    "external_account": (
        "token_url",
        "https://sts.googleapis.com/v1/token",
        f"{_URN}grant-type:token-exchange",
        "audience subject_token_type",
        "check issuer, audiences and conditions of the pool's provider",
    ),
}


# Where secrets may go, and come from: metadata services have no https.
_SAFE = r"(https://[^/?#@\s]+|http://(localhost|127\.[0-9.]+|\[::1\]|169\.254\.[0-9.]+)(:[0-9]+)?)([/?]\S*)?"


def present(machine: Machine) -> bool:
    """Say whether something of this machine names a Google identity; without a request."""
    path = _well_known(machine)
    return any(map(machine.environ.get, (_NAMED, *_METADATA))) or bool(
        path and machine.read(path) is not None
    )


def _well_known(machine: Machine) -> str:
    home, below = (
        (machine.environ.get("APPDATA"), "gcloud")
        if os.name == "nt"
        else (machine.home, ".config/gcloud")
    )
    folder = machine.environ.get("CLOUDSDK_CONFIG") or (home and os.path.join(home, below))
    return os.path.join(folder, "application_default_credentials.json") if folder else ""


async def log_in(machine: Machine, registry: Registry, *, guessed: bool) -> Login | None:
    """Return an access token by the first place that is there; for none AuthError, where `guessed`
    None.
    """
    named = machine.environ.get(_NAMED)
    path = _well_known(machine)
    if not guessed and (place := named or path):
        file = _Fields(machine, f"{named} ({_NAMED})" if named else path, {})
        if (text := machine.read(place)) is not None:
            return await file._replace(info=json_object(text) or {}).log_in()
        if named:
            raise file.error("there is no such file", f"correct or unset {_NAMED}")
    host = clean(next(filter(None, map(machine.environ.get, _METADATA)), "169.254.169.254"), 100)
    server = _Fields(machine, f"the metadata server {host}", {})
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token?scopes={quote(_SCOPE, safe='')}"
    try:
        if machine.environ.get("NO_GCE_CHECK") == "true":
            raise server.error("not asked because of NO_GCE_CHECK")
        # google-auth sends a ping first; here the answer itself has to say whose it is.
        answer = await server.ask(
            "GET", url, [("Metadata-Flavor", "Google")], more=0 if guessed else 2
        )
        if answer[1].get("metadata-flavor") != "Google":
            raise server.error("not Google's")
        return server.read(answer, _ATTACH)
    except AuthError as error:
        if guessed:
            return None
        places = f"the environment variable {_NAMED}, {path or 'no home directory'}, {error}"
        message = f"registry {registry.alias!r}: no Google identity for {registry.authority}; looked at {places}"
        hint = f"{_LOGIN}, name a key file by {_NAMED}, or {_ATTACH}; for public images use auth_type: anonymous"
        raise AuthError(message, hint=hint, fatal=True) from error


class _Fields(NamedTuple):
    """What a credential file, or an object in one, says, and where it stands."""

    machine: Machine
    where: str
    info: dict[str, Any]

    def __repr__(self) -> str:
        return "<Fields>"  # it holds secrets

    def error(self, text: str, hint: str | None = None, code: str = AuthError.code) -> AuthError:
        return AuthError(f"{self.where}: {text}", hint=hint, fatal=True, code=code)

    def text(self, name: str, default: str = "", form: str = "(?s).+") -> str:
        value = self.info.get(name) or default
        if isinstance(value, str) and re.fullmatch(form, value):
            return value
        raise self.error(f"{name} is not an https URL" if value else f"there is no {name}")

    def owned(self, name: str, default: str = "") -> str:
        """Return a URL that secrets are sent to: on this host, Google's, or the file's own
        universe's (section 5.3).
        """
        url = self.text(name, default, _SAFE)
        host = re.split("[/?:]+", self.text(name, default))[1].lower()
        domains = ("googleapis.com", str(self.info.get("universe_domain") or "googleapis.com"))
        if url.startswith("http:") or f".{host}".endswith(tuple(f".{each}" for each in domains)):
            return url
        raise self.error(f"{name} names {clean(host, 100)}, which is not Google's")

    def part(self, name: str) -> _Fields:
        value = self.info.get(name)
        return self._replace(
            where=f"{self.where}, {name}", info=value if isinstance(value, dict) else {}
        )

    async def ask(
        self, method: str, url: str, headers: list[Pair], body: bytes = b"", more: int = 2
    ) -> Answer:
        seconds = (
            None if url.startswith("https:") else 3.0 if more else 1.0
        )  # a metadata service's is plain http,
        passing = (
            (403, 404, 429) if seconds else (429,)
        )  # and may refuse for a while after a pod's start (section 5.4)
        try:
            answer = await self.machine.fetch(method, url, headers, body, seconds)
            if not more or (answer[0] < 500 and answer[0] not in passing):
                return answer
        except WireError as error:
            if not more:
                raise self.error(error.message, error.hint, error.code) from error
        await anyio.sleep(3.0 - more)
        return await self.ask(method, url, headers, body, more - 1)

    def read(self, answer: Answer, hint: str, *secrets: str | None, life: object = None) -> Login:
        document = json_object(answer[2]) or {}
        token = document.get("access_token") or document.get("accessToken")
        said = str(document.get("expires_in", life))
        if answer[0] == 200 and isinstance(token, str) and re.fullmatch("[!-~]+", token):
            life = float(said) if re.fullmatch("[0-9]{1,9}", said) else math.inf  # STS may quote it
            return Login(
                Credential("oauth2accesstoken", token, origin=self.where),
                self.machine.wall() + life,
            )
        text = hide(
            answer[2].decode("utf-8", "replace"), *map(str, filter(None, (*secrets, token)))
        )
        code = WireError.code if answer[0] > 499 else AuthError.code
        raise self.error(
            f"status {answer[0]}, no token {clean(text, 200) if answer[0] != 200 else ''}",
            hint,
            code,
        )

    async def log_in(self) -> Login:
        if (kind := str(self.info.get("type"))) in _KINDS:
            name, default, grant, fields, hint = _KINDS[kind]
            form = {"grant_type": grant, **{each: self.text(each) for each in fields.split()}}
            if kind == "service_account":
                form["assertion"] = self.assertion()  # RFC 7523; the exchange is RFC 8693
            if kind == "external_account":
                project = not self.info.get("client_id") and self.info.get(
                    "workforce_pool_user_project"
                )
                form |= {"options": quote(json.dumps({"userProject": project}))} if project else {}
                form |= {
                    "scope": _SCOPE,
                    "requested_token_type": f"{_URN}token-type:access_token",
                    "subject_token": await self.part("credential_source").subject(),
                }
            login = await self.post(self.owned(name, default), form, hint)
            if _ACCOUNT not in self.info:
                return login
        elif kind == "impersonated_service_account":
            login = await self.part("source_credentials").log_in()
        else:
            raise self.error(
                f"type {plain(kind)!r} is none of {', '.join(_KINDS)}, impersonated_service_account"
            )
        life = self.part("service_account_impersonation").info.get("token_lifetime_seconds") or 3600
        wanted = {
            "delegates": self.info.get("delegates") or [],
            "scope": [_SCOPE],
            "lifetime": f"{life}s",
        }
        return await self.post(
            self.owned(_ACCOUNT), wanted, _GRANT, login.credential.password, life
        )

    async def post(
        self, url: str, form: dict[str, Any], hint: str, token: str = "", life: object = None
    ) -> Login:
        kind = str(self.info["type"])
        body = urlencode(form, errors="surrogatepass")
        coded = "x-www-form-urlencoded"
        client = Credential(
            *(str(self.info.get(name) or "") for name in ("client_id", "client_secret"))
        )
        login = (client.basic or "") if kind.startswith("external") else ""
        if token:
            login = f"Bearer {token}"
            body = json.dumps(form)
            coded = "json"
        headers = [
            ("Content-Type", f"application/{coded}"),
            *([("Authorization", login)] if login else []),
        ]
        at = self._replace(where=f"{self.where}, {kind} at {urlsplit(url).netloc}")
        shown = (
            *login.split()[1:],
            *client.secrets,
            *map(form.get, ("assertion", "refresh_token", "subject_token")),
        )
        return at.read(await at.ask("POST", url, headers, body.encode()), hint, *shown, life=life)

    def assertion(self) -> str:
        from _regsync.crypto import sign_rs256

        now = int(self.machine.wall())
        header = {"typ": "JWT", "alg": "RS256", "kid": self.text("private_key_id")}
        claims = {
            "iat": now,
            "exp": now + 3600,
            "iss": self.text("client_email"),
            "aud": _TOKENS,
            "scope": _SCOPE,
        }
        signed = b".".join(
            urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)
        )
        try:
            signature = urlsafe_b64encode(sign_rs256(self.text("private_key"), signed)).rstrip(b"=")
        except ValueError as error:
            raise self.error(f"private_key {error}") from error
        return f"{signed.decode()}.{signature.decode()}"

    async def subject(self) -> str:
        status = 200
        text = b""
        form = self.part("format")
        if "file" in self.info:
            text = self.machine.read(self.text("file")) or b""
        elif "url" in self.info and "environment_id" not in self.info:
            headers = [(name, str(value)) for name, value in self.part("headers").info.items()]
            status, _, text = await self.ask("GET", self.text("url", form=_SAFE), headers)
        else:
            raise self.error(
                f"{', '.join(self.info) or 'nothing'} is not supported; use a file or url"
            )
        name = "token"
        found = {"token": text.decode("utf-8", "replace").strip()}
        if form.info.get("type") == "json":
            name = form.text("subject_token_field_name")
            found = json_object(text) or {}
        return self._replace(info=found if status == 200 else {}).text(name)
