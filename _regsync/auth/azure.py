"""Login to Azure Container Registry with this machine's Azure identity.

Owns: the search for an identity, token requests to Microsoft Entra ID ("the directory") and to
metadata services, the exchange of an Entra token for the registry's refresh token.
May not know: sockets, challenges, retries.
Invariants: a secret is only sent to its authority, to a metadata service or to the registry, and
appears in no message. A broken source of an identity is an error.
Follows: docs/specification.md section 5.2, docs/protocol-facts.md section 6 (cited by number).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from _regsync.auth.cloud import ANONYMOUS_LOGIN, CloudEnvironment, Login, jwt_lifetime
from _regsync.auth.credentials import Credential, Pair
from _regsync.config import Registry
from _regsync.errors import AuthError, RegistryError, WireError
from _regsync.net.http1 import parse_retry_after
from _regsync.text import json_object, printable, redact, redacting

# Statuses with which the metadata services of other clouds, at the same address, answer the check.
# Azure's service answers the check with 400.
_STATUSES_OF_OTHER_SERVERS = (401, 403, 404)

# Environment variables, each of which selects a source of an identity.
_SECRET_VARIABLE = "AZURE_CLIENT_SECRET"
_FILE_VARIABLE = "AZURE_FEDERATED_TOKEN_FILE"
_ENDPOINT_VARIABLE = "IDENTITY_ENDPOINT"  # the managed identity service of App Service and others

# The metadata service of virtual machines (section 6.3).
_METADATA_URL = "http://169.254.169.254/metadata/identity/oauth2/token"
_METADATA_NAME = "the metadata service 169.254.169.254"

# Values of the parameter `api-version`.
_METADATA_API_VERSION = "2018-02-01"
_ENDPOINT_API_VERSION = "2019-08-01"  # of the service at IDENTITY_ENDPOINT

_ASSERTION_TYPE = (
    "client_assertion_type",
    "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
)

_PROBE_SECONDS = 1.0  # timeout of the request that checks whether a metadata service exists
_TOKEN_SECONDS = 30.0  # timeout for a token from a metadata service
_LEAST_TOKEN_LIFE = 300.0  # seconds for which a token of the Azure CLI must remain valid

# The client ID of the Azure CLI.
_CLI_CLIENT_ID = "04b07795-8ddb-461a-bbee-02f9e1bf7b46"

# The user name that accompanies a registry's refresh token (section 6.1).
_TOKEN_USER = "00000000-0000-0000-0000-000000000000"

# Matches the directory's errors for an unknown audience (section 6.2).
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
_CLI_HINT = (
    "run `az login` again as a user; where a keyring encrypts its tokens, "
    "run `az config set core.encrypt_token_cache=false` first"
)


class _Cloud(NamedTuple):
    """One of Azure's clouds (section 6.2)."""

    name: str  # in the files of the Azure CLI
    authority: str  # the host of the directory
    audiences: tuple[str, ...]  # hosts for which tokens are requested, in order of preference


# The clouds, by the last part of a registry's host name: `azurecr.io`, `azurecr.cn`, `azurecr.us`.
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


class _TokenRequest(NamedTuple):
    """A token request to an authority, to a metadata service or to the registry.

    A metadata service receives a GET with the fields in the query. An authority and the registry
    receive a POST with the fields in a form.
    """

    found_at: str  # the source of the identity, for messages
    url: str  # without a query
    fields: tuple[Pair, ...]  # names and values; fields with an empty value are not sent
    hint: str  # for the error if the request is refused
    secret: str  # a secret in the request, or ""; it is masked in messages
    metadata_headers: tuple[Pair, ...] = ()  # only for a metadata service

    @property
    def is_to_metadata_service(self) -> bool:
        return bool(self.metadata_headers)

    def __repr__(self) -> str:
        return "<TokenRequest>"  # the fields are secret


class _DirectoryToken(NamedTuple):
    """An access token of the directory (Microsoft Entra ID)."""

    found_at: str  # the source of the identity, for messages
    value: str  # a secret

    def __repr__(self) -> str:
        return "<DirectoryToken>"


def is_configured(machine: CloudEnvironment) -> bool:
    """Report whether an environment variable or a login of the Azure CLI provides an identity."""
    names = (_SECRET_VARIABLE, _FILE_VARIABLE, _ENDPOINT_VARIABLE)
    if any(machine.environ.get(name) for name in names):
        return True
    return b"tenantId" in _read_cli_file(machine, "azureProfile")


async def log_in(
    machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
) -> Login | None:
    """Exchange a token of this machine's identity for a registry refresh token (section 6.1).

    Raises AuthError if there is no identity. If `probing_metadata` is true, only the metadata
    service is used, and the function returns None if it issues no token.
    """
    suffix = registry.host.rpartition(".azurecr.")[2]
    cloud = _CLOUDS.get(suffix, _CLOUDS["io"])
    token = await _obtain_directory_token(machine, cloud, probing_metadata=probing_metadata)
    if token is None:  # the metadata service issues no token
        return None

    exchange = _TokenRequest(
        found_at=token.found_at,
        url=f"{registry.scheme}://{registry.authority}/oauth2/exchange",
        fields=(
            ("grant_type", "access_token"),
            ("service", registry.host),
            ("access_token", token.value),
        ),
        hint=_ROLE_HINT,
        secret=token.value,
    )
    try:
        refresh_token = await _send(machine, exchange, answer_field="refresh_token")
    except AuthError:
        if probing_metadata:
            return ANONYMOUS_LOGIN
        raise

    now = machine.wall()
    life = jwt_lifetime(refresh_token, now)
    expires = math.inf if life is None else now + life
    credential = Credential(_TOKEN_USER, identity_token=refresh_token, found_at=token.found_at)
    return Login(credential, expires)


async def _obtain_directory_token(
    machine: CloudEnvironment, cloud: _Cloud, *, probing_metadata: bool
) -> _DirectoryToken | None:
    """Return a directory token for the first identity that is available on this machine.

    Raises AuthError if there is no identity. If `probing_metadata` is true, only the metadata
    service is used, and the function returns None if it issues no token.
    """
    if not probing_metadata:
        request = _request_from_environment(machine, cloud.authority)
        if request is not None:
            value = await _request_token(machine, request, cloud.audiences)
            return _DirectoryToken(request.found_at, value)

    metadata_source = _METADATA_NAME  # for the error message, with the reason for a failure
    try:
        metadata_token = await _request_metadata_token(machine, cloud.audiences)
    except (AuthError, WireError) as error:
        # The machine may have no identity. A user may still have run `az login` on it.
        metadata_token = None
        metadata_source += f" ({error.message})"
    if metadata_token is not None:
        return _DirectoryToken(_METADATA_NAME, metadata_token)
    if probing_metadata:
        return None
    tried_sources = (_SECRET_VARIABLE, _FILE_VARIABLE, _ENDPOINT_VARIABLE, metadata_source)
    return await _obtain_cli_token(machine, cloud, tried_sources)


def _request_from_environment(machine: CloudEnvironment, authority: str) -> _TokenRequest | None:
    """Build a token request for the identity that the environment variables configure.

    The identity is a client with a secret, a client with a federated token (section 6.2), or a
    managed identity (section 6.3). Returns None if the variables configure no identity. Raises
    AuthError if they are incomplete.
    """
    environ = machine.environ
    for variable in (_SECRET_VARIABLE, _FILE_VARIABLE):
        if environ.get(variable):
            return _client_request(machine, authority, variable)
    if environ.get(_ENDPOINT_VARIABLE):
        _require_variables(environ, _ENDPOINT_VARIABLE, "IDENTITY_HEADER")
        return _managed_identity_request(
            machine,
            found_at=_ENDPOINT_VARIABLE,
            url=environ[_ENDPOINT_VARIABLE],
            api_version=_ENDPOINT_API_VERSION,
            secret_header=("X-IDENTITY-HEADER", environ["IDENTITY_HEADER"]),
        )
    return None


def _client_request(machine: CloudEnvironment, authority: str, variable: str) -> _TokenRequest:
    """Build a token request for the client AZURE_CLIENT_ID.

    `variable` is the environment variable that holds the client's secret, or the path of its
    federated token. Raises AuthError if a further variable or the file is missing.
    """
    environ = machine.environ
    _require_variables(environ, variable, "AZURE_CLIENT_ID", "AZURE_TENANT_ID")
    if variable == _FILE_VARIABLE:
        secret = _read_federated_token(machine)
        proof = [_ASSERTION_TYPE, ("client_assertion", secret)]
    else:
        secret = environ[variable]
        proof = [("client_secret", secret)]
    client = ("client_id", environ["AZURE_CLIENT_ID"])
    host = re.sub("^https?://|/+$", "", environ.get("AZURE_AUTHORITY_HOST") or authority)
    return _TokenRequest(
        found_at=variable,
        url=_authority_url(host, environ["AZURE_TENANT_ID"]),
        fields=(("grant_type", "client_credentials"), client, *proof),
        hint=_IDENTITY_HINT,
        secret=secret,
    )


def _require_variables(environ: Mapping[str, str], name: str, *required: str) -> None:
    """Raise AuthError unless all variables that the variable `name` requires are set."""
    missing = [variable for variable in required if not environ.get(variable)]
    if missing:
        message = f"{name} is set without {' and '.join(missing)}"
        raise AuthError(message, hint=_IDENTITY_HINT, fatal=True)


def _authority_url(host: str, tenant: str) -> str:
    return f"https://{host}/{quote(tenant, errors='replace')}/oauth2/v2.0/token"


def _read_federated_token(machine: CloudEnvironment) -> str:
    path = machine.environ[_FILE_VARIABLE]
    token = (machine.read(path) or b"").decode("utf-8", "replace").strip()
    if not token:
        raise AuthError(
            f"{_FILE_VARIABLE} names {printable(path)}, which is missing or empty",
            hint=_IDENTITY_HINT,
            fatal=True,
        )
    return token


def _managed_identity_request(
    machine: CloudEnvironment,
    *,
    found_at: str,
    url: str,
    api_version: str,
    secret_header: Pair | None = None,
) -> _TokenRequest:
    """Build a token request to a service of managed identities at `url`.

    `found_at` names the service in messages. Some services require a `secret_header`.
    """
    headers = [("Metadata", "true")]
    secret = ""
    if secret_header is not None:
        headers.append(secret_header)
        _, secret = secret_header
    client_id = machine.environ.get("AZURE_CLIENT_ID", "")  # an empty field is not sent
    return _TokenRequest(
        found_at=found_at,
        url=url,
        fields=(("api-version", api_version), ("client_id", client_id)),
        hint=_ROLE_HINT,
        secret=secret,
        metadata_headers=tuple(headers),
    )


async def _request_metadata_token(
    machine: CloudEnvironment, audiences: tuple[str, ...]
) -> str | None:
    """Request a token from a virtual machine's metadata service (section 6.3).

    Returns None if there is no such service. Raises AuthError or WireError if it issues no token.
    """
    # The service refuses a request without the header `Metadata` at once, with status 400. This
    # check is faster than a token request, which may take seconds.
    url = f"{_METADATA_URL}?api-version={_METADATA_API_VERSION}"
    answer = await machine.fetch("GET", url, [], b"", _PROBE_SECONDS)
    if answer.status in _STATUSES_OF_OTHER_SERVERS:
        return None
    request = _managed_identity_request(
        machine, found_at=_METADATA_NAME, url=_METADATA_URL, api_version=_METADATA_API_VERSION
    )
    return await _request_token(machine, request, audiences)


# The login of the Azure CLI (`az login`). Its files are only read (section 6.4).


def _read_cli_file(machine: CloudEnvironment, name: str) -> bytes:
    """Return the content of a JSON file of the Azure CLI, or `{}` if the file does not exist."""
    folder = machine.environ.get("AZURE_CONFIG_DIR") or f"{machine.home or ''}/.azure"
    return machine.read(f"{folder}/{name}.json") or b"{}"


async def _obtain_cli_token(
    machine: CloudEnvironment, cloud: _Cloud, tried_sources: tuple[str, ...]
) -> _DirectoryToken:
    """Return the access token that `az login` has stored, or request one with its refresh token.

    Raises AuthError if nobody has run `az login`, if its files are malformed or contain no token,
    or if the directory refuses the refresh token. `tried_sources` are for the error message.
    """
    try:
        profile = json.loads(_read_cli_file(machine, "azureProfile"))
        cache = json.loads(_read_cli_file(machine, "msal_token_cache"))
        subscription = _find_subscription(profile, cloud)
        if subscription is None:
            places = ", ".join((*tried_sources, "az login's ~/.azure"))
            raise AuthError(
                f"no Azure identity; looked at {places}", hint=_IDENTITY_HINT, fatal=True
            )

        tenant = subscription["tenantId"]
        access_tokens = _find_entries(cache, "AccessToken", subscription, cloud)
        refresh_tokens = _find_entries(cache, "RefreshToken", subscription, cloud)
        until = machine.wall() + _LEAST_TOKEN_LIFE
        value = _find_access_token(access_tokens, tenant, cloud, until)
        if value is not None:
            return _DirectoryToken("az login", value)
        request = _refresh_request(refresh_tokens, tenant, cloud)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        # The Azure CLI writes these files, and may change their format.
        raise AuthError(
            "`az login` has left no usable token in its files", hint=_CLI_HINT, fatal=True
        ) from None

    value = await _request_token(machine, request, cloud.audiences)
    return _DirectoryToken(request.found_at, value)


# The next five functions read JSON of unknown structure. `_obtain_cli_token` catches the exceptions
# that result from an unexpected structure.


def _find_subscription(profile: Any, cloud: _Cloud) -> Any | None:
    """Return a subscription in the given cloud, preferably the default subscription.

    Returns None if the profile has no subscription in this cloud.
    """
    subscriptions = [
        subscription
        for subscription in profile.get("subscriptions", ())
        if subscription["environmentName"] == cloud.name
    ]
    for subscription in subscriptions:
        if subscription.get("isDefault") is True:
            return subscription
    return subscriptions[0] if subscriptions else None


def _find_entries(cache: Any, section: str, subscription: Any, cloud: _Cloud) -> list[Any]:
    """Return the entries of one section of the token cache that belong to a subscription's user.

    `section` is `AccessToken` or `RefreshToken`.
    """
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


def _find_access_token(entries: list[Any], tenant: Any, cloud: _Cloud, until: float) -> str | None:
    """Return an access token for a registry in this cloud that is valid `until` the given time.

    `until` is in seconds since 1970. Returns None if there is no such token.
    """
    audience = f"https://{cloud.audiences[0]}/"
    for entry in entries:
        # `target` contains the scopes of the token, which begin with its audience.
        is_ours = entry["realm"] == tenant and entry["target"].startswith(audience)
        if is_ours and float(entry["expires_on"]) > until:
            return _text(entry["secret"])
    return None


def _refresh_request(entries: list[Any], tenant: Any, cloud: _Cloud) -> _TokenRequest:
    """Build a token request with the newest of the refresh tokens that `az login` has stored."""
    newest = max(entries, key=lambda entry: int(entry["last_modification_time"]))
    refresh_token = _text(newest["secret"])
    return _TokenRequest(
        found_at="az login",
        url=_authority_url(cloud.authority, tenant),
        fields=(
            ("grant_type", "refresh_token"),
            ("client_id", _CLI_CLIENT_ID),
            ("refresh_token", refresh_token),
        ),
        hint=_CLI_HINT,
        secret=refresh_token,
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError("not a text")


# Sending token requests.


async def _request_token(
    machine: CloudEnvironment, request: _TokenRequest, audiences: tuple[str, ...]
) -> str:
    """Request an access token for the first audience that the directory knows (section 6.2).

    Raises AuthError or RegistryError if no token is issued.
    """
    *first_choices, last = audiences
    for audience in first_choices:
        try:
            return await _request_token_for(machine, request, audience)
        except AuthError as error:  # try the next audience if this audience is unknown
            is_unknown = re.search(_UNKNOWN_AUDIENCE, error.message) is not None
            if not is_unknown:
                raise
    return await _request_token_for(machine, request, last)


async def _request_token_for(
    machine: CloudEnvironment, request: _TokenRequest, audience: str
) -> str:
    """Send a token request with a field for the audience added, and return the access token."""
    if request.is_to_metadata_service:
        audience_field = ("resource", f"https://{audience}")
    else:
        audience_field = ("scope", f"https://{audience}/.default")
    complete_request = request._replace(fields=(*request.fields, audience_field))
    return await _send(machine, complete_request, answer_field="access_token")


async def _send(machine: CloudEnvironment, request: _TokenRequest, *, answer_field: str) -> str:
    """Send a token request, and return the text in one field of its JSON answer.

    Raises RegistryError if a later attempt may succeed, and AuthError with the reason (section 6.2)
    if the request was refused.
    """
    fields = [(name, value) for name, value in request.fields if value]
    encoded_fields = urlencode(fields, errors="replace")
    with redacting(lambda: (request.secret,)):
        if request.is_to_metadata_service:
            url = f"{request.url}?{encoded_fields}"
            headers = [*request.metadata_headers]
            # A limit for the whole exchange. Otherwise only the connection's own timeouts apply.
            answer = await machine.fetch("GET", url, headers, b"", _TOKEN_SECONDS)
        else:
            headers = [("Content-Type", "application/x-www-form-urlencoded")]
            answer = await machine.fetch("POST", request.url, headers, encoded_fields.encode())
    text = (json_object(answer.body) or {}).get(answer_field)
    if answer.status == 200 and isinstance(text, str):
        return text

    shown_url = request.url.partition("?")[0]  # IDENTITY_ENDPOINT may contain a query
    reason = _reason(redact(answer.body.decode("utf-8", "replace"), [request.secret]))
    message = printable(f"{shown_url} refuses {request.found_at}: status {answer.status}: {reason}")
    is_temporary = answer.status == 429 or answer.status >= 500
    if is_temporary:
        wait = parse_retry_after(answer.headers.get("retry-after"), machine.wall())
        raise RegistryError(message, status=answer.status, retry_after=wait)
    raise AuthError(message, hint=request.hint, fatal=True)


def _reason(text: str) -> str:
    """Return the code and the first line of an error body.

    Later lines contain tenants and users.
    """
    words = r'"(?:error|code|error_description|message)" *: *"([^"\\]*)'
    return ": ".join(re.findall(words, text)[:2]).partition(" Trace ID")[0]
