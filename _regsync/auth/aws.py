"""Login to ECR and ECR Public with this machine's AWS credentials.

The sources of access keys are the functions in `_SOURCES`, in their order. With the keys of the
first that has any, the API of ECR is asked for a password; its requests are signed by Signature
Version 4. A secret is only sent to AWS's own hosts or to a metadata service, and appears in no
message. A broken source of keys is an error (R8). No file is written (R19).
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
from functools import partial
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from _regsync import edge
from _regsync.auth.cloud import Access, Found, Login, Request, ask, first_found, shown_host
from _regsync.auth.credentials import Credential, Pair
from _regsync.config import Registry
from _regsync.crypto import hash_hex, hmac_bytes, name_hash
from _regsync.errors import AuthError
from _regsync.net.wire import Response
from _regsync.text import json_object, keep_passing_secret, printable, time_text

# The suffixes of host names in AWS's partitions, by the prefix of their regions' names (section
# 4.1). The first match applies. The last suffix is that of all other regions.
_SUFFIXES = {
    "cn-": "amazonaws.com.cn",
    "eusc-": "amazonaws.eu",
    "us-iso-": "c2s.ic.gov",
    "us-isob-": "sc2s.sgov.gov",
    "eu-isoe-": "cloud.adc-e.uk",
    "us-isof-": "csp.hci.ic.gov",
    "": "amazonaws.com",
}

# ACCOUNT.dkr.ecr[-fips].REGION.SUFFIX, or ACCOUNT.dkr-ecr[-fips].REGION.on.aws.
_ECR_HOST = r"[0-9]{12}\.dkr[.-]ecr(?P<fips>-fips)?\.(?P<region>[a-z0-9-]+)\."

# Names of environment variables, in lower case and without the prefix AWS_. The fields of a profile
# have the same names.
_ACCESS_KEY = "access_key_id"
_TOKEN_FILE = "web_identity_token_file"
_CONTAINER_PATH = "container_credentials_relative_uri"
_CONTAINER_URL = "container_credentials_full_uri"
_PROFILE_NAMES = ("default_profile", "profile")

# Fields of a profile whose keys another program provides.
_PROGRAM_FIELDS = {"login_session", "credential_process"}

# Fields of a profile each of which configures credentials. Others are settings, such as `region` and
# `cli_pager`.
_IDENTITY_FIELDS = {
    f"aws_{_ACCESS_KEY}",
    _TOKEN_FILE,
    "role_arn",
    "sso_account_id",
    "sso_role_name",
    *_PROGRAM_FIELDS,
}

# URLs from which container credentials are accepted: https, loopback, and metadata addresses.
_CONTAINER_SERVICES = r"https://.+|http://(localhost|127(\.\d+){3}|169\.254\.170\.23?|\[(::1|fd00:ec2::23)\])(:\d+)?(/.*)?"

_CONTAINER_SECONDS = 2.0  # timeout for a container's credential service
_INSTANCE_SECONDS = 1.0  # timeout for EC2's metadata service

_TIME_LENGTH = len("2026-11-22T12:00:00")  # of an SSO login's end, which is always in UTC

_EXPORT_HINT = "set the variables that `aws configure export-credentials` prints"


class Keys(NamedTuple):
    """An AWS access key with its secret."""

    access_key: str
    secret_key: str
    session_token: str = ""  # of temporary keys
    source: str = ""  # for messages

    def __repr__(self) -> str:
        return f"<Keys {self.source!r}>"


def is_configured(access: Access) -> bool:
    """Report whether an environment variable or a file configures AWS credentials.

    Raises AuthError or ConfigError if a file is broken.
    """
    settings = _Settings(access, None)
    names = (_ACCESS_KEY, _TOKEN_FILE, _CONTAINER_PATH, _CONTAINER_URL, *_PROFILE_NAMES)
    if any(settings.variables.get(name) for name in names):
        return True
    return bool(_IDENTITY_FIELDS & settings.profile.keys())


async def log_in(access: Access, registry: Registry, *, probing_metadata: bool) -> Login:
    """Request a password for ECR or ECR Public with this machine's AWS keys (section 4.3).

    Raises AuthError if there are no keys, or if they do not permit it. If `probing_metadata` is
    true, keys are only requested from EC2's metadata service.
    """
    is_public = registry.kind == "ecr_public"
    # None for another host name, such as a proxy's, which `auth_type` configures as ECR.
    ecr_host = re.match(_ECR_HOST, registry.host)
    region = ecr_host["region"] if ecr_host else ""
    if is_public:
        region = "us-east-1"  # the only region with an API of ECR Public
    settings = _Settings(access, registry.cloud_profile, region)
    sources: tuple[_Source, ...] = _SOURCES
    if probing_metadata:
        sources = (_from_instance,)
    elif registry.cloud_profile:  # excludes all other sources
        sources = (_from_profile,)
    keys = await first_found(
        [partial(source, settings) for source in sources],
        registry,
        missing="AWS credentials",
        hint="give this machine or container a role, or set AWS_PROFILE, "
        "or AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY",
    )
    service = "ecr-public" if is_public else "ecr"
    region = region or settings.region
    # Where the registry's host is a FIPS endpoint, its API's is too.
    url = settings.url_of(service, region, use_fips=bool(ecr_host and ecr_host["fips"]))
    request = _password_request(service, url, keys.source)
    request = sign(keys, request, service, region, edge.current().wall())
    return await ask(access, request, partial(_read_login, keys.source))


def _password_request(service: str, url: str, source: str) -> Request:
    """Build the request GetAuthorizationToken to `ecr` or `ecr-public`, without a signature."""
    hint = (
        "check the keys and this machine's clock, and "
        f"allow this identity {service}:GetAuthorizationToken"
    )
    name = "AmazonEC2ContainerRegistry_V20150921"  # as AWS's protocol has it
    if service == "ecr-public":
        hint += " and sts:GetServiceBearerToken, or use auth_type: anonymous"
        name = "SpencerFrontendService"
    headers = [
        ("Content-Type", "application/x-amz-json-1.1"),
        ("X-Amz-Target", f"{name}.GetAuthorizationToken"),
    ]
    return Request("POST", url, headers, b"{}", source=source, hint=hint)


def _error(message: str, hint: str | None = None) -> AuthError:
    return AuthError(message, hint=hint, fatal=True)


# Requests and answers.


def endpoint(service: str, region: str, *, use_fips: bool) -> str:
    """Return the host name of an AWS service in a region (docs/protocol-facts.md section 4.2).

    `service` is `ecr`, `ecr-public`, `sts` or `portal.sso`. `use_fips` selects the endpoint with
    validated cryptography.
    """
    suffix = next(name for prefix, name in _SUFFIXES.items() if region.startswith(prefix))
    fips_mark = "-fips" if use_fips else ""
    if service.startswith("ecr"):
        # AWS's SDKs use `api.ecr-fips` everywhere. AWS's documentation lists `ecr-fips` for the
        # partitions with this suffix.
        is_documented_fips = use_fips and service == "ecr" and suffix == "amazonaws.com"
        api = "" if is_documented_fips else "api."
        return f"{api}{service}{fips_mark}.{region}.{suffix}"

    # In GovCloud the plain names of the other services already are FIPS endpoints.
    if region.startswith("us-gov-"):
        fips_mark = ""
    return f"{service}{fips_mark}.{region}.{suffix}"


def sign(keys: Keys, request: Request, service: str, region: str, now: float) -> Request:
    """Return a request with its date, session token and signature as headers (section 4.4). Its URL
    has no path but `/`, and no query.

    `now` is the time in seconds since 1970. The service accepts the signature for five minutes.
    """
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    headers = [*request.headers, ("X-Amz-Date", date)]
    if keys.session_token:
        headers.append(("X-Amz-Security-Token", keys.session_token))

    # Lower-case names in order, and values without surplus blanks, as the service will hash them.
    signed_headers = sorted(
        (name.lower(), " ".join(value.split()))
        for name, value in [("host", urlsplit(request.url).netloc), *headers]
    )
    names = ";".join(name for name, _ in signed_headers)
    canonical_request = (
        request.method,
        "/",
        "",  # the query
        *(f"{name}:{value}" for name, value in signed_headers),
        "",  # an empty line ends the headers
        names,
        hash_hex("sha256", request.body),
    )
    scope = f"{date[:8]}/{region}/{service}/aws4_request"
    request_hash = hash_hex("sha256", "\n".join(canonical_request).encode())
    string_to_sign = "\n".join(("AWS4-HMAC-SHA256", date, scope, request_hash))

    # The signing key is derived from the secret key, by one HMAC for each part of the scope.
    key = f"AWS4{keys.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac_bytes(key, part.encode())
    signature = hmac_bytes(key, string_to_sign.encode()).hex()
    proof = f"Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    headers.append(("Authorization", f"AWS4-HMAC-SHA256 {proof}"))
    keep_passing_secret(keys.secret_key, keys.session_token)
    return request._replace(headers=headers)


def _parse_fields(body: bytes) -> dict[str, object]:
    """Parse an answer in JSON, or in the XML of STS, into one flat dict.

    XML entities are not decoded. AWS services nest the same field at different depths, but no field
    name has two meanings.
    """
    text = body.decode("utf-8", "replace")
    fields: dict[str, object] = {}
    try:
        # json.loads calls the hook for each object in the text, so that all fields are collected.
        json.loads(text, object_pairs_hook=fields.update)
    except (ValueError, RecursionError):
        fields.update(re.findall(r"<(\w+)>([^<]*)</\1>", text))
    return fields


def _read_login(source: str, answer: Response) -> Login | None:
    """Return the user name and the password in an answer to GetAuthorizationToken, or None.

    `source` names the source of the keys.
    """
    fields = _parse_fields(answer.body)
    try:
        token = b64decode(str(fields["authorizationToken"]), validate=True).decode("ascii")
        user, password = token.split(":", 1)
        expires = float(str(fields.get("expiresAt", math.inf)))
    except (LookupError, ValueError):
        return None
    return Login(Credential(user, password, found_at=source), expires)


def _read_keys(source: str, answer: Response) -> Keys | None:
    """Return the AWS keys in an answer, or None."""
    return _keys_in(source, _parse_fields(answer.body))


def _keys_in(source: str, document: Mapping[str, object]) -> Keys | None:
    """Return the AWS keys in environment variables, in a profile or in an answer, or None."""
    # The same field is named `aws_access_key_id`, `access_key_id` or `AccessKeyId`.
    fields = {
        re.sub("^aws|_", "", name.lower()): str(value) for name, value in document.items() if value
    }
    access_key = fields.get("accesskeyid", "")
    secret_key = fields.get("secretaccesskey", "")
    session = fields.get("sessiontoken") or fields.get("token") or ""
    can_be_in_header = re.fullmatch("[ -~]+", access_key + secret_key + session) is not None
    if not (access_key and secret_key and can_be_in_header):
        return None
    return Keys(access_key, secret_key, session, source)


def _configured_keys(source: str, document: Mapping[str, object]) -> Keys:
    """Return the AWS keys in environment variables or in a profile. Raises AuthError if there are none."""
    keys = _keys_in(source, document)
    if keys is None:
        reason = "the access key or its secret is missing, or is not ASCII text"
        raise _error(f"{source} gives no AWS credentials: {reason}")
    return keys


class _Settings:
    """AWS's environment variables and configuration files.

    The constructor reads the files. It raises AuthError if a file is broken.
    """

    def __init__(
        self, access: Access, cloud_profile: str | None, registry_region: str = ""
    ) -> None:
        self.access = access
        # The values of AWS's environment variables. Names are in lower case and without the prefix
        # AWS_, as in a profile.
        self.variables = {
            name.removeprefix("AWS_").lower(): value
            for name, value in edge.current().environ.items()
            if name.startswith("AWS_")
        }
        self.config_file = self.variables.get("config_file") or "~/.aws/config"
        self.credentials_file = (
            self.variables.get("shared_credentials_file") or "~/.aws/credentials"
        )
        # `profile NAME` or `sso-session NAME` -> the section's fields, merged from both files.
        self.sections: dict[str, dict[str, str]] = {}
        self._read_sections(self.config_file, is_config=True)
        self._read_sections(self.credentials_file, is_config=False)

        names = (cloud_profile, *map(self.variables.get, _PROFILE_NAMES))
        selected_profile = next(filter(None, names), None)
        # Whether the user has selected the profile, so that it must exist.
        self.is_profile_selected = selected_profile is not None
        self.profile_name = selected_profile or "default"
        self.profile = self.sections.get(f"profile {self.profile_name}", {})  # its fields

        region = (
            self.variables.get("region")
            or self.variables.get("default_region")
            or self.profile.get("region")
            or registry_region
        )
        # The configured region, else the registry's, else "". `aws-global` selects STS's global
        # endpoint, which belongs to us-east-1.
        self.region = "us-east-1" if region == "aws-global" else region

    def _read_sections(self, path: str, *, is_config: bool) -> None:
        """Add the sections of a file to `sections`.

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
            fields = self.sections.setdefault(key, {})
            if parser.has_option(name, f"aws_{_ACCESS_KEY}"):
                fields.pop("aws_session_token", None)  # of the other file's keys
            fields.update(parser.items(name))

    def is_set(self, name: str) -> bool:
        """Report whether a setting is `true`. The environment variable overrides the profile."""
        value = self.variables.get(name) or self.profile.get(name, "")
        return value.lower() == "true"

    def read(self, path: str) -> str:
        """Return the text of a file, or an empty text if the file does not exist."""
        home = edge.home() or ""
        data = self.access.read(re.sub("^~(?=/)", lambda _: home, path)) or b""
        return data.decode("utf-8", "replace")

    def read_required(self, path: str, source: str, hint: str | None = None) -> str:
        """Return the text of a file. Raises AuthError if the file is missing or empty.

        `source` names the setting that requires the file.
        """
        text = self.read(path)
        if not text:
            raise _error(f"{source}: {printable(path)} is missing or empty", hint)
        return text

    def url_of(self, service: str, region: str, *, use_fips: bool = False) -> str:
        """Return the URL of an AWS service. The arguments are those of `endpoint`.

        The settings may require FIPS endpoints too. Raises AuthError if `region` is empty or
        malformed.
        """
        if not re.fullmatch("[a-z0-9-]+", region):
            hint = "set AWS_REGION, or correct region or sso_region in the profile"
            raise _error(f"{region!r} is not an AWS region", hint)
        use_fips = use_fips or self.is_set("use_fips_endpoint")
        return f"https://{endpoint(service, region, use_fips=use_fips)}/"


# The sources of keys, in the order of section 4.5. Each returns keys, or the place where it has
# found none. It raises AuthError if it is configured and issues none (R8).


async def _from_variables(settings: _Settings) -> Keys | str:
    source = "AWS_ACCESS_KEY_ID"
    if not settings.variables.get(_ACCESS_KEY):
        return source
    names = (_ACCESS_KEY, "secret_access_key", "session_token")
    return _configured_keys(source, {name: settings.variables.get(name) for name in names})


async def _from_token_file(settings: _Settings) -> Keys | str:
    """Assume the role of a pod in EKS."""
    source = "AWS_WEB_IDENTITY_TOKEN_FILE"
    if not settings.variables.get(_TOKEN_FILE):
        return source
    return await _assume(settings, settings.variables, source)


async def _from_profile(
    settings: _Settings, name: str = "", referrers: tuple[str, ...] = ()
) -> Keys | str:
    """Return the keys in a profile, or the keys of the role that the profile names.

    Raises AuthError if the user or another profile refers to a profile that is missing, or if the
    profile's source of keys is broken.

    The search begins with the selected profile. `referrers` are the names of the profiles whose
    `source_profile` led to the profile `name`.
    """
    name = name or settings.profile_name
    is_source = bool(referrers)  # whether another profile refers to this profile
    source = f"profile {printable(name, 60)!r}"
    place = f"{source} in {settings.config_file} and {settings.credentials_file}"
    profile = settings.sections.get(f"profile {name}")
    if profile is None:
        if not is_source and not settings.is_profile_selected:
            return place
        hint = "check the name: `aws configure list-profiles` lists them"
        raise _error(f"there is no {place}", hint)

    # The order of these sources is the order of botocore (section 4.5).
    if _TOKEN_FILE in profile:
        return await _assume(settings, profile, source)
    has_keys = "aws_access_key_id" in profile
    # If another profile refers to this profile, its keys take precedence over its role.
    if "role_arn" in profile and not (is_source and has_keys):
        if name in referrers:
            cycle = " -> ".join((*referrers, name))
            raise _error(f"{source} is its own source: {printable(cycle)}")
        keys = await _keys_to_assume(settings, profile, source, (*referrers, name))
        return await _assume(settings, profile, source, keys)
    if "sso_account_id" in profile or "sso_role_name" in profile:
        return await _from_sso(settings, profile, name, source)
    if has_keys:
        return _configured_keys(source, profile)

    program_fields = _PROGRAM_FIELDS & profile.keys()
    if program_fields:
        raise _error(
            f"{source} has {min(program_fields)}, which needs another program, and regsync starts none",
            _EXPORT_HINT,
        )
    return place


async def _from_container(settings: _Settings) -> Keys | str:
    """Return the keys from the credential service that a container's variables name."""
    path = settings.variables.get(_CONTAINER_PATH)
    if path:
        source = f"AWS_{_CONTAINER_PATH.upper()}"
        url = f"http://169.254.170.2{path}"  # the fixed address of the service in ECS
    else:
        source = f"AWS_{_CONTAINER_URL.upper()}"
        url = settings.variables.get(_CONTAINER_URL, "")
    if not url:
        return source
    if not re.fullmatch(_CONTAINER_SERVICES, url):
        raise _error(f"{source}: {shown_host(url)} is neither https nor a metadata address")

    token = settings.variables.get("container_authorization_token") or ""
    token_file = settings.variables.get("container_authorization_token_file")
    if token_file:
        token = settings.read_required(token_file, source)
    keep_passing_secret(token)
    headers = [("Authorization", token)] if token else []
    request = Request(
        "GET",
        url,
        headers,
        source=source,
        hint=f"check {source}, which names this address",
        seconds=_CONTAINER_SECONDS,
    )
    return await ask(settings.access, request, partial(_read_keys, source))


async def _from_instance(settings: _Settings) -> Keys | str:
    """Return the keys of this machine's role from EC2's metadata service (IMDSv2).

    Whatever fails, this machine may just have no role.
    """
    base = settings.variables.get("ec2_metadata_service_endpoint") or "http://169.254.169.254"
    base = base.rstrip("/")
    source = f"the EC2 metadata service at {shown_host(base)}"
    if settings.is_set("ec2_metadata_disabled"):
        return f"{source} (AWS_EC2_METADATA_DISABLED)"

    async def fetch(
        method: str, path: str, header: Pair, read: Callable[[Response], Found | None]
    ) -> Found:
        request = Request(
            method, f"{base}/latest/{path}", [header], source=source, seconds=_INSTANCE_SECONDS
        )
        return await ask(settings.access, request, read, attempts=1)

    ttl = ("x-aws-ec2-metadata-token-ttl-seconds", "21600")
    roles = "meta-data/iam/security-credentials/"
    try:
        token = await fetch("PUT", "api/token", ttl, lambda answer: answer.body.decode("latin-1"))
        keep_passing_secret(token)
        session = ("x-aws-ec2-metadata-token", token)
        # One name a line; a machine has one role.
        names = await fetch("GET", roles, session, lambda answer: answer.body)
        role = quote(names.split(b"\n")[0])
        return await fetch("GET", f"{roles}{role}", session, partial(_read_keys, source))
    except AuthError as error:
        return error.message  # which begins with the service's name


_Source = Callable[[_Settings], Awaitable[Keys | str]]
_SOURCES: tuple[_Source, ...] = (
    _from_variables,
    _from_token_file,
    _from_profile,
    _from_container,
    _from_instance,
)


# The roles and the SSO logins of profiles.


async def _assume(
    settings: _Settings, fields: Mapping[str, str], source: str, keys: Keys | None = None
) -> Keys:
    """Request the keys of a role from STS.

    `fields` are the fields of a profile, or the environment variables of the same names. They name
    the role. The request is signed by `keys`, or proves the identity by a token of another identity
    provider, whose file the `fields` name. Raises AuthError if a field or the file is missing, or
    if STS refuses the request.
    """
    role = fields.get("role_arn", "")
    session = fields.get("role_session_name") or f"regsync-{edge.current().wall():.0f}"
    if not role or not (role + session).isprintable():
        raise _error(f"{source}: AWS_ROLE_ARN or role_arn is missing, or is not text")
    form = {"Version": "2011-06-15", "RoleArn": role, "RoleSessionName": session}
    token = ""
    if keys is None:
        token = settings.read_required(fields[_TOKEN_FILE], source).strip()
        keep_passing_secret(token)
        form |= {"Action": "AssumeRoleWithWebIdentity", "WebIdentityToken": token}
    else:
        form |= {
            "Action": "AssumeRole",
            "ExternalId": fields.get("external_id", ""),
            "DurationSeconds": fields.get("duration_seconds", ""),
        }
    role_source = f"role {printable(role, 200)} ({source})"
    request = Request(
        "POST",
        settings.url_of("sts", settings.region),
        [("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")],
        urlencode({name: value for name, value in form.items() if value}).encode(),
        source=role_source,
        hint="check the role's ARN, its trust policy, and this machine's clock",
    )
    if keys is not None:
        request = sign(keys, request, "sts", settings.region, edge.current().wall())
    return await ask(settings.access, request, partial(_read_keys, role_source))


async def _keys_to_assume(
    settings: _Settings, profile: Mapping[str, str], source: str, referrers: tuple[str, ...]
) -> Keys:
    """Return the keys with which to assume a profile's role, from the source in the profile.

    Raises AuthError if there are no keys. `referrers` ends with the profile's name (see
    `_from_profile`).
    """
    source_profile = profile.get("source_profile")
    credential_source = profile.get("credential_source", "")
    sources: dict[str, _Source] = {
        "EcsContainer": _from_container,
        "Ec2InstanceMetadata": _from_instance,
        "Environment": _from_variables,
    }
    if source_profile and not credential_source:
        keys = await _from_profile(settings, source_profile, referrers)
    elif credential_source in sources and not source_profile:
        keys = await sources[credential_source](settings)
    else:
        raise _error(
            f"{source} needs either source_profile or credential_source ({', '.join(sources)})"
        )
    if isinstance(keys, str):  # the place that has none
        raise _error(f"{source}: its source of keys has none: {keys}")
    return keys


async def _from_sso(
    settings: _Settings, profile: Mapping[str, str], name: str, source: str
) -> Keys:
    """Return the keys of a role that the user's session of IAM Identity Center permits.

    The fields of the session are in the profile, or in the section that its field `sso_session`
    names. Raises AuthError if a field is missing, or if the user must log in again.
    """
    session_name = profile.get("sso_session", "")
    session = settings.sections.get(f"sso-session {session_name}", {})
    fields = {**profile, **session}
    required = ("sso_start_url", "sso_region", "sso_account_id", "sso_role_name")
    missing = [field for field in required if not fields.get(field)]
    if missing:
        raise _error(f"{source}: missing: {', '.join(missing)}")

    hint = f"run `aws sso login --profile {printable(name, 60)}`"
    # The token that `aws sso login` has stored. A token that has ended is not renewed here.
    file_name = f"{name_hash(session_name or fields['sso_start_url'])}.json"
    text = settings.read_required(f"~/.aws/sso/cache/{file_name}", source, hint)
    stored = json_object(text.encode()) or {}
    token, ends = stored.get("accessToken"), stored.get("expiresAt")
    if not (isinstance(token, str) and isinstance(ends, str)):
        raise _error(f"{source}: its SSO login is not readable in {file_name}", hint)
    # Both times are UTC in the same format, so that they can be compared as text.
    if ends[:_TIME_LENGTH] <= time_text(edge.current().wall())[:_TIME_LENGTH]:
        raise _error(f"{source}: its SSO login ended at {printable(ends, 40)}", hint)

    keep_passing_secret(token)
    query = urlencode(
        {"role_name": fields["sso_role_name"], "account_id": fields["sso_account_id"]}
    )
    url = settings.url_of("portal.sso", fields["sso_region"])
    request = Request(
        "GET",
        f"{url}federation/credentials?{query}",
        [("x-amz-sso_bearer_token", token)],
        source=source,
        hint=hint,
    )
    return await ask(settings.access, request, partial(_read_keys, source))
