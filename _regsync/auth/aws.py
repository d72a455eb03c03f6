"""Logging in to ECR and ECR Public by the identity that AWS gave to this machine.

Owns: the host names of AWS's services, exchanges with them, the chain of sources of keys.
May not know: challenges, sockets, files.
Invariants: a secret goes to AWS's own hosts or to a metadata service, and into no message. A source
that is named, or broken, is never passed over for another one; no file is written (R8, R19).
Follows: docs/protocol-facts.md section 4 (numbers below) and section 9.2.
"""

from __future__ import annotations

import configparser
import json
import math
import re
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlencode

import anyio

from _regsync.auth.cloud import Answer, CloudEnvironment, Login
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.sigv4 import Request, sign
from _regsync.config.model import Registry
from _regsync.crypto import name_hash
from _regsync.errors import AuthError, ConfigError, WireError
from _regsync.text import json_object, printable, redact, redacting


class _Partition(NamedTuple):
    """One of AWS's partitions (section 4.1): how the names of its regions begin, and how the names
    of its hosts end.
    """

    region_start: str
    suffix: str
    dual_suffix: str  # of hosts that have IPv6 addresses as well


# The last partition has all other regions.
_PARTITIONS = (
    _Partition("us-gov-", "amazonaws.com", "api.aws"),
    _Partition("cn-", "amazonaws.com.cn", "api.amazonwebservices.com.cn"),
    _Partition("eusc-", "amazonaws.eu", "api.amazonwebservices.eu"),
    _Partition("us-iso-", "c2s.ic.gov", "api.aws.ic.gov"),
    _Partition("us-isob-", "sc2s.sgov.gov", "api.aws.scloud"),
    _Partition("eu-isoe-", "cloud.adc-e.uk", "api.cloud-aws.adc-e.uk"),
    _Partition("us-isof-", "csp.hci.ic.gov", "api.aws.hci.ic.gov"),
    _Partition("", "amazonaws.com", "api.aws"),
)

# Names of variables, without AWS_ and in lower case. Fields of a profile have the same names.
_ACCESS_KEY = "access_key_id"
_TOKEN_FILE = "web_identity_token_file"
_CONTAINER_PATH = "container_credentials_relative_uri"
_CONTAINER_URL = "container_credentials_full_uri"
_PROFILE_NAMES = ("default_profile", "profile")

# Settings of a profile that name no identity.
_OTHER_SETTINGS = {"region", "output"}

# Where a container's credentials may come from: https, loopback, or addresses of metadata services.
_CONTAINER_SERVICES = r"https://.+|http://(localhost|127(\.\d+){3}|169\.254\.170\.23?|\[(::1|fd00:ec2::23)\])(:\d+)?(/.*)?"

# ACCOUNT.dkr.ecr[-fips].REGION.SUFFIX, or ACCOUNT.dkr-ecr[-fips].REGION.on.aws.
_ECR_HOST = r"[0-9]{12}\.dkr[.-]ecr(?P<fips>-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<dual>on\.aws)?"

_ATTEMPTS = 3
_PAUSE = 1.0  # seconds between two attempts
_CONTAINER_SECONDS = 2.0  # for an answer of a container's credential service
_INSTANCE_SECONDS = 1.0  # for an answer of EC2's metadata service
_SSO_MARGIN = 60.0  # seconds for which a session of SSO must still serve

# Parts of the names of errors after which the same request may succeed.
_TEMPORARY_ERRORS = "Throttl|TooMany|IDPComm"


def endpoint(service: str, region: str, fips: bool = False, dual: bool = False) -> str:
    """Return the host of one of AWS's APIs in a region (docs/protocol-facts.md section 4.2).

    `service` is `ecr`, `ecr-public`, `sts`, `portal.sso` or `oidc`. `fips` asks for the endpoint with
    validated cryptography, `dual` for the one that has IPv6 addresses as well.
    """
    partition = next(row for row in _PARTITIONS if region.startswith(row.region_start))
    fips_mark = "-fips" if fips else ""
    if dual:  # these hosts are named alike everywhere
        return f"{service}{fips_mark}.{region}.{partition.dual_suffix}"

    if service.startswith("ecr"):
        # AWS's SDKs use `api.ecr-fips` everywhere. Its documentation has `ecr-fips` for the partitions
        # of this suffix.
        is_documented_fips = fips and service == "ecr" and partition.suffix == "amazonaws.com"
        api = "" if is_documented_fips else "api."
        return f"{api}{service}{fips_mark}.{region}.{partition.suffix}"

    # In GovCloud the plain names of the other services are FIPS endpoints already.
    if partition.region_start == "us-gov-":
        fips_mark = ""
    return f"{service}{fips_mark}.{region}.{partition.suffix}"


def is_configured(machine: CloudEnvironment) -> bool:
    """Return whether a variable or a file offers an identity; AuthError or ConfigError for a broken
    file.
    """
    settings = _Settings(machine, None)
    names = (_ACCESS_KEY, _TOKEN_FILE, _CONTAINER_PATH, _CONTAINER_URL, *_PROFILE_NAMES)
    if any(settings.variables.get(name) for name in names):
        return True
    return bool(settings.profile.keys() - _OTHER_SETTINGS)


async def log_in(
    machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
) -> Login | None:
    """Get a password for ECR or ECR Public (section 4.3) by the first keys that there are; AuthError
    where there are none.

    With `probing_metadata`, only EC2's metadata service is asked for keys. None where it gives none.
    """
    api = await _find_api(machine, registry, probing_metadata=probing_metadata)
    if api is None:
        return None
    is_public = registry.kind == "ecr_public"
    more_rights = ""
    if is_public:
        more_rights = " and sts:GetServiceBearerToken, or use auth_type: anonymous"
    try:
        answer = await api.ask("GetAuthorizationToken", {}, more_rights)
    except AuthError:
        if probing_metadata and is_public:
            # Nobody has asked for a login with this machine's role. ECR Public lets anybody read.
            return Login(Credential(), math.inf)
        raise
    return _read_login(_fields_of(answer), api.service, api.keys.found_at)


class _Api(NamedTuple):
    """The API of ECR or ECR Public, asked with keys of this machine."""

    client: _Client
    keys: Credential
    service: str
    region: str

    def __repr__(self) -> str:
        return "<Api>"  # it holds secrets

    async def ask(self, action: str, fields: dict[str, str], more_rights: str = "") -> str:
        """Return the answer to an action; AuthError where the keys may not do it.

        The error's hint names the right to allow. `more_rights` are its next words.
        """
        is_public = self.service == "ecr-public"
        # AWS's own name of the API, by which a request names an action of it.
        name = "SpencerFrontendService" if is_public else "AmazonEC2ContainerRegistry_V20150921"
        headers = [
            ("Content-Type", "application/x-amz-json-1.1"),
            ("X-Amz-Target", f"{name}.{action}"),
        ]
        body = json.dumps(fields).encode()
        request = self.client.request(self.service, self.region, headers, body)
        hint = f"allow this identity {self.service}:{action}{more_rights}"
        return await self.client.ask(request, hint, keys=self.keys)


async def _find_api(
    machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
) -> _Api | None:
    """Return the API of a registry, with this machine's keys for it; AuthError where there are none.

    With `probing_metadata`, only EC2's metadata service is asked for keys. None where it gives none.
    """
    settings = _Settings(machine, registry.cloud_profile)
    ecr_host = re.match(_ECR_HOST, registry.host)
    if registry.kind == "ecr_public":
        region = "us-east-1"  # its API is in this region alone
    elif ecr_host:
        region = ecr_host["region"]
    else:
        # By `auth_type` the host is ECR, but its name, as that of a proxy, has no region.
        region = settings.sts_region

    # The services that give keys (STS, SSO) are asked as the settings say.
    fips = settings.is_set("use_fips_endpoint")
    dual = settings.is_set("use_dualstack_endpoint")
    chain = _KeyChain(machine, settings, _Client(machine, fips, dual), region)
    keys = await (chain.from_instance() if probing_metadata else chain.find())
    if keys is None:
        if probing_metadata:
            return None
        raise _error(
            f"no AWS credentials for {registry.host}; looked at {', '.join(chain.looked_at)}",
            "give this machine or container a role, or set AWS_PROFILE, "
            "or AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY",
        )

    # The registry's own API is of the kind that its host is of, too.
    if ecr_host:
        fips = fips or ecr_host["fips"] is not None
        dual = dual or ecr_host["dual"] is not None
    service = registry.kind.replace("_", "-")
    return _Api(_Client(machine, fips, dual), keys, service, region)


class EcrAccount(NamedTuple):
    """What ECR's API tells of the account that a registry belongs to."""

    # Whether blobs are mounted between repositories; None: not known.
    mounts: bool | None = None

    # Prefixes of the repositories that a push creates; None: not known.
    created_on_push: tuple[str, ...] | None = None

    # Why something is not known.
    reason: str = ""

    def template_for(self, repository: str) -> str | None:
        """Return the prefix of a creation template by which a push creates a repository."""
        for prefix in self.created_on_push or ():
            if prefix == "ROOT" or repository.startswith(f"{prefix}/"):
                return prefix
        return None


async def read_account(machine: CloudEnvironment, registry: Registry) -> EcrAccount:
    """Ask ECR's API about the account of a registry (section 4.9); nothing is changed there.

    What the keys may not read is no error: it stays unknown, and the account has the `reason`.
    """
    account = EcrAccount()
    try:
        api = await _find_api(machine, registry, probing_metadata=False)
        assert api is not None  # without probing, there are keys or an AuthError
        answer = await api.ask("DescribeRepositoryCreationTemplates", {})
        document = json_object(answer.encode()) or {}
        owner = str(document.get("registryId"))
        if not registry.host.startswith(f"{owner}."):
            reason = f"{api.keys.found_at} belongs to account {printable(owner, 20)}"
            return account._replace(reason=reason)
        account = account._replace(created_on_push=_created_on_push(document))

        answer = await api.ask("GetAccountSetting", {"name": "BLOB_MOUNTING"})
        value = (json_object(answer.encode()) or {}).get("value")
        if value in ("ENABLED", "DISABLED"):
            return account._replace(mounts=value == "ENABLED")
        return account._replace(reason="ECR did not say")
    except (AuthError, ConfigError) as error:
        hint = f" ({error.hint})" if error.hint else ""
        return account._replace(reason=f"{error.message}{hint}")


def _created_on_push(document: Mapping[str, object]) -> tuple[str, ...]:
    """Return the prefixes of the templates by which a push creates a repository."""
    templates = document.get("repositoryCreationTemplates")
    if not isinstance(templates, list):
        return ()
    return tuple(
        template["prefix"]
        for template in templates
        if isinstance(template, dict)
        and isinstance(template.get("prefix"), str)
        and isinstance(template.get("appliedFor"), list)
        and "CREATE_ON_PUSH" in template["appliedFor"]
    )


def _read_login(document: Mapping[str, object], service: str, label: str) -> Login:
    try:
        token = b64decode(str(document["authorizationToken"]), validate=True).decode("ascii")
        user, password = token.split(":", 1)
        expires = float(str(document.get("expiresAt", math.inf)))
    except (TypeError, LookupError, ValueError):
        raise _error(f"{service} answered without a usable token") from None
    return Login(Credential(user, password, found_at=label), expires)


def _error(message: str, hint: str | None = None, code: str = AuthError.code) -> AuthError:
    return AuthError(message, hint=hint, fatal=True, code=code)


def _fields_of(text: str) -> dict[str, object]:
    """Return the fields of an answer in JSON, or in the XML of STS, whose entities stay as they are.

    AWS's services put them at different depths, and give no name two meanings. So the depth is left
    out.
    """
    fields: dict[str, object] = {}
    try:
        # The hook gets the fields of each object in the text, and collects them all.
        json.loads(text, object_pairs_hook=fields.update)
    except (ValueError, RecursionError):
        fields.update(re.findall(r"<(\w+)>([^<]*)</\1>", text))
    return fields


def _keys_in(document: Mapping[str, object], label: str, *secrets: str) -> Credential:
    """Return the keys in variables, a profile or an answer; AuthError where there are none.

    `label` is where they come from, for messages. `secrets` were sent to get the answer, which may
    repeat them.
    """
    # Their names are written `aws_access_key_id`, `access_key_id` and `AccessKeyId`.
    fields = {
        re.sub("^aws|_", "", name.lower()): str(value) for name, value in document.items() if value
    }
    access_key = fields.get("accesskeyid", "")
    secret_key = fields.get("secretaccesskey", "")
    session = fields.get("sessiontoken") or fields.get("token") or ""
    can_be_in_header = re.fullmatch("[ -~]+", access_key + secret_key + session) is not None
    if access_key and secret_key and can_be_in_header:
        return Credential(access_key, secret_key, session, found_at=label)
    default = "the access key or its secret is missing, or is not ASCII text"
    reason = fields.get("message") or fields.get("code") or default
    raise _error(f"{label} gives no AWS credentials: {printable(redact(reason, secrets), 200)}")


class _Settings:
    """The variables and files that AWS's programs read; AuthError for a broken file.

    `variables`: AWS's variables by name, without AWS_ and in lower case, as in a profile.
    `profile`: the fields of the profile that applies, empty where there is none.
    """

    def __init__(self, machine: CloudEnvironment, cloud_profile: str | None) -> None:
        self._machine = machine
        self.variables = {
            name.removeprefix("AWS_").lower(): value
            for name, value in machine.environ.items()
            if name.startswith("AWS_")
        }
        self.config_file = self.variables.get("config_file") or "~/.aws/config"
        self.credentials_file = (
            self.variables.get("shared_credentials_file") or "~/.aws/credentials"
        )
        # By `profile NAME` or `sso-session NAME`: the fields of the section, in both files together.
        self._sections: dict[str, dict[str, str]] = {}
        self._read_sections(self.config_file, is_config=True)
        self._read_sections(self.credentials_file, is_config=False)

        # A profile that our configuration names is the only source of keys. One that a variable names
        # has to exist, but other sources go before it.
        self.required_profile = cloud_profile
        names = (cloud_profile, *map(self.variables.get, _PROFILE_NAMES))
        self.named_profile = next(filter(None, names), None)
        self.profile_name = self.named_profile or "default"
        self.profile = self.section(f"profile {self.profile_name}") or {}

        region = (
            self.variables.get("region")
            or self.variables.get("default_region")
            or self.profile.get("region")
            or ""
        )
        # `aws-global` means STS's global endpoint, whose requests are signed for us-east-1.
        self.sts_region = "us-east-1" if region == "aws-global" else region

    def _read_sections(self, path: str, *, is_config: bool) -> None:
        """Add the sections of a file. In the config file a profile is `[profile NAME]`, in the
        credentials file `[NAME]`.
        """
        parser = configparser.RawConfigParser(default_section="")
        try:
            parser.read_string(self.read(path))
        except configparser.Error:  # its message would quote the line
            raise _error(f"{path} is not a valid AWS configuration file") from None
        for name in parser.sections():
            if is_config and name != "default":
                # Names may be quoted, after any number of blanks.
                key = re.sub(r"""\s+["']?|["']$""", " ", name).strip()
            else:
                key = f"profile {name}"
            self._sections.setdefault(key, {}).update(parser.items(name))

    def section(self, name: str) -> dict[str, str] | None:
        """Return the fields of `profile NAME` or `sso-session NAME`; None where there is no such
        section.
        """
        return self._sections.get(name)

    def is_set(self, name: str) -> bool:
        """Return whether a setting is `true`: by its variable, or else in the profile."""
        value = self.variables.get(name) or self.profile.get(name, "")
        return value.lower() == "true"

    def read(self, path: str) -> str:
        """Return a file's text, empty where there is no such file."""
        home = self._machine.home or ""
        data = self._machine.read(re.sub("^~(?=/)", lambda _: home, path)) or b""
        return data.decode("utf-8", "replace")

    def read_named(self, path: str, who: str, hint: str | None = None) -> str:
        """Return the text of a file that `who` names; AuthError where it is missing or empty."""
        text = self.read(path)
        if not text:
            raise _error(f"{who}: {printable(path)} is missing or empty", hint)
        return text


class _Failure(NamedTuple):
    """Why an exchange has brought nothing."""

    text: str  # may hold secrets
    hint: str | None
    code: str
    is_temporary: bool

    def __repr__(self) -> str:
        return "<Failure>"


class _Client(NamedTuple):
    """Makes requests to AWS's services, each up to three times. `fips` and `dual`: see `endpoint`."""

    machine: CloudEnvironment
    fips: bool
    dual: bool

    def request(
        self, service: str, region: str, headers: list[Pair], body: bytes = b"", path: str = "/"
    ) -> Request:
        """Return a request to a service of AWS in a region; AuthError where no region is known."""
        if not re.fullmatch("[a-z0-9-]+", region):
            raise _error(f"{region!r} is not an AWS region", "set AWS_REGION")
        url = f"https://{endpoint(service, region, self.fips, self.dual)}{path}"
        method = "POST" if body else "GET"
        return Request(method, url, headers, body, service, region)

    async def ask(
        self,
        request: Request,
        hint: str,
        *,
        keys: Credential | None = None,
        secrets: tuple[str, ...] = (),
    ) -> str:
        """Return the text of the answer, in which `_fields_of` finds fields; AuthError with `hint`
        for a refusal.

        `keys` sign the request. `secrets`: what else in the request no message may show.
        """
        all_secrets = secrets if keys is None else (*secrets, *keys.secrets)
        attempts_left = _ATTEMPTS
        while True:
            with redacting(lambda: all_secrets):
                result = await self._attempt(request, hint, keys)
            if isinstance(result, str):
                return result
            attempts_left -= 1
            if attempts_left == 0 or not result.is_temporary:
                break
            await anyio.sleep(_PAUSE)

        who = keys.found_at if keys else "without keys"
        host = request.url.split("/")[2]
        reason = printable(redact(result.text, all_secrets), 300)
        raise _error(f"{who}: {host}: {reason}", result.hint, result.code)

    async def _attempt(
        self, request: Request, hint: str, keys: Credential | None
    ) -> str | _Failure:
        """Make a request once, signed where there are `keys`. Return the text of the answer, or why
        there is none.
        """
        headers = sign(keys, request, self.machine.wall()) if keys else request.headers
        is_container = not request.service
        timeout = _CONTAINER_SECONDS if is_container else None
        try:
            answer = await self.machine.fetch(
                request.method, request.url, headers, request.body, timeout
            )
        except WireError as error:
            # At a container's credential service, our hint says which variable has led there.
            wire_hint = hint if is_container else error.hint
            return _Failure(error.message, wire_hint, error.code, is_temporary=True)

        text = answer.body.decode("utf-8", "replace")
        fields = _fields_of(text)
        if answer.status == 200 and fields:
            return text
        return _failure_of(request, answer, fields, hint)


def _failure_of(request: Request, answer: Answer, fields: dict[str, object], hint: str) -> _Failure:
    """Return what an answer says went wrong, and whether another attempt may succeed."""
    # Where the name of the error stands depends on the service's protocol.
    name = fields.get("__type") or answer.headers.get("x-amzn-errortype") or fields.get("Code")
    error_name = str(name or "")
    message = fields.get("message") or fields.get("Message") or ""

    # A container's credential service may not have started yet.
    is_container = not request.service
    is_server_error = answer.status >= 500
    # A 200 is a failure where its body cannot be read: the next one may be whole.
    has_temporary_status = is_server_error or answer.status in (200, 429)
    has_temporary_name = re.search(_TEMPORARY_ERRORS, error_name) is not None
    is_temporary = is_container or has_temporary_status or has_temporary_name

    code = WireError.code if is_server_error else AuthError.code
    return _Failure(f"status {answer.status} {error_name} {message}", hint, code, is_temporary)


class _KeyChain:
    """The sources of AWS's keys, in the order of section 4.5.

    `looked_at`: the sources tried so far, as messages name them.
    """

    def __init__(
        self, machine: CloudEnvironment, settings: _Settings, client: _Client, region: str
    ) -> None:
        self._machine = machine
        self._settings = settings
        self._variables = settings.variables
        self._client = client
        self._region = region  # the registry's; STS is asked there where settings name none
        self.looked_at: list[str] = []

    async def find(self) -> Credential | None:
        """Return the first keys that there are; None where there are none."""
        settings = self._settings
        if settings.required_profile:
            return await self._from_profile(settings.required_profile)
        return (
            await self._from_variables()
            or await self._from_token_file()
            or await self._from_profile(settings.profile_name)
            or await self._from_container()
            or await self.from_instance()
        )

    async def _from_variables(self) -> Credential | None:
        self.looked_at.append("AWS_ACCESS_KEY_ID")
        if not self._variables.get(_ACCESS_KEY):
            return None
        names = (_ACCESS_KEY, "secret_access_key", "session_token")
        fields = {name: self._variables.get(name) for name in names}
        return _keys_in(fields, "AWS_ACCESS_KEY_ID")

    # A role.

    async def _from_token_file(self) -> Credential | None:
        self.looked_at.append("AWS_WEB_IDENTITY_TOKEN_FILE")
        if not self._variables.get(_TOKEN_FILE):
            return None
        return await self._assume_by_token(self._variables, "AWS_WEB_IDENTITY_TOKEN_FILE")

    async def _assume_by_token(self, fields: dict[str, str], label: str) -> Credential:
        """Return the keys of a role that the token of another identity provider may take, as that of a
        pod in EKS. `fields` are those of a profile.
        """
        token = self._settings.read_named(fields[_TOKEN_FILE], label).strip()
        form = [
            ("Action", "AssumeRoleWithWebIdentity"),
            *self._role_fields(fields, label),
            ("WebIdentityToken", token),
        ]
        return await self._assume(form, fields, label, secrets=(token,))

    async def _assume_by_keys(
        self, fields: dict[str, str], label: str, keys: Credential
    ) -> Credential:
        """Return the keys of a role that the identity of other `keys` may take."""
        form = [
            ("Action", "AssumeRole"),
            *self._role_fields(fields, label),
            ("ExternalId", fields.get("external_id", "")),
            ("DurationSeconds", fields.get("duration_seconds", "")),
        ]
        return await self._assume(form, fields, label, keys=keys)

    def _role_fields(self, fields: dict[str, str], label: str) -> list[Pair]:
        """Return the parts of a form that both ways to take a role have in common."""
        role = fields.get("role_arn", "")
        session = fields.get("role_session_name") or f"regsync-{self._machine.wall():.0f}"
        if not role or not (role + session).isprintable():
            raise _error(f"{label}: AWS_ROLE_ARN or role_arn is missing, or is not text")
        return [("Version", "2011-06-15"), ("RoleArn", role), ("RoleSessionName", session)]

    async def _assume(
        self,
        form: list[Pair],
        fields: dict[str, str],
        label: str,
        *,
        keys: Credential | None = None,
        secrets: tuple[str, ...] = (),
    ) -> Credential:
        """Ask STS for the keys of a role; AuthError where it refuses.

        The request is signed by `keys`, or its form has `secrets` that no message may show.
        """
        body = urlencode([(name, value) for name, value in form if value]).encode()
        headers = [("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")]
        region = self._settings.sts_region or self._region
        request = self._client.request("sts", region, headers, body)
        hint = "check the role's ARN, and its trust policy"
        answer = await self._client.ask(request, hint, keys=keys, secrets=secrets)
        label = f"role {printable(fields['role_arn'], 200)} ({label})"
        sent_secrets = secrets if keys is None else keys.secrets
        return _keys_in(_fields_of(answer), label, *sent_secrets)

    # A profile.

    async def _from_profile(self, name: str, named_by: tuple[str, ...] = ()) -> Credential | None:
        """Return the keys of a profile; None where it has none and another source may be asked.
        AuthError where a profile that somebody names does not exist, or has no keys.

        Where other profiles have led here, `named_by` are their names: each names the next one as its
        source.
        """
        settings = self._settings
        profile = settings.section(f"profile {name}")
        label = f"profile {printable(name, 60)!r}"
        place = f"{label} in {settings.config_file} and {settings.credentials_file}"
        self.looked_at.append(place)
        if profile is None:
            has_to_exist = named_by or settings.named_profile
            if not has_to_exist:
                return None
            raise _error(
                f"there is no {place}", "check the name: `aws configure list-profiles` lists them"
            )

        # The order is botocore's (section 4.5).
        if _TOKEN_FILE in profile:
            return await self._assume_by_token(profile, label)
        has_keys = "aws_access_key_id" in profile
        is_source_with_keys = named_by and has_keys
        if "role_arn" in profile and not is_source_with_keys:
            keys = await self._keys_to_assume(profile, name, label, named_by)
            return await self._assume_by_keys(profile, label, keys)
        if "sso_account_id" in profile or "sso_role_name" in profile:
            return await self._from_sso(profile, label)
        if has_keys:
            return _keys_in(profile, label)

        programs = {"login_session", "credential_process"} & profile.keys()
        if programs:
            raise _error(
                f"{label} has {programs.pop()}, which needs another program, and regsync starts none",
                "set the variables that `aws configure export-credentials` prints",
            )
        has_to_have_keys = named_by or settings.required_profile
        if has_to_have_keys:
            raise _error(f"{label} has no credentials")
        return None

    async def _keys_to_assume(
        self, profile: dict[str, str], name: str, label: str, named_by: tuple[str, ...]
    ) -> Credential:
        """Return the keys by which the role of a profile is taken, from the source that the profile
        names; AuthError where there are none. The other arguments are those of `_from_profile`.
        """
        if name in named_by:
            circle = " -> ".join((*named_by, name))
            raise _error(f"{label} is its own source: {printable(circle)}")
        if "mfa_serial" in profile:
            raise _error(
                f"{label} has mfa_serial, and regsync cannot ask for a code",
                "set the variables that `aws configure export-credentials` prints",
            )

        source_profile = profile.get("source_profile")
        credential_source = profile.get("credential_source", "")
        sources: dict[str, Callable[[], Awaitable[Credential | None]]] = {
            "EcsContainer": self._from_container,
            "Ec2InstanceMetadata": self.from_instance,
            "Environment": self._from_variables,
        }
        if source_profile and not credential_source:
            keys = await self._from_profile(source_profile, (*named_by, name))
        elif credential_source in sources and not source_profile:
            keys = await sources[credential_source]()
        else:
            raise _error(
                f"{label} needs either source_profile or credential_source ({', '.join(sources)})"
            )

        if keys is None:
            raise _error(f"{label}: its credential_source has no keys: {self.looked_at[-1]}")
        return keys

    async def _from_sso(self, profile: dict[str, str], label: str) -> Credential:
        """Return the keys of a role that a session of IAM Identity Center may take. The session is
        described in the profile itself, or in the `sso-session` that it names.
        """
        session_name = profile.get("sso_session", "")
        session = self._settings.section(f"sso-session {session_name}") or {}
        fields = profile | session

        def is_usable(name: str) -> bool:
            value = fields.get(name)
            is_same_in_both = profile.get(name, value) == value
            return bool(value) and is_same_in_both

        names = ("sso_start_url", "sso_region", "sso_account_id", "sso_role_name")
        unusable = [name for name in names if not is_usable(name)]
        if unusable:
            raise _error(
                f"{label}: missing, or different in its sso-session: {', '.join(unusable)}"
            )

        hint = f"run `aws sso login` for {label}"
        token = await self._sso_token(session_name, fields, label, hint)
        query = urlencode(
            {"role_name": fields["sso_role_name"], "account_id": fields["sso_account_id"]}
        )
        request = self._client.request(
            "portal.sso",
            fields["sso_region"],
            [("x-amz-sso_bearer_token", token)],
            path=f"/federation/credentials?{query}",
        )
        answer = await self._client.ask(request, hint, secrets=(token,))
        return _keys_in(_fields_of(answer), label, token)

    async def _sso_token(
        self, session_name: str, fields: dict[str, str], label: str, hint: str
    ) -> str:
        """Return the token that `aws sso login` has left in a file. One that has ended is renewed, and
        the file stays as it is.
        """
        file_name = f"{name_hash(session_name or fields['sso_start_url'])}.json"
        text = self._settings.read_named(f"~/.aws/sso/cache/{file_name}", label, hint)
        cached = _fields_of(text)
        # Both times are UTC in the same form, which sorts as text.
        soon = time.gmtime(self._machine.wall() + _SSO_MARGIN)
        is_live = str(cached.get("expiresAt"))[:19] >= time.strftime("%Y-%m-%dT%H:%M:%S", soon)
        if is_live:
            return str(cached.get("accessToken"))

        form = {name: cached.get(name) for name in ("clientId", "clientSecret", "refreshToken")}
        can_renew = session_name and all(form.values())  # others have no refresh token
        if not can_renew:
            raise _error(f"{label}: its SSO login has expired", hint)
        body = json.dumps({**form, "grantType": "refresh_token"}).encode()
        headers = [("Content-Type", "application/json")]
        request = self._client.request("oidc", fields["sso_region"], headers, body, "/token")
        secrets = tuple(str(value) for value in form.values())
        answer = await self._client.ask(request, hint, secrets=secrets)
        return str(_fields_of(answer).get("accessToken"))

    # This machine.

    async def _from_container(self) -> Credential | None:
        """Ask the credential service that a container's variables name; None where none does."""
        path = self._variables.get(_CONTAINER_PATH)
        if path:
            label = f"AWS_{_CONTAINER_PATH.upper()}"
            url = f"http://169.254.170.2{path}"  # ECS has the service there
        else:
            label = f"AWS_{_CONTAINER_URL.upper()}"
            url = self._variables.get(_CONTAINER_URL, "")
        self.looked_at.append(label)
        if not url:
            return None
        if not re.fullmatch(_CONTAINER_SERVICES, url):
            raise _error(f"{label}: {printable(url, 99)} is neither https nor a metadata address")

        token = self._variables.get("container_authorization_token") or ""
        token_file = self._variables.get("container_authorization_token_file")
        if token_file:
            token = self._settings.read_named(token_file, label)

        headers = [("Authorization", token)] if token else []
        request = Request("GET", url, headers)
        answer = await self._client.ask(
            request, f"check {label}, which names this address", secrets=(token,)
        )
        return _keys_in(_fields_of(answer), label, token)

    async def from_instance(self) -> Credential | None:
        """Ask EC2's metadata service (IMDSv2) for the keys of this machine's role; None where it
        does not answer.
        """
        is_ipv6 = self._variables.get("ec2_metadata_service_endpoint_mode", "").lower() == "ipv6"
        address = "[fd00:ec2::254]" if is_ipv6 else "169.254.169.254"
        base = self._variables.get("ec2_metadata_service_endpoint") or f"http://{address}"
        base = base.rstrip("/")
        label = f"the EC2 metadata service at {printable(base, 100)}"
        if self._settings.is_set("ec2_metadata_disabled"):
            self.looked_at.append(f"{label} (AWS_EC2_METADATA_DISABLED)")
            return None
        try:
            token, answer = await self._ask_instance(f"{base}/latest")
        except WireError as error:
            self.looked_at.append(f"{label} ({printable(error.message, 150)})")
            return None
        return _keys_in(_fields_of(answer), label, token)

    async def _ask_instance(self, base: str) -> tuple[str, str]:
        """Return the token of a session with the metadata service, which is a secret, and the answer
        that has the keys; WireError where it does not answer with 200.
        """

        async def fetch(method: str, path: str, header: Pair) -> bytes:
            answer = await self._machine.fetch(
                method, f"{base}/{path}", [header], b"", _INSTANCE_SECONDS
            )
            if answer.status != 200:
                raise WireError(f"status {answer.status}")
            return answer.body

        ttl = ("x-aws-ec2-metadata-token-ttl-seconds", "21600")
        token = (await fetch("PUT", "api/token", ttl)).decode("latin-1")
        session = ("x-aws-ec2-metadata-token", token)
        roles = "meta-data/iam/security-credentials/"
        with redacting(lambda: (token,)):
            listed = await fetch("GET", roles, session)
            role = quote(listed.split(b"\n")[0])
            document = await fetch("GET", f"{roles}{role}", session)
        return token, document.decode("utf-8", "replace")
