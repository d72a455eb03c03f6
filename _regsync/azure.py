"""The identity that this machine has at Azure, made into a login at an Azure Container Registry.

Owns: where an identity is looked for, in which order, the words of the directory, metadata services and the exchange.
May not know: sockets, challenges, retries. Invariant: a secret goes to its cloud's (or the environment's) authority, a
metadata service or the registry, into no message; a source that is there and broken is an error, never a reason to try
the next. Follows specification section 5.2, protocol-facts.md section 6 (numbers below).
"""
from __future__ import annotations
import json
import math
import re
from base64 import urlsafe_b64decode
from typing import NamedTuple
from urllib.parse import quote, quote_plus, urlencode
from _regsync.config import Registry
from _regsync.credentials import Credential, Login, Machine, Pair
from _regsync.errors import AuthError, RegistryError, WireError, clean
from _regsync.pacing import parse_retry_after
__all__ = ["log_in", "present"]

_SECRET, _FILE, _SERVICE = "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "IDENTITY_ENDPOINT"
_METADATA, _PRESENT_WITHIN, _GIVEN_WITHIN = "http://169.254.169.254/metadata/identity/oauth2/token", 1.0, 30.0
_ASSERTION = ("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer")
_COMMAND_LINE = "04b07795-8ddb-461a-bbee-02f9e1bf7b46"  # its public client id
_ROLE = "the cloud's operator grants AcrPull (at targets AcrPush) on the registry to an identity of its tenant"
_POD = (
    "in Kubernetes the service account needs the annotation azure.workload.identity/client-id, and the pod the label "
    f'azure.workload.identity/use: "true"; elsewhere set {_SECRET}, or run az login; {_ROLE}')
_KEYRING = "run az login again as a user (a keyring? before it, az config set core.encrypt_token_cache=false)"
# What a suffix selects (6.2): the cloud's name, its authority, audiences in the order in which they are tried.
_CLOUDS = {"io": ("AzureCloud", "login.microsoftonline.com", "containerregistry.azure.net", "management.azure.com"),
    "cn": ("AzureChinaCloud", "login.chinacloudapi.cn", "containerregistry.azure.cn", "containerregistry.azure.net",
    "management.core.chinacloudapi.cn/"), "us": ("AzureUSGovernment", "login.microsoftonline.us",
    "containerregistry.azure.us", "containerregistry.azure.net", "management.core.usgovcloudapi.net/")}

class _Source(NamedTuple):
    """What gives a token of the directory: an authority (POST, for a scope) or a metadata service (GET, a resource)."""
    origin: str
    url: str
    fields: tuple[Pair, ...]
    hint: str
    secret: str  # what no message may show
    headers: tuple[Pair, ...] = ()  # a metadata service's
def present(machine: Machine) -> bool:
    """Say whether the environment or a session of the command line names an identity."""
    return any(map(machine.environ.get, (_SECRET, _FILE, _SERVICE))) or b"tenantId" in _session(machine, "azureProfile")
async def log_in(machine: Machine, registry: Registry, *, guessed: bool) -> Login | None:
    """Log in by the first identity there is; None where a guess finds none."""
    cloud, authority, *audiences = _CLOUDS.get(registry.host.rpartition(".azurecr.")[2], _CLOUDS["io"])
    looked, token, source = [_SECRET, _FILE, _SERVICE], "", None if guessed else _named(machine, authority)
    if source is None: source, token = await _of_machine(machine, audiences, looked)
    if source is None and guessed: return None
    source = source or _signed_in(machine, registry, cloud, authority, ", ".join(looked))
    token = token or await _token(machine, source, audiences)
    # It is good for the registry's refresh token, which tells its own life (6.1).
    fields = (("grant_type", "access_token"), ("service", registry.host), ("access_token", token))
    url = f"{registry.scheme}://{registry.authority}/oauth2/exchange"
    try: value = await _ask(machine, _Source(source.origin, url, fields, _ROLE, token), "refresh_token")
    except AuthError:
        if not guessed: raise
        return Login(Credential(), math.inf)  # this registry does not know the machine, but may let anybody pull
    try:
        claims = json.loads(urlsafe_b64decode(value.split(".")[1] + "=="))
        life = float(claims["exp"]) - float(claims.get("iat", machine.wall()))  # by its own clock: ours may be wrong
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError): life = math.inf
    user = "00000000-0000-0000-0000-000000000000"  # whose password is a refresh token
    return Login(Credential(user, identity_token=value, origin=source.origin), machine.wall() + life)
def _named(machine: Machine, authority: str) -> _Source | None:
    """Find what the environment names: a secret, a federated token (6.2), a service of managed identities (6.3)."""
    environ = machine.environ
    if (name := next(filter(environ.get, (_SECRET, _FILE, _SERVICE)), None)) is None: return None
    needed = ("IDENTITY_HEADER",) if name == _SERVICE else ("AZURE_CLIENT_ID", "AZURE_TENANT_ID")
    if lacking := " and ".join(each for each in needed if not environ.get(each)):
        raise AuthError(f"{name} is set without {lacking}", hint=_POD, fatal=True)
    proof, own = environ[name], [environ[each] for each in needed]
    if name == _SERVICE: return _managed(machine, name, proof, "2019-08-01", ("X-IDENTITY-HEADER", own[0]))
    if name == _FILE and not (proof := (machine.read(proof) or b"").decode("utf-8", "replace").strip()):
        raise AuthError(f"{clean(environ[name])}, which {name} names, is not there", hint=_POD, fatal=True)
    proven = (("client_secret", proof),) if name == _SECRET else (_ASSERTION, ("client_assertion", proof))
    fields = (("grant_type", "client_credentials"), ("client_id", own[0]), *proven)
    url = _endpoint(environ.get("AZURE_AUTHORITY_HOST") or authority, own[1])
    return _Source(name, url, fields, f"is it still good, and this application's? {_POD}", proof)
def _endpoint(authority: str, tenant: str) -> str:
    return f"https://{re.sub('^https?://|/+$', '', authority)}/{quote(tenant, safe='')}/oauth2/v2.0/token"
def _managed(machine: Machine, origin: str, url: str, version: str, *own: Pair) -> _Source:
    client, headers = machine.environ.get("AZURE_CLIENT_ID"), (("Metadata", "true"), *own)
    fields = (("api-version", version), *((("client_id", client),) if client else ()))
    return _Source(origin, url, fields, f"AZURE_CLIENT_ID chooses one of several; {_ROLE}", "".join(dict(own).values()),
        headers)
async def _of_machine(machine: Machine, audiences: list[str], looked: list[str]) -> tuple[_Source | None, str]:
    """Ask the metadata service of a virtual machine (6.3); None elsewhere, and where the machine has no identity."""
    source = _managed(machine, "the metadata service at 169.254.169.254", _METADATA, "2018-02-01")
    looked.append(source.origin)
    try:
        # A token may take seconds, where there is somebody to give it: who that is refuses this at once.
        status, _, _ = await machine.fetch("GET", f"{_METADATA}?api-version=2018-02-01", [], b"", _PRESENT_WITHIN)
        if status not in (401, 403, 404): return source, await _token(machine, source, audiences)
    except (AuthError, WireError) as error: looked[-1] += f" ({error.message})"
    return None, ""
def _session(machine: Machine, name: str) -> bytes:
    return (machine.read(f"{machine.environ.get('AZURE_CONFIG_DIR') or f'{machine.home or str()}/.azure'}/{name}.json")
        or b"{}")
def _signed_in(machine: Machine, registry: Registry, cloud: str, authority: str, places: str) -> _Source:
    """Find the newest refresh token of the command line's session in a cloud (6.4); its files are never written."""
    try:
        profile, cache = (json.loads(_session(machine, name)) for name in ("azureProfile", "msal_token_cache"))
        mine = [each for each in profile.get("subscriptions", ()) if each["environmentName"] == cloud]
        if not mine:
            missing = f"no identity at Azure for {registry.authority}; looked at {places}, az login's ~/.azure"
            raise AuthError(missing, hint=_POD, fatal=True)
        chosen = max(mine, key=lambda each: each.get("isDefault") is True)
        accounts, tokens = cache["Account"].values(), cache["RefreshToken"].values()
        who = [each["home_account_id"] for each in accounts if each["username"] == chosen["user"]["name"]]
        ours = [each for each in tokens if each["home_account_id"] in who and each["environment"] == authority]
        secret = max(ours, key=lambda each: int(each["last_modification_time"]))["secret"]
        fields = (("grant_type", "refresh_token"), ("client_id", _COMMAND_LINE), ("refresh_token", secret))
        return _Source("az login", _endpoint(authority, chosen["tenantId"]), fields, _KEYRING, secret)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        raise AuthError("az login has left no token in its files", hint=_KEYRING, fatal=True) from None
async def _token(machine: Machine, source: _Source, audiences: list[str]) -> str:
    """Return a source's token for the first audience that the directory knows (6.2)."""
    audience, *others = (f"https://{each}" for each in audiences)
    wanted = ("resource", audience) if source.headers else ("scope", f"{audience}/.default")
    try: return await _ask(machine, source._replace(fields=(*source.fields, wanted)), "access_token")
    except AuthError as error:
        if not others or not re.search("AADSTS(?:500011|65001)|invalid_resource", error.message): raise
    return await _token(machine, source, audiences[1:])
async def _ask(machine: Machine, source: _Source, wanted: str) -> str:
    """Do one exchange; RegistryError when it may be repeated, AuthError with the other end's words (6.2)."""
    form, kind = urlencode(source.fields), [("Content-Type", "application/x-www-form-urlencoded")]
    status, told, body = await (machine.fetch("GET", f"{source.url}?{form}", [*source.headers], b"", _GIVEN_WITHIN)
        if source.headers else machine.fetch("POST", source.url, kind, form.encode()))
    try: value = json.loads(body)[wanted] if status == 200 else None
    except (ValueError, LookupError, TypeError, RecursionError): value = None
    if isinstance(value, str): return value
    # Code and first line: what follows names tenants and users.
    words = r'"(?:error|code|error_description|message)" *: *"([^"\\]*)'
    said = ": ".join(re.findall(words, body.decode("utf-8", "replace"))[:2]).partition(" Trace ID")[0]
    for each in (source.secret, quote_plus(source.secret)): said = said.replace(each or "\0", "***")
    said = clean(f"{source.url.partition('?')[0]} refuses {source.origin}: status {status}: {said}", 400)
    if status != 429 and status < 500: raise AuthError(said, hint=source.hint, fatal=True)
    raise RegistryError(said, status=status, retry_after=parse_retry_after(told.get("retry-after"), machine.wall()))
