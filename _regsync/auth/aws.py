"""Login to ECR and ECR Public with this machine's AWS credentials.

Owns: the host names of AWS services, requests to them, the search for AWS access keys.
May not know: challenges, sockets, files.
Invariants: a secret is only sent to AWS's own hosts or to a metadata service, and appears in no
message. If a configured source of keys is broken, no other source is used instead. No file is
written (R8, R19).
Follows: docs/protocol-facts.md section 4 (cited below by number) and section 9.2.
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

from _regsync.auth.cloud import ANONYMOUS_LOGIN, Answer, CloudEnvironment, Login
from _regsync.auth.credentials import Credential, Pair
from _regsync.auth.sigv4 import Keys, Request, sign
from _regsync.config import Registry
from _regsync.crypto import name_hash
from _regsync.errors import AuthError, WireError
from _regsync.text import printable, redact, redacting


class _Partition(NamedTuple):
    """A partition of AWS (section 4.1)."""

    region_prefix: str  # of the names of its regions
    suffix: str  # of the names of its hosts
    dualstack_suffix: str  # of the names of its hosts with IPv4 and IPv6 addresses


# The first match applies. The last partition contains all other regions.
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

# Names of environment variables, in lower case and without the prefix AWS_. The fields of a profile
# have the same names.
_ACCESS_KEY = "access_key_id"
_TOKEN_FILE = "web_identity_token_file"
_CONTAINER_PATH = "container_credentials_relative_uri"
_CONTAINER_URL = "container_credentials_full_uri"
_PROFILE_NAMES = ("default_profile", "profile")

# Fields of a profile whose keys another program provides.
_PROGRAM_FIELDS = {"login_session", "credential_process"}

# Fields of a profile that do not configure credentials.
_OTHER_SETTINGS = {"region", "output"}

# URLs from which container credentials are accepted: https, loopback, and metadata addresses.
_CONTAINER_SERVICES = r"https://.+|http://(localhost|127(\.\d+){3}|169\.254\.170\.23?|\[(::1|fd00:ec2::23)\])(:\d+)?(/.*)?"

# ACCOUNT.dkr.ecr[-fips].REGION.SUFFIX, or ACCOUNT.dkr-ecr[-fips].REGION.on.aws.
_ECR_HOST = (
    r"[0-9]{12}\.dkr[.-]ecr(?P<fips>-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<dualstack>on\.aws)?"
)

_ATTEMPTS = 3  # the largest number of attempts for one request
_PAUSE = 1.0  # seconds between two attempts
_CONTAINER_SECONDS = 2.0  # timeout for a container's credential service
_INSTANCE_SECONDS = 1.0  # timeout for EC2's metadata service
_SSO_MARGIN = 60.0  # seconds for which an SSO token must remain valid
_SSO_TIME_LENGTH = len("2026-11-22T12:00:00")  # without the time zone, which is always UTC

# Matches the names of errors after which the same request may succeed.
_TEMPORARY_ERRORS = "Throttl|TooMany|IDPComm"


def endpoint(
    service: str, region: str, *, use_fips: bool = False, use_dualstack: bool = False
) -> str:
    """Return the host name of an AWS service in a region (docs/protocol-facts.md section 4.2).

    `service` is `ecr`, `ecr-public`, `sts`, `portal.sso` or `oidc`. `use_fips` selects the endpoint
    with validated cryptography. `use_dualstack` selects the endpoint with IPv4 and IPv6 addresses.
    """
    partition = next(row for row in _PARTITIONS if region.startswith(row.region_prefix))
    fips_mark = "-fips" if use_fips else ""
    if use_dualstack:  # these names have the same form for all services
        return f"{service}{fips_mark}.{region}.{partition.dualstack_suffix}"

    if service.startswith("ecr"):
        # AWS's SDKs use `api.ecr-fips` everywhere. AWS's documentation lists `ecr-fips` for the
        # partitions with this suffix.
        is_documented_fips = use_fips and service == "ecr" and partition.suffix == "amazonaws.com"
        api = "" if is_documented_fips else "api."
        return f"{api}{service}{fips_mark}.{region}.{partition.suffix}"

    # In GovCloud the plain names of the other services already are FIPS endpoints.
    if partition.region_prefix == "us-gov-":
        fips_mark = ""
    return f"{service}{fips_mark}.{region}.{partition.suffix}"


def is_configured(machine: CloudEnvironment) -> bool:
    """Report whether an environment variable or a file configures AWS credentials.

    Raises AuthError or ConfigError if a file is broken.
    """
    settings = _Settings(machine, None)
    names = (_ACCESS_KEY, _TOKEN_FILE, _CONTAINER_PATH, _CONTAINER_URL, *_PROFILE_NAMES)
    if any(settings.variables.get(name) for name in names):
        return True
    return bool(settings.profile.keys() - _OTHER_SETTINGS)


async def log_in(
    machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
) -> Login | None:
    """Request a password for ECR or ECR Public with this machine's AWS keys (section 4.3).

    Raises AuthError if there are no keys. If `probing_metadata` is true, keys are only requested
    from EC2's metadata service, and the function returns None if that service issues no keys.
    """
    api = await _find_api(machine, registry, probing_metadata=probing_metadata)
    if api is None:
        return None
    is_public = registry.kind == "ecr_public"
    more_rights = ""  # further permissions that the action requires, for the error's hint
    if is_public:
        more_rights = " and sts:GetServiceBearerToken, or use auth_type: anonymous"
    try:
        answer = await api.request_password(more_rights)
    except AuthError:
        if probing_metadata and is_public:
            return ANONYMOUS_LOGIN
        raise
    return _read_login(_parse_fields(answer), api.service, api.keys.found_at)


class _Api(NamedTuple):
    """The API of ECR or ECR Public in one region, called with this machine's keys."""

    client: _Client
    keys: Keys
    service: str  # `ecr` or `ecr-public`
    region: str

    def __repr__(self) -> str:
        return "<Api>"  # the keys are secret

    async def request_password(self, more_rights: str) -> str:
        """Call GetAuthorizationToken, and return the text of the answer.

        Raises AuthError if the keys do not permit the action. The error's hint names the permission
        to grant; `more_rights` is appended to the hint.
        """
        is_public = self.service == "ecr-public"
        # The service name that AWS's protocol requires in X-Amz-Target.
        name = "SpencerFrontendService" if is_public else "AmazonEC2ContainerRegistry_V20150921"
        headers = [
            ("Content-Type", "application/x-amz-json-1.1"),
            ("X-Amz-Target", f"{name}.GetAuthorizationToken"),
        ]
        request = self.client.build_request(self.service, self.region, headers, b"{}")
        hint = f"allow this identity {self.service}:GetAuthorizationToken{more_rights}"
        return await self.client.send(request, hint, keys=self.keys)


async def _find_api(
    machine: CloudEnvironment, registry: Registry, *, probing_metadata: bool
) -> _Api | None:
    """Find this machine's AWS keys, and return the API of a registry to be called with them.

    Raises AuthError if there are no keys. If `probing_metadata` is true, keys are only requested
    from EC2's metadata service, and the function returns None if that service issues no keys.
    """
    settings = _Settings(machine, registry.cloud_profile)
    is_public = registry.kind == "ecr_public"
    ecr_host = re.match(_ECR_HOST, registry.host)  # None for another host name, such as a proxy's
    if is_public:
        region = "us-east-1"  # the only region with an API of ECR Public
    elif ecr_host:
        region = ecr_host["region"]
    else:  # the host is configured as ECR by `auth_type`
        region = settings.default_region

    client = _Client(
        machine,
        use_fips=settings.is_set("use_fips_endpoint"),
        use_dualstack=settings.is_set("use_dualstack_endpoint"),
    )
    chain = _KeyChain(settings, client, region)
    keys = await (chain.from_instance() if probing_metadata else chain.find())
    if keys is None:
        if probing_metadata:
            return None
        raise _error(
            f"no AWS credentials for {registry.host}; looked at {', '.join(chain.tried_sources)}",
            "give this machine or container a role, or set AWS_PROFILE, "
            "or AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY",
        )

    # If the registry's host is a FIPS or dual-stack endpoint, the API is used at such an endpoint.
    if ecr_host and ecr_host["fips"]:
        client = client._replace(use_fips=True)
    if ecr_host and ecr_host["dualstack"]:
        client = client._replace(use_dualstack=True)
    return _Api(client, keys, "ecr-public" if is_public else "ecr", region)


def _read_login(document: Mapping[str, object], service: str, found_at: str) -> Login:
    """Read the user name and password in an answer to GetAuthorizationToken.

    Raises AuthError if there are none. `found_at` names the source of the keys.
    """
    try:
        token = b64decode(str(document["authorizationToken"]), validate=True).decode("ascii")
        user, password = token.split(":", 1)
        expires = float(str(document.get("expiresAt", math.inf)))
    except (TypeError, LookupError, ValueError):
        raise _error(f"{service} answered without a usable token") from None
    return Login(Credential(user, password, found_at=found_at), expires)


def _error(message: str, hint: str | None = None, code: str = AuthError.code) -> AuthError:
    return AuthError(message, hint=hint, fatal=True, code=code)


def _parse_fields(text: str) -> dict[str, object]:
    """Parse an answer in JSON, or in the XML of STS, into one flat dict.

    XML entities are not decoded. AWS services nest the same field at different depths, but no field
    name has two meanings.
    """
    fields: dict[str, object] = {}
    try:
        # json.loads calls the hook for each object in the text, so that all fields are collected.
        json.loads(text, object_pairs_hook=fields.update)
    except (ValueError, RecursionError):
        fields.update(re.findall(r"<(\w+)>([^<]*)</\1>", text))
    return fields


def _read_keys(document: Mapping[str, object], label: str, *secrets: str) -> Keys:
    """Read AWS keys from environment variables, from a profile or from an answer.

    Raises AuthError if there are no usable keys. `label` names the source of the keys. `secrets`
    are masked in the error, because an answer may repeat the secrets of its request.
    """
    # The same field is named `aws_access_key_id`, `access_key_id` or `AccessKeyId`.
    fields = {
        re.sub("^aws|_", "", name.lower()): str(value) for name, value in document.items() if value
    }
    access_key = fields.get("accesskeyid", "")
    secret_key = fields.get("secretaccesskey", "")
    session = fields.get("sessiontoken") or fields.get("token") or ""
    can_be_in_header = re.fullmatch("[ -~]+", access_key + secret_key + session) is not None
    if access_key and secret_key and can_be_in_header:
        return Keys(access_key, secret_key, session, found_at=label)
    default_reason = "the access key or its secret is missing, or is not ASCII text"
    reason = fields.get("message") or fields.get("code") or default_reason
    raise _error(f"{label} gives no AWS credentials: {printable(redact(reason, secrets), 200)}")


class _Settings:
    """AWS's environment variables and configuration files.

    The constructor reads the files. It raises AuthError if a file is broken.
    """

    def __init__(self, machine: CloudEnvironment, cloud_profile: str | None) -> None:
        self._machine = machine
        # The values of AWS's environment variables. Names are in lower case and without the prefix
        # AWS_, as in a profile.
        self.variables = {
            name.removeprefix("AWS_").lower(): value
            for name, value in machine.environ.items()
            if name.startswith("AWS_")
        }
        self.config_file = self.variables.get("config_file") or "~/.aws/config"
        self.credentials_file = (
            self.variables.get("shared_credentials_file") or "~/.aws/credentials"
        )
        # `profile NAME` or `sso-session NAME` -> the section's fields, merged from both files.
        self._sections: dict[str, dict[str, str]] = {}
        self._read_sections(self.config_file, is_config=True)
        self._read_sections(self.credentials_file, is_config=False)

        # Whether the profile is the only source of keys: regsync's own configuration names it.
        self.uses_only_profile = bool(cloud_profile)
        names = (cloud_profile, *map(self.variables.get, _PROFILE_NAMES))
        selected_profile = next(filter(None, names), None)
        # Whether the user has selected the profile, so that it must exist.
        self.is_profile_selected = selected_profile is not None
        self.profile_name = selected_profile or "default"
        self.profile = self.section(f"profile {self.profile_name}") or {}  # its fields

        region = (
            self.variables.get("region")
            or self.variables.get("default_region")
            or self.profile.get("region")
            or ""
        )
        # The configured region, or "". `aws-global` selects STS's global endpoint, which belongs to
        # us-east-1.
        self.default_region = "us-east-1" if region == "aws-global" else region

    def _read_sections(self, path: str, *, is_config: bool) -> None:
        """Add the sections of a file to `_sections`.

        A profile is named `[profile NAME]` in the config file, and `[NAME]` in the credentials
        file.
        """
        parser = configparser.RawConfigParser(default_section="")
        try:
            parser.read_string(self.read(path))
        except configparser.Error:  # not chained, because its message quotes the line
            raise _error(f"{path} is not a valid AWS configuration file") from None
        for name in parser.sections():
            if is_config and name != "default":
                # The profile's name may be quoted, and may follow several blanks.
                key = re.sub(r"""\s+["']?|["']$""", " ", name).strip()
            else:
                key = f"profile {name}"
            self._sections.setdefault(key, {}).update(parser.items(name))

    def section(self, name: str) -> dict[str, str] | None:
        """Return the fields of section `profile NAME` or `sso-session NAME`, or None."""
        return self._sections.get(name)

    def is_set(self, name: str) -> bool:
        """Report whether a setting is `true`. The environment variable overrides the profile."""
        value = self.variables.get(name) or self.profile.get(name, "")
        return value.lower() == "true"

    def read(self, path: str) -> str:
        """Return the text of a file, or an empty text if the file does not exist."""
        home = self._machine.home or ""
        data = self._machine.read(re.sub("^~(?=/)", lambda _: home, path)) or b""
        return data.decode("utf-8", "replace")

    def read_required(self, path: str, label: str, hint: str | None = None) -> str:
        """Return the text of a file. Raises AuthError if the file is missing or empty.

        `label` names the setting that requires the file.
        """
        text = self.read(path)
        if not text:
            raise _error(f"{label}: {printable(path)} is missing or empty", hint)
        return text


class _Failure(NamedTuple):
    """The reason why a request failed."""

    text: str  # for the error message; may contain secrets
    hint: str | None
    code: str  # the error's code: WireError.code or AuthError.code
    is_temporary: bool  # whether another attempt may succeed

    def __repr__(self) -> str:
        return "<Failure>"


class _Client(NamedTuple):
    """Sends requests to AWS services. Each request has up to three attempts."""

    machine: CloudEnvironment
    use_fips: bool  # see `endpoint`
    use_dualstack: bool  # see `endpoint`

    def build_request(
        self, service: str, region: str, headers: list[Pair], body: bytes = b"", path: str = "/"
    ) -> Request:
        """Build a POST request to an AWS service, or a GET request if there is no body.

        Raises AuthError if `region` is empty or malformed.
        """
        if not re.fullmatch("[a-z0-9-]+", region):
            raise _error(f"{region!r} is not an AWS region", "set AWS_REGION")
        host = endpoint(service, region, use_fips=self.use_fips, use_dualstack=self.use_dualstack)
        method = "POST" if body else "GET"
        url = f"https://{host}{path}"
        return Request(method, url, headers, body, service=service, region=region)

    async def send(
        self,
        request: Request,
        hint: str,
        *,
        keys: Keys | None = None,
        secrets: tuple[str, ...] = (),
    ) -> str:
        """Send a request, and return the text of the answer, which contains at least one field.

        A temporary failure is repeated. Raises AuthError if no attempt succeeds. `hint` is the
        error's hint if the service refuses the request. If `keys` are given, they sign the request.
        `secrets` are further secrets in the request. All secrets are masked in the error.
        """
        all_secrets = secrets if keys is None else (*secrets, *keys.secrets)
        attempts_left = _ATTEMPTS
        while True:
            with redacting(lambda: all_secrets):
                text_or_failure = await self._attempt(request, hint, keys)
            if isinstance(text_or_failure, str):
                return text_or_failure
            failure = text_or_failure
            attempts_left -= 1
            # A container's credential service may not have started yet.
            is_temporary = failure.is_temporary or request.is_to_container_service
            if attempts_left == 0 or not is_temporary:
                break
            await anyio.sleep(_PAUSE)

        who = keys.found_at if keys else "without keys"
        host = request.url.split("/")[2]
        reason = printable(redact(failure.text, all_secrets), 300)
        raise _error(f"{who}: {host}: {reason}", failure.hint, failure.code)

    async def _attempt(self, request: Request, hint: str, keys: Keys | None) -> str | _Failure:
        """Send a request once, signed by `keys` if they are given.

        Returns the text of a successful answer. Returns the failure, which `hint` may explain, if
        there is no answer or if the answer is an error or unreadable.
        """
        headers = sign(keys, request, self.machine.wall()) if keys else request.headers
        timeout = _CONTAINER_SECONDS if request.is_to_container_service else None
        try:
            answer = await self.machine.fetch(
                request.method, request.url, headers, request.body, timeout
            )
        except WireError as error:
            # For a container's credential service, `hint` names the variable that has its address.
            wire_hint = hint if request.is_to_container_service else error.hint
            return _Failure(error.message, wire_hint, error.code, is_temporary=True)

        text = answer.body.decode("utf-8", "replace")
        fields = _parse_fields(text)
        if answer.status == 200 and fields:
            return text
        return _failure_of(answer, fields, hint)


def _failure_of(answer: Answer, fields: dict[str, object], hint: str) -> _Failure:
    """Describe an unsuccessful answer. `fields` are the parsed fields of its body."""
    # The location of the error's name depends on the service's protocol.
    name = fields.get("__type") or answer.headers.get("x-amzn-errortype") or fields.get("Code")
    error_name = str(name or "")
    message = fields.get("message") or fields.get("Message") or ""

    is_server_error = answer.status >= 500
    # A 200 only arrives here if its body is unreadable, for example incomplete.
    has_temporary_status = is_server_error or answer.status in (200, 429)
    has_temporary_name = re.search(_TEMPORARY_ERRORS, error_name) is not None
    is_temporary = has_temporary_status or has_temporary_name
    code = WireError.code if is_server_error else AuthError.code
    return _Failure(f"status {answer.status} {error_name} {message}", hint, code, is_temporary)


class _KeyChain:
    """Searches the sources of AWS keys, in the order of section 4.5.

    In all methods, `label` names a source in messages. A method returns None if a source has no
    keys and the next source is tried. It raises AuthError if a source is configured but issues no
    keys (R8).
    """

    def __init__(self, settings: _Settings, client: _Client, region: str) -> None:
        self._machine = client.machine
        self._settings = settings
        self._variables = settings.variables
        self._client = client
        self._region = region  # the registry's region, used for STS if no region is configured
        self.tried_sources: list[str] = []  # the sources tried so far, for the error message

    async def find(self) -> Keys | None:
        """Return the keys of the first source that has keys, or None if no source has keys."""
        settings = self._settings
        if settings.uses_only_profile:
            return await self._from_profile(settings.profile_name)
        return (
            await self._from_variables()
            or await self._from_token_file()
            or await self._from_profile(settings.profile_name)
            or await self._from_container()
            or await self.from_instance()
        )

    async def _from_variables(self) -> Keys | None:
        self.tried_sources.append("AWS_ACCESS_KEY_ID")
        if not self._variables.get(_ACCESS_KEY):
            return None
        names = (_ACCESS_KEY, "secret_access_key", "session_token")
        fields = {name: self._variables.get(name) for name in names}
        return _read_keys(fields, "AWS_ACCESS_KEY_ID")

    # IAM roles.

    async def _from_token_file(self) -> Keys | None:
        self.tried_sources.append("AWS_WEB_IDENTITY_TOKEN_FILE")
        if not self._variables.get(_TOKEN_FILE):
            return None
        return await self._assume_by_token(self._variables, "AWS_WEB_IDENTITY_TOKEN_FILE")

    async def _assume_by_token(self, fields: dict[str, str], label: str) -> Keys:
        """Assume a role with a token file of another identity provider, and return the role's keys.

        A pod in EKS has such a file. `fields` are the fields of a profile, or the environment
        variables of the same names.
        """
        token = self._settings.read_required(fields[_TOKEN_FILE], label).strip()
        proof = [("WebIdentityToken", token)]
        return await self._assume(
            "AssumeRoleWithWebIdentity", fields, label, proof, secrets=(token,)
        )

    async def _assume_by_keys(self, fields: dict[str, str], label: str, keys: Keys) -> Keys:
        """Assume a role with other `keys`, and return the role's keys.

        `fields` are the fields of the profile that names the role.
        """
        options = [
            ("ExternalId", fields.get("external_id", "")),
            ("DurationSeconds", fields.get("duration_seconds", "")),
        ]
        return await self._assume("AssumeRole", fields, label, options, keys=keys)

    async def _assume(
        self,
        action: str,
        fields: dict[str, str],
        label: str,
        further_form: list[Pair],
        *,
        keys: Keys | None = None,
        secrets: tuple[str, ...] = (),
    ) -> Keys:
        """Request the keys of the role in `fields` from STS, by this `action`.

        The request is either signed by `keys`, or proves the identity by the `secrets` in
        `further_form`. Raises AuthError if `fields` name no role, or if STS refuses the request.
        """
        role = fields.get("role_arn", "")
        session = fields.get("role_session_name") or f"regsync-{self._machine.wall():.0f}"
        if not role or not (role + session).isprintable():
            raise _error(f"{label}: AWS_ROLE_ARN or role_arn is missing, or is not text")
        form = [
            ("Action", action),
            ("Version", "2011-06-15"),
            ("RoleArn", role),
            ("RoleSessionName", session),
            *further_form,
        ]
        body = urlencode([(name, value) for name, value in form if value]).encode()
        headers = [("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")]
        region = self._settings.default_region or self._region
        request = self._client.build_request("sts", region, headers, body)
        hint = "check the role's ARN, and its trust policy"
        answer = await self._client.send(request, hint, keys=keys, secrets=secrets)
        role_label = f"role {printable(role, 200)} ({label})"
        sent_secrets = secrets if keys is None else keys.secrets
        return _read_keys(_parse_fields(answer), role_label, *sent_secrets)

    # Profiles.

    async def _from_profile(self, name: str, referrers: tuple[str, ...] = ()) -> Keys | None:
        """Return the keys in a profile, or the keys of the role that the profile names.

        Raises AuthError if the user or another profile refers to a profile that is missing, or if
        the profile's source of keys is broken.

        `referrers` are the names of the profiles whose `source_profile` led to this profile. The
        first is the profile that the search began with.
        """
        settings = self._settings
        profile = settings.section(f"profile {name}")
        label = f"profile {printable(name, 60)!r}"
        profile_in_files = f"{label} in {settings.config_file} and {settings.credentials_file}"
        self.tried_sources.append(profile_in_files)
        is_source = bool(referrers)  # whether another profile refers to this profile
        if profile is None:
            if not is_source and not settings.is_profile_selected:
                return None
            raise _error(
                f"there is no {profile_in_files}",
                "check the name: `aws configure list-profiles` lists them",
            )

        # The order of these sources is the order of botocore (section 4.5).
        if _TOKEN_FILE in profile:
            return await self._assume_by_token(profile, label)
        has_keys = "aws_access_key_id" in profile
        # If another profile refers to this profile, its keys take precedence over its role.
        uses_role = not (is_source and has_keys)
        if "role_arn" in profile and uses_role:
            keys = await self._keys_to_assume(profile, name, label, referrers)
            return await self._assume_by_keys(profile, label, keys)
        if "sso_account_id" in profile or "sso_role_name" in profile:
            return await self._from_sso(profile, label)
        if has_keys:
            return _read_keys(profile, label)

        program_fields = _PROGRAM_FIELDS & profile.keys()
        if program_fields:
            raise _error(
                f"{label} has {min(program_fields)}, which needs another program, and regsync starts none",
                "set the variables that `aws configure export-credentials` prints",
            )
        if is_source or settings.uses_only_profile:
            raise _error(f"{label} has no credentials")
        return None

    async def _keys_to_assume(
        self, profile: dict[str, str], name: str, label: str, referrers: tuple[str, ...]
    ) -> Keys:
        """Return the keys with which to assume a profile's role, from the source in the profile.

        Raises AuthError if there are no keys. `name` is the profile's name. `referrers` has the
        same meaning as in `_from_profile`.
        """
        if name in referrers:
            cycle = " -> ".join((*referrers, name))
            raise _error(f"{label} is its own source: {printable(cycle)}")
        if "mfa_serial" in profile:
            raise _error(
                f"{label} has mfa_serial, and regsync cannot ask for a code",
                "set the variables that `aws configure export-credentials` prints",
            )

        source_profile = profile.get("source_profile")
        credential_source = profile.get("credential_source", "")
        sources: dict[str, Callable[[], Awaitable[Keys | None]]] = {
            "EcsContainer": self._from_container,
            "Ec2InstanceMetadata": self.from_instance,
            "Environment": self._from_variables,
        }
        if source_profile and not credential_source:
            keys = await self._from_profile(source_profile, (*referrers, name))
        elif credential_source in sources and not source_profile:
            keys = await sources[credential_source]()
        else:
            raise _error(
                f"{label} needs either source_profile or credential_source ({', '.join(sources)})"
            )

        if keys is None:
            source = self.tried_sources[-1]  # the `credential_source`
            raise _error(f"{label}: its credential_source has no keys: {source}")
        return keys

    async def _from_sso(self, profile: dict[str, str], label: str) -> Keys:
        """Return the keys of a role that the user's session of IAM Identity Center permits.

        The fields of the session are in the profile, or in the section that its field `sso_session`
        names. Raises AuthError if a field is missing, or if the user must log in again.
        """
        session_name = profile.get("sso_session", "")
        session = self._settings.section(f"sso-session {session_name}") or {}
        fields = profile | session

        missing_or_different: list[str] = []
        for name in ("sso_start_url", "sso_region", "sso_account_id", "sso_role_name"):
            value = fields.get(name)
            is_different = name in profile and profile[name] != value
            if not value or is_different:
                missing_or_different.append(name)
        if missing_or_different:
            raise _error(
                f"{label}: missing, or different in its sso-session: {', '.join(missing_or_different)}"
            )

        hint = f"run `aws sso login` for {label}"
        token = await self._sso_token(session_name, fields, label, hint)
        query = urlencode(
            {"role_name": fields["sso_role_name"], "account_id": fields["sso_account_id"]}
        )
        request = self._client.build_request(
            "portal.sso",
            fields["sso_region"],
            [("x-amz-sso_bearer_token", token)],
            path=f"/federation/credentials?{query}",
        )
        answer = await self._client.send(request, hint, secrets=(token,))
        return _read_keys(_parse_fields(answer), label, token)

    async def _sso_token(
        self, session_name: str, fields: dict[str, str], label: str, hint: str
    ) -> str:
        """Return the access token that `aws sso login` has stored in a file.

        An expired token is renewed, but the renewed token is not written to the file. Raises
        AuthError if the file is missing, or if the token has expired and cannot be renewed.

        `fields` are the fields of the profile and its session. `session_name` is "" if the profile
        has no `sso_session`.
        """
        file_name = f"{name_hash(session_name or fields['sso_start_url'])}.json"
        text = self._settings.read_required(f"~/.aws/sso/cache/{file_name}", label, hint)
        stored = _parse_fields(text)
        # Both times are UTC in the same format, so that they can be compared as text.
        soon = time.gmtime(self._machine.wall() + _SSO_MARGIN)
        expires_at = str(stored.get("expiresAt"))[:_SSO_TIME_LENGTH]
        is_live = expires_at >= time.strftime("%Y-%m-%dT%H:%M:%S", soon)
        if is_live:
            return str(stored.get("accessToken"))

        renewal = {name: stored.get(name) for name in ("clientId", "clientSecret", "refreshToken")}
        # A login without an `sso_session` cannot be renewed.
        can_renew = session_name and all(renewal.values())
        if not can_renew:
            raise _error(f"{label}: its SSO login has expired", hint)
        return await self._renew_sso_token(fields["sso_region"], renewal, hint)

    async def _renew_sso_token(self, region: str, renewal: dict[str, object], hint: str) -> str:
        """Request a new access token. `renewal` contains the refresh token and its client."""
        body = json.dumps({**renewal, "grantType": "refresh_token"}).encode()
        headers = [("Content-Type", "application/json")]
        request = self._client.build_request("oidc", region, headers, body, "/token")
        secrets = tuple(str(value) for value in renewal.values())
        answer = await self._client.send(request, hint, secrets=secrets)
        return str(_parse_fields(answer).get("accessToken"))

    # The machine's or container's own role.

    async def _from_container(self) -> Keys | None:
        """Return the keys from the credential service that a container's variables name.

        Returns None if no variable names such a service. Raises AuthError if the service issues no
        keys, or if keys from its address are not accepted.
        """
        path = self._variables.get(_CONTAINER_PATH)
        if path:
            label = f"AWS_{_CONTAINER_PATH.upper()}"
            url = f"http://169.254.170.2{path}"  # the fixed address of the service in ECS
        else:
            label = f"AWS_{_CONTAINER_URL.upper()}"
            url = self._variables.get(_CONTAINER_URL, "")
        self.tried_sources.append(label)
        if not url:
            return None
        if not re.fullmatch(_CONTAINER_SERVICES, url):
            raise _error(f"{label}: {printable(url, 99)} is neither https nor a metadata address")

        token = self._variables.get("container_authorization_token") or ""
        token_file = self._variables.get("container_authorization_token_file")
        if token_file:
            token = self._settings.read_required(token_file, label)

        headers = [("Authorization", token)] if token else []
        request = Request("GET", url, headers)
        answer = await self._client.send(
            request, f"check {label}, which names this address", secrets=(token,)
        )
        return _read_keys(_parse_fields(answer), label, token)

    async def from_instance(self) -> Keys | None:
        """Return the keys of this machine's role from EC2's metadata service (IMDSv2).

        Returns None if the metadata service does not answer, is disabled or has no role. Raises
        AuthError if the role has no keys.
        """
        is_ipv6 = self._variables.get("ec2_metadata_service_endpoint_mode", "").lower() == "ipv6"
        address = "[fd00:ec2::254]" if is_ipv6 else "169.254.169.254"
        base = self._variables.get("ec2_metadata_service_endpoint") or f"http://{address}"
        base = base.rstrip("/")
        label = f"the EC2 metadata service at {printable(base, 100)}"
        if self._settings.is_set("ec2_metadata_disabled"):
            self.tried_sources.append(f"{label} (AWS_EC2_METADATA_DISABLED)")
            return None
        try:
            return await self._fetch_instance_keys(base, label)
        except WireError as error:
            self.tried_sources.append(f"{label} ({printable(error.message, 150)})")
            return None

    async def _fetch_instance_keys(self, base: str, label: str) -> Keys:
        """Fetch the keys of this machine's role from the metadata service at the URL `base`.

        Raises WireError if the service does not answer with status 200, and AuthError if its answer
        contains no keys.
        """

        async def fetch(method: str, path: str, header: Pair) -> bytes:
            answer = await self._machine.fetch(
                method, f"{base}/latest/{path}", [header], b"", _INSTANCE_SECONDS
            )
            if answer.status != 200:
                raise WireError(f"status {answer.status}")
            return answer.body

        ttl = ("x-aws-ec2-metadata-token-ttl-seconds", "21600")
        token = (await fetch("PUT", "api/token", ttl)).decode("latin-1")
        session = ("x-aws-ec2-metadata-token", token)
        roles = "meta-data/iam/security-credentials/"
        with redacting(lambda: (token,)):
            role_names = await fetch("GET", roles, session)  # one a line; a machine has one role
            role = quote(role_names.split(b"\n")[0])
            answer_with_keys = await fetch("GET", f"{roles}{role}", session)
        return _read_keys(_parse_fields(answer_with_keys.decode("utf-8", "replace")), label, token)
