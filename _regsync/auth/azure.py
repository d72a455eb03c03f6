"""The identity that this machine has at Azure, made into a login at an Azure Container Registry.
Owns: where an identity is looked for, the words of the directory, metadata services and the
exchange. May not know: sockets, challenges, retries. Invariant: a secret goes to its authority, a
metadata service or the registry, into no message; a source that is broken is an error. Follows
docs/specification.md 5.2, docs/protocol-facts.md 6 (numbers below)."""

from __future__ import annotations

import json
import math
import re
from typing import NamedTuple
from urllib.parse import quote, urlencode

from _regsync.auth.cloud import Login, Machine, life_of
from _regsync.auth.credentials import Credential, Pair
from _regsync.config.model import Registry
from _regsync.errors import AuthError, RegistryError, WireError
from _regsync.net.http1 import parse_retry_after
from _regsync.text import clean, hide, json_object

_SECRET = "AZURE_CLIENT_SECRET"


_FILE = "AZURE_FEDERATED_TOKEN_FILE"


_SERVICE = "IDENTITY_ENDPOINT"


_METADATA = "http://169.254.169.254/metadata/identity/oauth2/token"


_MACHINE = "the metadata service 169.254.169.254"


_ASSERTION = ("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer")


# seconds; client id
_SEEN = 1.0


_GIVEN = 30.0


_GOOD = 300.0


_COMMAND_LINE = "04b07795-8ddb-461a-bbee-02f9e1bf7b46"


_ROLE = (
    "AZURE_CLIENT_ID chooses an identity, to which the cloud's operator grants AcrPull (at targets AcrPush); for "
    "public images use auth_type: anonymous"
)


_POD = (
    "in Kubernetes the service account needs the annotation azure.workload.identity/client-id, the pod the label "
    f'azure.workload.identity/use: "true"; elsewhere set {_SECRET}, or run az login; {_ROLE}'
)


_KEYRING = "run az login again as a user (a keyring? before it, az config set core.encrypt_token_cache=false)"


# What a suffix selects (6.2): the cloud's name, its authority, audiences in the order in which they
# are tried.
_CLOUDS = {
    "io": (
        "AzureCloud",
        "login.microsoftonline.com",
        "containerregistry.azure.net",
        "management.azure.com",
    ),
    "cn": (
        "AzureChinaCloud",
        "login.chinacloudapi.cn",
        "containerregistry.azure.cn",
        "containerregistry.azure.net",
        "management.core.chinacloudapi.cn/",
    ),
    "us": (
        "AzureUSGovernment",
        "login.microsoftonline.us",
        "containerregistry.azure.us",
        "containerregistry.azure.net",
        "management.core.usgovcloudapi.net/",
    ),
}


class _Source(NamedTuple):
    """What gives a token of the directory: an authority (POST, for a scope) or a metadata service
    (GET, a resource).
    """

    origin: str
    url: str
    fields: tuple[Pair, ...]
    hint: str
    secret: str  # what no message may show; without a URL it is the token
    headers: tuple[Pair, ...] = ()  # a metadata service's

    def __repr__(self) -> str:
        return "<Source>"  # it holds secrets


def present(machine: Machine) -> bool:
    """Say whether the environment or a session of the command line names an identity."""
    return any(map(machine.environ.get, (_SECRET, _FILE, _SERVICE))) or b"tenantId" in _session(
        machine, "azureProfile"
    )


async def log_in(machine: Machine, registry: Registry, *, guessed: bool) -> Login | None:
    """Log in by the first identity there is, whose token is good for a refresh token (6.1); None
    for a wrong guess.
    """
    cloud, authority, *audiences = _CLOUDS.get(
        registry.host.rpartition(".azurecr.")[2], _CLOUDS["io"]
    )
    looked = [_SECRET, _FILE, _SERVICE, _MACHINE]
    source = None if guessed else _named(machine, authority)
    source = source or await _of_machine(machine, audiences, looked)
    if source is None and guessed:
        return None
    source = source or _signed_in(machine, ", ".join(looked), cloud, authority, audiences[0])
    token = await _token(machine, source, audiences) if source.url else source.secret
    fields = (("grant_type", "access_token"), ("service", registry.host), ("access_token", token))
    url = f"{registry.scheme}://{registry.authority}/oauth2/exchange"
    try:
        value = await _ask(
            machine, _Source(source.origin, url, fields, _ROLE, token), "refresh_token"
        )
    except AuthError:
        if not guessed:
            raise
        return Login(
            Credential(), math.inf
        )  # this registry does not know the machine, but may let anybody pull
    user = "00000000-0000-0000-0000-000000000000"
    life = life_of(value, now := machine.wall())
    return Login(
        Credential(user, identity_token=value, origin=source.origin),
        math.inf if life is None else now + life,
    )


def _named(machine: Machine, authority: str) -> _Source | None:
    """Find what the environment names: a secret, a federated token (6.2), a service of managed
    identities (6.3).
    """
    environ = machine.environ
    if (name := next(filter(environ.get, (_SECRET, _FILE, _SERVICE)), None)) is None:
        return None
    needed = ("IDENTITY_HEADER",) if name == _SERVICE else ("AZURE_CLIENT_ID", "AZURE_TENANT_ID")
    if lacking := " and ".join(each for each in needed if not environ.get(each)):
        raise AuthError(f"{name} is set without {lacking}", hint=_POD, fatal=True)
    proof = environ[name]
    own = [environ[each] for each in needed]
    if name == _SERVICE:
        return _managed(machine, name, proof, "2019-08-01", ("X-IDENTITY-HEADER", own[0]))
    if name == _FILE and not (
        proof := (machine.read(proof) or b"").decode("utf-8", "replace").strip()
    ):
        raise AuthError(
            f"{clean(environ[name])}, which {name} names, is not there", hint=_POD, fatal=True
        )
    proven = (
        (("client_secret", proof),)
        if name == _SECRET
        else (_ASSERTION, ("client_assertion", proof))
    )
    fields = (("grant_type", "client_credentials"), ("client_id", own[0]), *proven)
    host = re.sub("^https?://|/+$", "", environ.get("AZURE_AUTHORITY_HOST") or authority)
    return _Source(
        name,
        f"https://{host}/{quote(own[1], errors='replace')}/oauth2/v2.0/token",
        fields,
        _POD,
        proof,
    )


def _managed(machine: Machine, origin: str, url: str, version: str, *own: Pair) -> _Source:
    fields = (("api-version", version), ("client_id", machine.environ.get("AZURE_CLIENT_ID", "")))
    return _Source(
        origin, url, fields, _ROLE, own[0][1] if own else "", (("Metadata", "true"), *own)
    )


async def _of_machine(machine: Machine, wanted: list[str], looked: list[str]) -> _Source | None:
    """Ask the metadata service of a virtual machine (6.3); None elsewhere, and where the machine
    has no identity.
    """
    source = _managed(machine, looked[-1], _METADATA, "2018-02-01")
    try:
        # A token may take seconds, where there is somebody to give it: who that is refuses this at
        # once.
        status, _, _ = await machine.fetch(
            "GET", f"{_METADATA}?api-version=2018-02-01", [], b"", _SEEN
        )
        if status not in (401, 403, 404):
            return source._replace(url="", secret=await _token(machine, source, wanted))
    except (AuthError, WireError) as error:
        looked[-1] += f" ({error.message})"
    return None


def _session(machine: Machine, name: str) -> bytes:
    folder = machine.environ.get("AZURE_CONFIG_DIR") or f"{machine.home or ''}/.azure"
    return machine.read(f"{folder}/{name}.json") or b"{}"


def _signed_in(machine: Machine, looked: str, cloud: str, host: str, audience: str) -> _Source:
    """Find a token of the command line's session in a cloud (6.4), whose files are never written."""
    try:
        profile, cache = (
            json.loads(_session(machine, name)) for name in ("azureProfile", "msal_token_cache")
        )
        mine = [one for one in profile.get("subscriptions", ()) if one["environmentName"] == cloud]
        if not mine:
            raise AuthError(
                f"no identity at Azure; looked at {looked}, az login's ~/.azure",
                hint=_POD,
                fatal=True,
            )
        own = max(mine, key=lambda one: one.get("isDefault") is True)
        who = [
            one["home_account_id"]
            for one in cache["Account"].values()
            if one["username"] == own["user"]["name"]
        ]
        held = [
            [
                one
                for one in cache[kind].values()
                if one["home_account_id"] in who and one["environment"] == host
            ]
            for kind in ("AccessToken", "RefreshToken")
        ]
        for one in held[0]:
            fits = one["realm"] == own["tenantId"] and one["target"].startswith(
                f"https://{audience}/"
            )
            if fits and float(one["expires_on"]) > machine.wall() + _GOOD:
                return _Source("az login", "", (), "", "" + one["secret"])
        secret = "" + max(held[1], key=lambda one: int(one["last_modification_time"]))["secret"]
        fields = (
            ("grant_type", "refresh_token"),
            ("client_id", _COMMAND_LINE),
            ("refresh_token", secret),
        )
        return _Source(
            "az login",
            f"https://{host}/{quote(own['tenantId'], errors='replace')}/oauth2/v2.0/token",
            fields,
            _KEYRING,
            secret,
        )
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise AuthError(
            "az login has left no token in its files", hint=_KEYRING, fatal=True
        ) from None


async def _token(machine: Machine, source: _Source, audiences: list[str]) -> str:
    """Return a source's token for the first audience that the directory knows (6.2)."""
    wanted = (
        ("resource", f"https://{audiences[0]}")
        if source.headers
        else ("scope", f"https://{audiences[0]}/.default")
    )
    try:
        return await _ask(machine, source._replace(fields=(*source.fields, wanted)), "access_token")
    except AuthError as error:
        if len(audiences) == 1 or not re.search(
            "AADSTS(?:500011|65001)|invalid_resource", error.message
        ):
            raise
    return await _token(machine, source, audiences[1:])


async def _ask(machine: Machine, source: _Source, wanted: str) -> str:
    """Do one exchange; RegistryError when it may be repeated, AuthError with the other end's words
    (6.2).
    """
    form = urlencode([*filter(all, source.fields)], errors="replace")
    kind = [("Content-Type", "application/x-www-form-urlencoded")]
    status, told, body = await (
        machine.fetch("GET", f"{source.url}?{form}", [*source.headers], b"", _GIVEN)
        if source.headers
        else machine.fetch("POST", source.url, kind, form.encode())
    )
    value = (json_object(body) or {}).get(wanted)
    if status == 200 and isinstance(value, str):
        return value
    # Code and first line: what follows names tenants and users.
    words = r'"(?:error|code|error_description|message)" *: *"([^"\\]*)'
    said = hide(body.decode("utf-8", "replace"), source.secret)
    said = ": ".join(re.findall(words, said)[:2]).partition(" Trace ID")[0]
    said = clean(f"{source.url.partition('?')[0]} refuses {source.origin}: status {status}: {said}")
    if status != 429 and status < 500:
        raise AuthError(said, hint=source.hint, fatal=True)
    raise RegistryError(
        said, status=status, retry_after=parse_retry_after(told.get("retry-after"), machine.wall())
    )
