"""Login to Azure Container Registry with this machine's Azure identity.

The sources of an identity are the functions in `_SOURCES`, in their order. Each obtains a token of
Microsoft Entra ID ("the directory"), which the registry exchanges for a refresh token of its own.
A secret is only sent to its authority, to a metadata service or to the registry, and appears in no
message. A broken source of an identity is an error. The files of the Azure CLI are only read.
Follows: docs/specification.md section 5.2, docs/protocol-facts.md section 6 (cited by number).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from _regsync import edge
from _regsync.auth.cloud import Access, Login, Request, ask, first_found, jwt_lifetime
from _regsync.auth.credentials import Credential, Pair
from _regsync.config import Registry
from _regsync.errors import AuthError, WireError
from _regsync.net.wire import Response
from _regsync.text import json_object, keep_passing_secret, printable

# Environment variables, each of which selects a source of an identity.
_SECRET_VARIABLE = "AZURE_CLIENT_SECRET"
_FILE_VARIABLE = "AZURE_FEDERATED_TOKEN_FILE"
_ENDPOINT_VARIABLE = "IDENTITY_ENDPOINT"  # the managed identity service of App Service and others

# The metadata service of virtual machines (section 6.3).
_METADATA_URL = "http://169.254.169.254/metadata/identity/oauth2/token"
_METADATA_NAME = "the metadata service 169.254.169.254"

# Statuses with which the metadata services of other clouds, at the same address, answer the check.
# Azure's service answers the check with 400.
_STATUSES_OF_OTHER_SERVERS = (401, 403, 404)

# Values of the parameter `api-version`.
_METADATA_API_VERSION = "2018-02-01"
_ENDPOINT_API_VERSION = "2019-08-01"  # of the service at IDENTITY_ENDPOINT

_PROBE_SECONDS = 1.0  # timeout of the request that checks whether a metadata service exists
_TOKEN_SECONDS = 30.0  # timeout for a token from a metadata service

_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"

_CLI_NAME = "az login"  # in messages

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


class _Token(NamedTuple):
    """An access token of the directory."""

    source: str  # of the identity, for messages
    value: str

    def __repr__(self) -> str:
        return "<Token>"


def is_configured(access: Access) -> bool:
    """Report whether an environment variable or a login of the Azure CLI provides an identity."""
    names = (_SECRET_VARIABLE, _FILE_VARIABLE, _ENDPOINT_VARIABLE)
    if any(map(edge.variable, names)):
        return True
    return b"tenantId" in _read_cli_file(access, "azureProfile")


async def log_in(access: Access, registry: Registry, *, probing_metadata: bool) -> Login:
    """Exchange a token of this machine's identity for a registry refresh token (section 6.1).

    Raises AuthError if there is no identity. If `probing_metadata` is true, only the metadata
    service is asked.
    """
    suffix = registry.host.rpartition(".azurecr.")[2]
    cloud = _CLOUDS.get(suffix, _CLOUDS["io"])
    sources = (_from_metadata,) if probing_metadata else _SOURCES
    token = await first_found(
        [partial(source, access, cloud) for source in sources],
        registry,
        missing="Azure identity",
        hint=_IDENTITY_HINT,
    )
    url = f"{registry.scheme}://{registry.authority}/oauth2/exchange"
    form = [
        ("grant_type", "access_token"),
        ("service", registry.host),
        ("access_token", token.value),
    ]
    request = _form_request(url, form, token.source, _ROLE_HINT, token.value)
    refresh_token = await ask(access, request, partial(_field, "refresh_token"))
    now = edge.current().wall()
    life = jwt_lifetime(refresh_token, now)
    credential = Credential(_TOKEN_USER, identity_token=refresh_token, found_at=token.source)
    return Login(credential, math.inf if life is None else now + life)


# The sources. Each returns a token, or the place where it has found nothing.


async def _from_secret(access: Access, cloud: _Cloud) -> _Token | str:
    """Log in as the application AZURE_CLIENT_ID with its secret."""
    secret = edge.variable(_SECRET_VARIABLE)
    if not secret:
        return _SECRET_VARIABLE
    proof = [("client_secret", secret)]
    request = _application_request(cloud, _SECRET_VARIABLE, proof, secret)
    return await _ask_directory(access, cloud, request)


async def _from_federation(access: Access, cloud: _Cloud) -> _Token | str:
    """Log in as the application AZURE_CLIENT_ID with a token of another identity provider."""
    path = edge.variable(_FILE_VARIABLE)
    if not path:
        return _FILE_VARIABLE
    token = (access.read(path) or b"").decode("utf-8", "replace").strip()
    if not token:
        raise AuthError(
            f"{_FILE_VARIABLE} names {printable(path)}, which is missing or empty",
            hint=_IDENTITY_HINT,
            fatal=True,
        )
    proof = [("client_assertion_type", _ASSERTION_TYPE), ("client_assertion", token)]
    request = _application_request(cloud, _FILE_VARIABLE, proof, token)
    return await _ask_directory(access, cloud, request)


async def _from_endpoint(access: Access, cloud: _Cloud) -> _Token | str:
    """Log in as the managed identity of App Service and others (section 6.3)."""
    url = edge.variable(_ENDPOINT_VARIABLE)
    if not url:
        return _ENDPOINT_VARIABLE
    (secret,) = _required_variables(_ENDPOINT_VARIABLE, "IDENTITY_HEADER")
    request = _managed_request(url, _ENDPOINT_API_VERSION, _ENDPOINT_VARIABLE)
    headers = [*request.headers, ("X-IDENTITY-HEADER", secret)]
    hint = f"check {_ENDPOINT_VARIABLE}; {_ROLE_HINT}"
    keep_passing_secret(secret)
    request = request._replace(headers=headers, hint=hint)
    return await _ask_directory(access, cloud, request)


async def _from_metadata(access: Access, cloud: _Cloud) -> _Token | str:
    """Log in as the managed identity of a virtual machine (section 6.3).

    A machine without one is no error: a user may have run `az login` on it.
    """
    # The service refuses a request without the header `Metadata` at once, with status 400. This
    # check is faster than a token request, which may take seconds.
    request = _managed_request(_METADATA_URL, _METADATA_API_VERSION, _METADATA_NAME)
    try:
        answer = await access.fetch("GET", request.url, [], b"", _PROBE_SECONDS)
        if answer.status in _STATUSES_OF_OTHER_SERVERS:
            return _METADATA_NAME
        return await _ask_directory(access, cloud, request)
    except AuthError as error:
        if error.code != AuthError.code:  # the service is there, and does not work
            raise
        return error.message  # which begins with the service's name
    except WireError as error:
        return f"{_METADATA_NAME}: {error.message}"


async def _from_cli(access: Access, cloud: _Cloud) -> _Token | str:
    """Log in with the refresh token that `az login` has stored."""
    try:
        request = _read_cli_login(access, cloud)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        # The Azure CLI writes these files, and may change their format.
        raise AuthError(
            "`az login` has left no usable token in its files", hint=_CLI_HINT, fatal=True
        ) from None
    if request is None:
        return "az login's ~/.azure"
    return await _ask_directory(access, cloud, request)


_SOURCES = (_from_secret, _from_federation, _from_endpoint, _from_metadata, _from_cli)


# The token requests of the sources. The field for the audience is still missing.


def _application_request(cloud: _Cloud, variable: str, proof: list[Pair], secret: str) -> Request:
    """Build a token request for the application AZURE_CLIENT_ID (section 6.2).

    `proof` are the fields with the `secret` that the `variable` holds or names. Raises AuthError if
    a further variable is missing.
    """
    required = ("AZURE_CLIENT_ID", "AZURE_TENANT_ID")
    client_id, tenant = _required_variables(variable, *required)
    host = edge.variable("AZURE_AUTHORITY_HOST") or cloud.authority
    url = _token_url(re.sub("^https?://|/+$", "", host), tenant)
    form = [("grant_type", "client_credentials"), ("client_id", client_id), *proof]
    return _form_request(url, form, variable, _IDENTITY_HINT, secret)


def _required_variables(name: str, *required: str) -> list[str]:
    """Return the values of the variables that the variable `name` requires.

    Raises AuthError unless all of them are set.
    """
    missing = [variable for variable in required if not edge.variable(variable)]
    if missing:
        message = f"{name} is set without {' and '.join(missing)}"
        raise AuthError(message, hint=_IDENTITY_HINT, fatal=True)
    return [edge.current().environ[variable] for variable in required]


def _token_url(host: str, tenant: str) -> str:
    return f"https://{host}/{quote(tenant, errors='replace')}/oauth2/v2.0/token"


def _form_request(url: str, form: Sequence[Pair], source: str, hint: str, secret: str) -> Request:
    headers = [("Content-Type", "application/x-www-form-urlencoded")]
    body = urlencode(form, errors="replace").encode()
    keep_passing_secret(secret)
    return Request("POST", url, headers, body, source, hint)


def _managed_request(url: str, api_version: str, source: str) -> Request:
    """Build a token request to a service of managed identities at `url`."""
    query = {"api-version": api_version}
    client_id = edge.variable("AZURE_CLIENT_ID")
    if client_id:
        query["client_id"] = client_id
    url = f"{url}?{urlencode(query, errors='replace')}"
    headers = [("Metadata", "true")]
    return Request("GET", url, headers, source=source, hint=_ROLE_HINT, seconds=_TOKEN_SECONDS)


# The login of the Azure CLI (section 6.4).


def _read_cli_file(access: Access, name: str) -> bytes:
    """Return the content of a JSON file of the Azure CLI, or `{}` if the file does not exist."""
    folder = edge.variable("AZURE_CONFIG_DIR") or f"{edge.home() or ''}/.azure"
    return access.read(f"{folder}/{name}.json") or b"{}"


def _read_cli_login(access: Access, cloud: _Cloud) -> Request | None:
    """Return the token request with the refresh token that `az login` has stored.

    Returns None if nobody is logged in to this cloud. The structure of the files is not checked
    before: raises LookupError, TypeError, ValueError and others if it is unknown.
    """
    profile: Any = json.loads(_read_cli_file(access, "azureProfile"))
    subscriptions = [
        subscription
        for subscription in profile.get("subscriptions", ())
        if subscription["environmentName"] == cloud.name
    ]
    if not subscriptions:
        return None
    # The default subscription is preferred.
    subscription = max(subscriptions, key=lambda each: each.get("isDefault") is True)
    tenant = subscription["tenantId"]

    cache: Any = json.loads(_read_cli_file(access, "msal_token_cache"))
    user = subscription["user"]["name"].lower()  # msal compares names so
    accounts = [
        account["home_account_id"]
        for account in cache["Account"].values()
        if account["username"].lower() == user
    ]
    stored = [
        entry
        for entry in cache["RefreshToken"].values()
        if entry["home_account_id"] in accounts and entry["environment"] == cloud.authority
    ]
    newest = max(stored, key=lambda each: int(each["last_modification_time"]))
    refresh_token = _text(newest["secret"])
    form = [
        ("grant_type", "refresh_token"),
        ("client_id", _CLI_CLIENT_ID),
        ("refresh_token", refresh_token),
    ]
    url = _token_url(cloud.authority, tenant)
    return _form_request(url, form, _CLI_NAME, _CLI_HINT, refresh_token)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError("not a text")


# Asking.


async def _ask_directory(access: Access, cloud: _Cloud, request: Request) -> _Token:
    """Request an access token for the first audience that the directory knows (section 6.2).

    Raises AuthError if no token is issued.
    """

    async def obtain(audience: str) -> _Token:
        complete = _for_audience(request, audience)
        token = await ask(access, complete, partial(_field, "access_token"))
        return _Token(request.source, token)

    *first_choices, last = cloud.audiences
    for audience in first_choices:
        try:
            return await obtain(audience)
        except AuthError as error:
            is_unknown = re.search(_UNKNOWN_AUDIENCE, error.message) is not None
            if not is_unknown:
                raise
    return await obtain(last)


def _for_audience(request: Request, audience: str) -> Request:
    """Add the field for the audience to the query for a metadata service, or to a form."""
    resource = f"https://{audience}"
    if request.method == "GET":
        return request._replace(url=f"{request.url}&{urlencode({'resource': resource})}")
    scope = urlencode({"scope": f"{resource}/.default"})
    return request._replace(body=request.body + f"&{scope}".encode())


def _field(name: str, answer: Response) -> str | None:
    """Return a text in an answer's JSON object. Returns None if there is none, or an empty one."""
    value = (json_object(answer.body) or {}).get(name)
    return value if value and isinstance(value, str) else None
