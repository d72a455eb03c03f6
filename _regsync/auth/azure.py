"""Logging in to an Azure Container Registry by the identity that Azure gave to this machine.

Owns: where an identity is looked for, the directory (Microsoft Entra ID) and its errors, metadata
services, the exchange of a directory token for the registry's own.
May not know: sockets, challenges, retries.
Invariants: a secret goes to its authority, to a metadata service or to the registry, and into no
message. A source that is broken is an error.
Follows: docs/specification.md section 5.2, docs/protocol-facts.md section 6 (numbers below).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from _regsync.auth.cloud import CloudEnvironment, Login, jwt_lifetime
from _regsync.auth.credentials import Credential, Pair
from _regsync.config.model import Registry
from _regsync.errors import AuthError, RegistryError, WireError
from _regsync.net.http1 import parse_retry_after
from _regsync.text import json_object, printable, redact, redacting

_SECRET_VARIABLE = "AZURE_CLIENT_SECRET"
_FILE_VARIABLE = "AZURE_FEDERATED_TOKEN_FILE"
_SERVICE_VARIABLE = "IDENTITY_ENDPOINT"

_METADATA_URL = "http://169.254.169.254/metadata/identity/oauth2/token"
_METADATA_VERSION = "2018-02-01"
_METADATA_NAME = "the metadata service 169.254.169.254"
_SERVICE_VERSION = "2019-08-01"

_ASSERTION_TYPE = (
    "client_assertion_type",
    "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
)

_PROBE_SECONDS = 1.0  # for any answer of a metadata service, which shows that there is one
_TOKEN_SECONDS = 30.0  # for a token of a metadata service
_LEAST_TOKEN_LIFE = 300.0  # seconds for which a token of the command line must still serve

# The client id of Azure's command line, and the user name that goes with a refresh token (section
# 6.1).
_COMMAND_LINE_CLIENT = "04b07795-8ddb-461a-bbee-02f9e1bf7b46"
_TOKEN_USER = "00000000-0000-0000-0000-000000000000"

# Errors by which the directory says that it does not know an audience (section 6.2).
_UNKNOWN_AUDIENCE = "AADSTS(?:500011|65001)|invalid_resource"

_ROLE_HINT = (
    "grant the identity AcrPull (AcrPush at targets), and choose it by AZURE_CLIENT_ID if there are several; "
    "for public images use auth_type: anonymous"
)
_IDENTITY_HINT = (
    f"set {_SECRET_VARIABLE}, or run `az login`; in Kubernetes, give the service account the annotation "
    'azure.workload.identity/client-id and the pod the label azure.workload.identity/use: "true"; '
    f"{_ROLE_HINT}"
)
_COMMAND_LINE_HINT = (
    "run `az login` again as a user; where a keyring encrypts its tokens, "
    "run `az config set core.encrypt_token_cache=false` first"
)


class _Cloud(NamedTuple):
    name: str
    authority: str
    audiences: tuple[str, ...]  # in the order in which they are tried


# By the suffix of the registry's name (section 6.2).
_CLOUDS = {
    "io": _Cloud(
        "AzureCloud",
        "login.microsoftonline.com",
        ("containerregistry.azure.net", "management.azure.com"),
    ),
    "cn": _Cloud(
        "AzureChinaCloud",
        "login.chinacloudapi.cn",
        (
            "containerregistry.azure.cn",
            "containerregistry.azure.net",
            "management.core.chinacloudapi.cn/",
        ),
    ),
    "us": _Cloud(
        "AzureUSGovernment",
        "login.microsoftonline.us",
        (
            "containerregistry.azure.us",
            "containerregistry.azure.net",
            "management.core.usgovcloudapi.net/",
        ),
    ),
}


class _Source(NamedTuple):
    """Where a token is asked for, and with what.

    An authority takes a POST that names a scope; a metadata service a GET that names a resource.
    """

    name: str  # for messages
    url: str
    fields: tuple[Pair, ...]  # of the form or the query; an empty field is not sent
    hint: str
    secret: str  # in the request; no message may show it
    headers: tuple[Pair, ...] = ()  # a metadata service's; empty for an authority

    @property
    def is_metadata_service(self) -> bool:
        return bool(self.headers)

    def __repr__(self) -> str:
        return "<Source>"  # it holds secrets


class _DirectoryToken(NamedTuple):
    found_at: str  # of the identity it is for
    value: str

    def __repr__(self) -> str:
        return "<DirectoryToken>"


def is_configured(machine: CloudEnvironment) -> bool:
    """Return whether the environment or a session of the command line names an identity."""
    names = (_SECRET_VARIABLE, _FILE_VARIABLE, _SERVICE_VARIABLE)
    if any(machine.environ.get(name) for name in names):
        return True
    return b"tenantId" in _session_file(machine, "azureProfile")


async def log_in(
    machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
) -> Login | None:
    """Log in by the first identity that there is: its token is exchanged for a refresh token of the
    registry (section 6.1).

    With `probing_metadata`, only the metadata service is asked; None where it gives no token.
    """
    suffix = registry.host.rpartition(".azurecr.")[2]
    cloud = _CLOUDS.get(suffix, _CLOUDS["io"])
    token = await _directory_token(machine, cloud, probing_metadata=probing_metadata)
    if token is None:
        return None

    fields = (
        ("grant_type", "access_token"),
        ("service", registry.host),
        ("access_token", token.value),
    )
    url = f"{registry.scheme}://{registry.authority}/oauth2/exchange"
    exchange = _Source(token.found_at, url, fields, _ROLE_HINT, secret=token.value)
    try:
        refresh_token = await _ask(machine, exchange, "refresh_token")
    except AuthError:
        if probing_metadata:
            # Nobody has asked for a login with this machine's identity, and the registry does not know
            # it. The registry may let anybody pull.
            return Login(Credential(), math.inf)
        raise

    now = machine.wall()
    life = jwt_lifetime(refresh_token, now)
    expires = math.inf if life is None else now + life
    credential = Credential(_TOKEN_USER, identity_token=refresh_token, found_at=token.found_at)
    return Login(credential, expires)


async def _directory_token(
    machine: CloudEnvironment, cloud: _Cloud, *, probing_metadata: bool
) -> _DirectoryToken | None:
    """Return the token of the first identity that there is; AuthError where there is none.

    With `probing_metadata`, only the metadata service is asked; None where it gives no token.
    """
    if not probing_metadata:
        source = _named_source(machine, cloud.authority)
        if source is not None:
            value = await _ask_for_token(machine, source, cloud.audiences)
            return _DirectoryToken(source.name, value)

    looked_at = [_SECRET_VARIABLE, _FILE_VARIABLE, _SERVICE_VARIABLE]
    try:
        metadata_token = await _metadata_token(machine, cloud.audiences)
    except (AuthError, WireError) as error:
        # As of a machine without an identity: somebody may have run `az login` there.
        looked_at.append(f"{_METADATA_NAME} ({error.message})")
    else:
        looked_at.append(_METADATA_NAME)
        if metadata_token is not None:
            return _DirectoryToken(_METADATA_NAME, metadata_token)
    if probing_metadata:
        return None
    return await _command_line_token(machine, cloud, looked_at)


def _named_source(machine: CloudEnvironment, authority: str) -> _Source | None:
    """Return the source that the environment names: a secret, a federated token (section 6.2), or a
    service of managed identities (section 6.3). None where it names none.
    """
    environ = machine.environ
    for name in (_SECRET_VARIABLE, _FILE_VARIABLE):
        if environ.get(name):
            return _client_source(machine, authority, name)
    if environ.get(_SERVICE_VARIABLE):
        _require_variables(environ, _SERVICE_VARIABLE, "IDENTITY_HEADER")
        header = ("X-IDENTITY-HEADER", environ["IDENTITY_HEADER"])
        url = environ[_SERVICE_VARIABLE]
        return _metadata_source(machine, _SERVICE_VARIABLE, url, _SERVICE_VERSION, header)
    return None


def _client_source(machine: CloudEnvironment, authority: str, name: str) -> _Source:
    """Return the source that gives a token to the client AZURE_CLIENT_ID, for the proof in the variable
    `name`: a secret, or the file of a federated token.
    """
    environ = machine.environ
    _require_variables(environ, name, "AZURE_CLIENT_ID", "AZURE_TENANT_ID")
    if name == _FILE_VARIABLE:
        secret = _federated_token(machine)
        proof = [_ASSERTION_TYPE, ("client_assertion", secret)]
    else:
        secret = environ[name]
        proof = [("client_secret", secret)]
    client = ("client_id", environ["AZURE_CLIENT_ID"])
    fields = (("grant_type", "client_credentials"), client, *proof)
    host = re.sub("^https?://|/+$", "", environ.get("AZURE_AUTHORITY_HOST") or authority)
    url = _authority_url(host, environ["AZURE_TENANT_ID"])
    return _Source(name, url, fields, _IDENTITY_HINT, secret)


def _require_variables(environ: Mapping[str, str], name: str, *needed: str) -> None:
    """Raise AuthError where a variable that has to go with the variable `name` is not set."""
    missing = [variable for variable in needed if not environ.get(variable)]
    if missing:
        message = f"{name} is set without {' and '.join(missing)}"
        raise AuthError(message, hint=_IDENTITY_HINT, fatal=True)


def _authority_url(host: str, tenant: str) -> str:
    return f"https://{host}/{quote(tenant, errors='replace')}/oauth2/v2.0/token"


def _federated_token(machine: CloudEnvironment) -> str:
    path = machine.environ[_FILE_VARIABLE]
    token = (machine.read(path) or b"").decode("utf-8", "replace").strip()
    if not token:
        raise AuthError(
            f"{_FILE_VARIABLE} names {printable(path)}, which is missing or empty",
            hint=_IDENTITY_HINT,
            fatal=True,
        )
    return token


def _metadata_source(
    machine: CloudEnvironment, name: str, url: str, version: str, header: Pair | None = None
) -> _Source:
    """Return a service of managed identities as a source. Some want a secret in a `header`."""
    # Without AZURE_CLIENT_ID, the empty field is not sent.
    fields = (("api-version", version), ("client_id", machine.environ.get("AZURE_CLIENT_ID", "")))
    headers: tuple[Pair, ...] = (("Metadata", "true"),)
    secret = ""
    if header is not None:
        _, secret = header
        headers = (*headers, header)
    return _Source(name, url, fields, _ROLE_HINT, secret, headers)


async def _metadata_token(machine: CloudEnvironment, audiences: tuple[str, ...]) -> str | None:
    """Return the token that a virtual machine's metadata service gives (section 6.3); None where there
    is no such service, AuthError or WireError where it gives no token.
    """
    # A token may take seconds, and this shows sooner whether there is a service: a request without the
    # header `Metadata` is refused with 400 at once.
    url = f"{_METADATA_URL}?api-version={_METADATA_VERSION}"
    answer = await machine.fetch("GET", url, [], b"", _PROBE_SECONDS)
    if answer.status in (401, 403, 404):
        return None
    source = _metadata_source(machine, _METADATA_NAME, _METADATA_URL, _METADATA_VERSION)
    return await _ask_for_token(machine, source, audiences)


# The session of Azure's command line, whose files are never written (section 6.4).


def _session_file(machine: CloudEnvironment, name: str) -> bytes:
    folder = machine.environ.get("AZURE_CONFIG_DIR") or f"{machine.home or ''}/.azure"
    return machine.read(f"{folder}/{name}.json") or b"{}"


async def _command_line_token(
    machine: CloudEnvironment, cloud: _Cloud, looked_at: list[str]
) -> _DirectoryToken:
    """Return the token that `az login` has left for a cloud, or one that its refresh token brings;
    AuthError where nobody has logged in, or nothing usable was left.

    `looked_at`: the places without an identity, for the error.
    """
    try:
        profile = json.loads(_session_file(machine, "azureProfile"))
        cache = json.loads(_session_file(machine, "msal_token_cache"))
        subscription = _subscription(profile, cloud)
        if subscription is None:
            places = ", ".join((*looked_at, "az login's ~/.azure"))
            raise AuthError(
                f"no Azure identity; looked at {places}", hint=_IDENTITY_HINT, fatal=True
            )

        access_tokens = _entries(cache, "AccessToken", subscription, cloud)
        refresh_tokens = _entries(cache, "RefreshToken", subscription, cloud)
        until = machine.wall() + _LEAST_TOKEN_LIFE
        value = _cached_token(access_tokens, subscription, cloud, until)
        if value is not None:
            return _DirectoryToken("az login", value)
        source = _refresh_source(refresh_tokens, subscription, cloud)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        # Another program has written the files, in whatever shape.
        raise AuthError(
            "`az login` has left no usable token in its files", hint=_COMMAND_LINE_HINT, fatal=True
        ) from None

    return _DirectoryToken(source.name, await _ask_for_token(machine, source, cloud.audiences))


# The next five functions read documents of any shape. Whatever they raise becomes an AuthError in
# `_command_line_token`.


def _subscription(profile: Any, cloud: _Cloud) -> Any | None:
    """Return the default subscription in a cloud, or another one; None where the profile has none."""
    subscriptions = [
        subscription
        for subscription in profile.get("subscriptions", ())
        if subscription["environmentName"] == cloud.name
    ]
    defaults = [
        subscription for subscription in subscriptions if subscription.get("isDefault") is True
    ]
    return next(iter((*defaults, *subscriptions)), None)


def _entries(cache: Any, section: str, subscription: Any, cloud: _Cloud) -> list[Any]:
    """Return the entries of a section of the cache that belong to the user of a subscription."""
    accounts = [
        account["home_account_id"]
        for account in cache["Account"].values()
        if account["username"] == subscription["user"]["name"]
    ]
    return [
        entry
        for entry in cache[section].values()
        if entry["home_account_id"] in accounts and entry["environment"] == cloud.authority
    ]


def _cached_token(entries: list[Any], subscription: Any, cloud: _Cloud, until: float) -> str | None:
    """Return an access token for the registry's audience that serves `until` then; None for none."""
    target = f"https://{cloud.audiences[0]}/"
    for entry in entries:
        is_ours = entry["realm"] == subscription["tenantId"] and entry["target"].startswith(target)
        if is_ours and float(entry["expires_on"]) > until:
            return _text(entry["secret"])
    return None


def _refresh_source(entries: list[Any], subscription: Any, cloud: _Cloud) -> _Source:
    """Return the source that takes the refresh token which `az login` has left last."""
    youngest = max(entries, key=lambda entry: int(entry["last_modification_time"]))
    secret = _text(youngest["secret"])
    fields = (
        ("grant_type", "refresh_token"),
        ("client_id", _COMMAND_LINE_CLIENT),
        ("refresh_token", secret),
    )
    url = _authority_url(cloud.authority, subscription["tenantId"])
    return _Source("az login", url, fields, _COMMAND_LINE_HINT, secret)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError("not a text")


# Exchanges.


async def _ask_for_token(
    machine: CloudEnvironment, source: _Source, audiences: tuple[str, ...]
) -> str:
    """Return a source's token for the first audience that the directory knows (section 6.2); AuthError
    or RegistryError where it gives none.
    """
    *first_choices, last = audiences
    for audience in first_choices:
        try:
            return await _ask_for_audience(machine, source, audience)
        except AuthError as error:
            is_unknown = re.search(_UNKNOWN_AUDIENCE, error.message) is not None
            if not is_unknown:
                raise
    return await _ask_for_audience(machine, source, last)


async def _ask_for_audience(machine: CloudEnvironment, source: _Source, audience: str) -> str:
    resource = ("resource", f"https://{audience}")
    scope = ("scope", f"https://{audience}/.default")
    wanted = resource if source.is_metadata_service else scope
    return await _ask(machine, source._replace(fields=(*source.fields, wanted)), "access_token")


async def _ask(machine: CloudEnvironment, source: _Source, field: str) -> str:
    """Ask a source, and return the text in a field of its answer.

    RegistryError where a repetition may succeed, AuthError for a refusal, with its reason (section
    6.2).
    """
    fields = [(name, value) for name, value in source.fields if value]
    encoded_fields = urlencode(fields, errors="replace")
    with redacting(lambda: (source.secret,)):
        if source.is_metadata_service:
            url = f"{source.url}?{encoded_fields}"
            answer = await machine.fetch("GET", url, [*source.headers], b"", _TOKEN_SECONDS)
        else:
            headers = [("Content-Type", "application/x-www-form-urlencoded")]
            answer = await machine.fetch("POST", source.url, headers, encoded_fields.encode())
    value = (json_object(answer.body) or {}).get(field)
    if answer.status == 200 and isinstance(value, str):
        return value

    place = source.url.partition("?")[0]
    reason = _reason(redact(answer.body.decode("utf-8", "replace"), [source.secret]))
    message = printable(f"{place} refuses {source.name}: status {answer.status}: {reason}")
    if answer.status == 429 or answer.status >= 500:
        wait = parse_retry_after(answer.headers.get("retry-after"), machine.wall())
        raise RegistryError(message, status=answer.status, retry_after=wait)
    raise AuthError(message, hint=source.hint, fatal=True)


def _reason(text: str) -> str:
    """Return the code and the first line of an error. Its other lines name tenants and users."""
    words = r'"(?:error|code|error_description|message)" *: *"([^"\\]*)'
    return ": ".join(re.findall(words, text)[:2]).partition(" Trace ID")[0]
