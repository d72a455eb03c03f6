"""Logging in to ECR by the identity that AWS gave to this machine; keys are a Credential: access
key, secret, session. Owns: SigV4, the names of AWS's services, its chain of keys. May not know:
challenges, sockets, files. Invariant: a secret goes to AWS's own names or a metadata service, into
no message; a source that is named or broken is an error. Follows docs/protocol-facts.md section 4
(all numbers here), 9.2 (R8, R19: nothing is written back)."""

from __future__ import annotations

import configparser
import json
import math
import re
import time
from base64 import b64decode
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import anyio

from _regsync.auth.cloud import Login, Machine
from _regsync.auth.credentials import Credential, Pair
from _regsync.config.model import Registry
from _regsync.crypto import hash_hex, hmac_bytes, name_hash
from _regsync.errors import AuthError, WireError
from _regsync.text import clean, hide

# Section 4.1: how a partition's regions begin, its suffix, that of its dual-stack APIs; the last
# has all others.
_PARTITIONS = (
    ("us-gov-", "amazonaws.com", "api.aws"),
    ("cn-", "amazonaws.com.cn", "api.amazonwebservices.com.cn"),
    ("eusc-", "amazonaws.eu", "api.amazonwebservices.eu"),
    ("us-iso-", "c2s.ic.gov", "api.aws.ic.gov"),
    ("us-isob-", "sc2s.sgov.gov", "api.aws.scloud"),
    ("eu-isoe-", "cloud.adc-e.uk", "api.cloud-aws.adc-e.uk"),
    ("us-isof-", "csp.hci.ic.gov", "api.aws.hci.ic.gov"),
    ("", "amazonaws.com", "api.aws"),
)


# Variables of sources, without AWS_: keys, a token file, what asks the two kinds of containers,
# names of profiles.
_KEYS, _IDENTITY, _RELATIVE, _FULL, *_PROFILES = (
    "access_key_id",
    "web_identity_token_file",
    "container_credentials_relative_uri",
    "container_credentials_full_uri",
    "default_profile",
    "profile",
)


_NEARBY = r"https://.+|http://(localhost|127(\.\d+){3}|169\.254\.170\.23?|\[(::1|fd00:ec2::23)\])(:\d+)?(/.*)?"


def sign(
    keys: Credential,
    method: str,
    url: str,
    headers: list[Pair],
    body: bytes,
    service: str,
    region: str,
    now: float,
) -> list[Pair]:
    """Return a request's headers with its date, the keys' session and the signature over all of
    them (4.4).
    """
    parts = urlsplit(url)
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{date[:8]}/{region}/{service}/aws4_request"
    session = keys.identity_token
    sent = [
        *headers,
        ("X-Amz-Date", date),
        *([("X-Amz-Security-Token", session)] if session else []),
    ]
    signed = sorted(
        (name.lower(), " ".join(value.split())) for name, value in [("host", parts.netloc), *sent]
    )
    query = sorted(
        (quote(name, "~"), quote(value, "~")) for name, value in parse_qsl(parts.query, True)
    )
    names = ";".join(name for name, _ in signed)
    lines = [f"{name}:{value}" for name, value in signed]
    canonical = "\n".join(
        (
            method,
            quote(parts.path, "/~") or "/",
            "&".join(map("=".join, query)),
            *lines,
            "",
            names,
            hash_hex("sha256", body),
        )
    )
    text = "\n".join(("AWS4-HMAC-SHA256", date, scope, hash_hex("sha256", canonical.encode())))
    key = f"AWS4{keys.password}".encode()
    for part in (*scope.split("/"), text):
        key = hmac_bytes(key, part.encode())
    proof = f"Credential={keys.username}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    return [*sent, ("Authorization", f"AWS4-HMAC-SHA256 {proof}")]


def endpoint(service: str, region: str, fips: bool = False, dual: bool = False) -> str:
    """Return the host of `ecr`, `ecr-public`, `sts`, `portal.sso` or `oidc` in a region (4.2)."""
    start, suffix, dual_suffix = next(row for row in _PARTITIONS if region.startswith(row[0]))
    registry = service.startswith("ecr") and not dual
    # The SDKs' rule has `api.ecr-fips` everywhere; documented, in the two common partitions, is
    # `ecr-fips`.
    api = (
        "api." if registry and not (fips and service == "ecr" and suffix == "amazonaws.com") else ""
    )
    fips = fips and (
        registry or dual or start != "us-gov-"
    )  # GovCloud's others are FIPS under their plain names
    return f"{api}{service}{'-fips' if fips else ''}.{region}.{dual_suffix if dual else suffix}"


def present(machine: Machine) -> bool:
    """Say whether a variable or a file offers an identity; AuthError, ConfigError: a broken file is
    there.
    """
    chain = _Chain(machine, None)
    offers = any(map(chain.get, (_KEYS, _IDENTITY, _RELATIVE, _FULL, *_PROFILES)))
    return offers or bool(
        chain.profile.keys() - {"region", "output"}
    )  # which are about no identity


async def log_in(machine: Machine, registry: Registry, *, guessed: bool) -> Login | None:
    """Get a password for ECR or ECR Public (4.3): by the whole chain; `guessed`: by IMDS alone,
    None if it is mute, and nobody's login if this machine's role knows nothing of public images."""
    public = registry.kind == "ecr_public"
    service = registry.kind.replace("_", "-")
    # The kind was decided by the whole name, or is the configuration's word for another.
    found = re.match(r"[0-9]{12}\.dkr[.-]ecr(-fips)?\.([a-z0-9-]+)\.(on\.aws)?", registry.host)
    chain = _Chain(machine, registry.cloud_profile)
    chain.region = "us-east-1" if public else found[2] if found else chain.sts_region or ""
    keys = await (chain.instance() if guessed else chain.keys())
    if keys is None and guessed:
        return None
    if keys is None:
        hint = "give this machine or container a role, set AWS_PROFILE or AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY"
        raise _error(
            f"no AWS credentials for {registry.host}; looked at {', '.join(chain.looked)}", hint
        )
    target = "SpencerFrontendService" if public else "AmazonEC2ContainerRegistry_V20150921"
    kind = [
        ("Content-Type", "application/x-amz-json-1.1"),
        ("X-Amz-Target", f"{target}.GetAuthorizationToken"),
    ]
    if found:
        chain.fips = chain.fips or bool(found[1])
        chain.dual = chain.dual or bool(found[3])
    more = " and sts:GetServiceBearerToken, or use auth_type: anonymous" if public else ""
    chain.hint = f"allow this identity {service}:GetAuthorizationToken{more}"
    try:
        given = await chain.ask(service, chain.region, kind, b"{}", keys=keys)
        user, password = (
            b64decode(given["authorizationToken"], validate=True).decode("ascii").split(":", 1)
        )
        return Login(
            Credential(user, password, origin=keys.origin),
            float(str(given.get("expiresAt", math.inf))),
        )
    except (TypeError, LookupError, ValueError):
        raise _error(f"{service} answered without a usable token") from None
    except AuthError:
        if not (guessed and public):
            raise
        return Login(Credential(), math.inf)


def _error(message: str, hint: str | None = None, code: str = AuthError.code) -> AuthError:
    return AuthError(message, hint=hint, fatal=True, code=code)


def _document(text: str) -> dict[str, Any]:
    """Read what an answer says at any depth, where names differ: JSON, or the XML of STS, without
    entities.
    """
    found = dict[str, Any]()
    try:
        json.loads(text, object_pairs_hook=found.update)
    except (ValueError, RecursionError):
        found.update(re.findall(r"<(\w+)>([^<]*)</\1>", text))
    return found


def _keys(document: dict[str, Any], origin: str, *secrets: str) -> Credential:
    given = {
        re.sub("^aws|_", "", name.lower()): str(value) for name, value in document.items() if value
    }
    session = given.get("sessiontoken") or given.get("token") or ""
    found = Credential(
        given.get("accesskeyid", ""), given.get("secretaccesskey", ""), session, origin=origin
    )
    if found.username and found.password and re.fullmatch("[ -~]+", "".join(found[:3])):
        return found
    said = (
        given.get("message")
        or given.get("code")
        or "the key or its secret is missing, or no text of ASCII"
    )
    raise _error(
        f"{origin} gives no AWS credentials: {clean(hide(clean(said, 2**20), *secrets), 200)}"
    )


class _Chain:
    """One walk along the sources of 4.5; `looked` says where it has been, `hint` what may help
    where it is.
    """

    def __init__(self, machine: Machine, cloud_profile: str | None) -> None:
        self._machine = machine
        self._alone = cloud_profile
        given = machine.environ.items()
        self._set = {name[4:].lower(): value for name, value in given if name.startswith("AWS_")}
        self.get = self._set.get
        self.looked = list[str]()
        self.region = ""
        self.hint = ""
        self._files = list[str]()
        self._sections = dict[str, dict[str, str]]()
        for variable, file in (
            ("config_file", "config"),
            ("shared_credentials_file", "credentials"),
        ):
            self._files.append(path := self.get(variable) or f"~/.aws/{file}")
            parser = configparser.RawConfigParser(default_section="")
            try:
                parser.read_string(self._read(path))
            except configparser.Error:  # whose own words quote the line
                raise _error(
                    f"{path} is not a file of profiles as AWS's programs read it"
                ) from None
            for name in parser.sections():
                whole = file == "config" and name != "default"
                key = (
                    re.sub(r"""\s+["']?|["']$""", " ", name).strip() if whole else f"profile {name}"
                )
                self._sections.setdefault(key, {}).update(parser.items(name))
        self._named = next(filter(None, (cloud_profile, *map(self.get, _PROFILES))), None)
        self.profile = self._sections.get(f"profile {self._named or 'default'}", {})
        self.fips, self.dual = (
            self._is_set("use_fips_endpoint"),
            self._is_set("use_dualstack_endpoint"),
        )
        region = self.get("region") or self.get("default_region") or self.profile.get("region")
        self.sts_region = "us-east-1" if region == "aws-global" else region

    def _is_set(self, name: str) -> bool:
        return (self.get(name) or self.profile.get(name, "")).lower() == "true"

    def _read(self, path: str, why: str = "") -> str:
        data = (
            self._machine.read(re.sub("^~(?=/)", lambda _: self._machine.home or "", path)) or b""
        )
        if why and not data:
            raise _error(f"{why}: {clean(path)} is missing or empty", self.hint)
        return data.decode("utf-8", "replace")

    async def ask(
        self,
        service: str,
        region: str,
        headers: list[Pair],
        body: bytes = b"",
        path: str = "/",
        keys: Credential | None = None,
        secrets: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Do one exchange with a service of AWS, or (its `path` a URL) with a container's; three
        times at most.
        """
        if service and not re.fullmatch("[a-z0-9-]+", region):
            raise _error(f"no region: {region!r}", "set AWS_REGION")
        url = (
            f"https://{endpoint(service, region, self.fips, self.dual)}{path}" if service else path
        )
        method = "POST" if body else "GET"
        trouble = ""
        seconds = None if service else 2.0
        for pause in (1.0, 1.0, 0.0):
            sent = (
                sign(keys, method, url, headers, body, service, region, self._machine.wall())
                if keys
                else headers
            )
            try:
                status, answered, content = await self._machine.fetch(
                    method, url, sent, body, seconds
                )
            except WireError as error:
                trouble = error.message
                hint = error.hint if service else self.hint
                code = error.code
            else:
                code = WireError.code if status > 499 else AuthError.code
                told = _document(content.decode("utf-8", "replace"))
                hint = self.hint
                if status == 200 and told:
                    return told
                name = str(
                    told.get("__type") or answered.get("x-amzn-errortype") or told.get("Code") or ""
                )
                trouble = (
                    f"status {status} {name} {told.get('message') or told.get('Message') or ''}"
                )
                if service and not (
                    status in (200, 429)
                    or status > 499
                    or re.search("Throttl|TooMany|IDPComm", name)
                ):
                    break
            await anyio.sleep(pause)
        trouble = clean(hide(clean(trouble, 2**20), *secrets, *(keys or Credential()).secrets), 300)
        raise _error(
            f"{keys.origin if keys else 'no keys'}: {url.split('/')[2]}: {trouble}", hint, code
        )

    async def keys(self) -> Credential | None:
        """Return the first keys that there are; a profile that the configuration names stands for
        all sources.
        """
        if self._alone:
            return await self._of_profile(self._alone)
        if keys := await self._own():
            return keys
        self.looked.append("AWS_WEB_IDENTITY_TOKEN_FILE")
        if self.get(_IDENTITY):
            return await self._assume(self._set, self.looked[-1])
        return (
            await self._of_profile(self._named or "default")
            or await self._container()
            or await self.instance()
        )

    async def _own(self) -> Credential | None:
        self.looked.append("AWS_ACCESS_KEY_ID")
        given = {name: self.get(name) for name in (_KEYS, "secret_access_key", "session_token")}
        return _keys(given, self.looked[-1]) if given[_KEYS] else None

    async def _assume(
        self, given: dict[str, str], origin: str, keys: Credential | None = None
    ) -> Credential:
        role = given.get("role_arn", "")
        token = "" if keys else self._read(given["web_identity_token_file"], origin)
        session = given.get("role_session_name") or f"regsync-{self._machine.wall():.0f}"
        more = given if keys else {}
        if not (role and (role + session).isprintable()):
            raise _error(f"{origin}: no AWS_ROLE_ARN or role_arn as text")
        form = [
            ("Action", "AssumeRole" if keys else "AssumeRoleWithWebIdentity"),
            ("Version", "2011-06-15"),
            ("RoleArn", role),
            ("RoleSessionName", session),
            ("WebIdentityToken", token.strip()),
            ("ExternalId", more.get("external_id")),
            ("DurationSeconds", more.get("duration_seconds")),
        ]
        kind = "application/x-www-form-urlencoded; charset=utf-8"
        body = urlencode([pair for pair in form if pair[1]])
        origin = f"role {clean(role, 200)} ({origin})"
        self.hint = "check the role's name, and who may assume it"
        return _keys(
            await self.ask(
                "sts",
                self.sts_region or self.region,
                [("Content-Type", kind)],
                body.encode(),
                keys=keys,
                secrets=(token.strip(),),
            ),
            origin,
            token.strip(),
            *(keys or Credential()).secrets,
        )

    async def _of_profile(self, name: str, *way: str) -> Credential | None:
        """Follow a profile; `way`: those whose source it is. It has to give keys then, and where it
        alone counts.
        """
        profile = self._sections.get(f"profile {name}")
        origin = f"profile {clean(name, 60)!r}"
        self.looked.append(f"{origin} in {' and '.join(self._files)}")
        if profile is None and not way and not self._named:
            return None
        if profile is None:
            raise _error(
                f"there is no {self.looked[-1]}", "`aws configure list-profiles` shows them"
            )
        static = "aws_access_key_id" in profile
        by_token = "web_identity_token_file" in profile
        if "role_arn" in profile and not by_token and not (way and static):
            source = profile.get("source_profile")
            other = profile.get("credential_source", "")
            others = {
                "EcsContainer": self._container,
                "Ec2InstanceMetadata": self.instance,
                "Environment": self._own,
            }
            if name in way:
                raise _error(f"{origin} is its own source: {clean(' -> '.join((*way, name)))}")
            if "mfa_serial" in profile:
                raise _error(f"{origin} has mfa_serial, and nobody is here to type a code")
            if bool(source) == bool(other) or not (source or other in others):
                raise _error(
                    f"{origin} needs either source_profile or credential_source ({', '.join(others)})"
                )
            keys = await (self._of_profile(source, *way, name) if source else others[other]())
            if keys:
                return await self._assume(profile, origin, keys)
            raise _error(f"{origin}: its credential_source gives nothing: {self.looked[-1]}")
        if by_token:
            return await self._assume(profile, origin)
        if "sso_account_id" in profile or "sso_role_name" in profile:
            return await self._of_sso(profile, origin)
        if static:
            return _keys(profile, origin)
        if unable := {"login_session", "credential_process"} & profile.keys():
            raise _error(
                f"{origin} has {unable.pop()}, which needs another program, and this one starts none",
                "set the variables that `aws configure export-credentials` prints",
            )
        if way or self._alone:
            raise _error(f"{origin} has no credentials")
        return None

    async def _of_sso(self, profile: dict[str, str], origin: str) -> Credential:
        session = profile.get("sso_session", "")
        soon = time.gmtime(self._machine.wall() + 60)
        given = {**profile, **self._sections.get(f"sso-session {session}", {})}
        names = ("sso_start_url", "sso_region", "sso_account_id", "sso_role_name")
        lacking = [
            name
            for name in names
            if not given.get(name) or profile.get(name, given[name]) != given[name]
        ]
        if lacking:
            raise _error(
                f"{origin}: missing, or not as its sso-session has it: {', '.join(lacking)}"
            )
        start, region, account, role = map(given.__getitem__, names)
        self.hint = f"run `aws sso login` for {origin}"
        query = urlencode({"role_name": role, "account_id": account})
        cached = _document(
            self._read(f"~/.aws/sso/cache/{name_hash(session or start)}.json", origin)
        )
        if str(cached.get("expiresAt"))[:19] < time.strftime(
            "%Y-%m-%dT%H:%M:%S", soon
        ):  # UTC both: sorts as text
            form = {name: cached.get(name) for name in ("clientId", "clientSecret", "refreshToken")}
            if not session or not all(form.values()):
                raise _error(f"{origin}: its SSO login has expired", self.hint)
            body = json.dumps({**form, "grantType": "refresh_token"})
            kind = [("Content-Type", "application/json")]
            cached = await self.ask(
                "oidc", region, kind, body.encode(), "/token", secrets=(*map(str, form.values()),)
            )
        token = str(cached.get("accessToken"))
        return _keys(
            await self.ask(
                "portal.sso",
                region,
                [("x-amz-sso_bearer_token", token)],
                secrets=(token,),
                path=f"/federation/credentials?{query}",
            ),
            origin,
            token,
        )

    async def _container(self) -> Credential | None:
        name = _RELATIVE if self.get(_RELATIVE) else _FULL
        self.looked.append(what := f"AWS_{name.upper()}")
        if not (url := self.get(name)):
            return None
        url = f"http://169.254.170.2{url}" if name == _RELATIVE else url
        if not re.fullmatch(_NEARBY, url):
            raise _error(f"{what}: {clean(url, 99)} is neither https nor a metadata address")
        path = self.get("container_authorization_token_file")
        token = self.get("container_authorization_token") or ""
        token = self._read(path, what) if path else token
        self.hint = f"{what} leads there"
        login = [("Authorization", token)] if token else []
        return _keys(await self.ask("", "", login, path=url, secrets=(token,)), what, token)

    async def instance(self) -> Credential | None:
        """Ask IMDSv2 for the keys of this machine's role."""
        ipv6 = (self.get("ec2_metadata_service_endpoint_mode") or "").lower() == "ipv6"
        base = (
            self.get("ec2_metadata_service_endpoint")
            or f"http://{'[fd00:ec2::254]' if ipv6 else '169.254.169.254'}"
        )
        login = ("x-aws-ec2-metadata-token-ttl-seconds", "21600")
        role = ""
        at = "meta-data/iam/security-credentials/"
        self.looked.append(f"the EC2 metadata service at {clean(base.rstrip('/'), 100)}")
        try:
            if self._is_set("ec2_metadata_disabled"):
                raise WireError("AWS_EC2_METADATA_DISABLED")
            for path in ("api/token", at, at):
                method = "GET" if path == at else "PUT"
                url = f"{base.rstrip('/')}/latest/{path}{role}"
                status, _, body = await self._machine.fetch(method, url, [login], b"", 1.0)
                if status != 200:
                    raise WireError(f"status {status}")
                if path == at:
                    role = quote(body.split(b"\n")[0])
                else:
                    login = ("x-aws-ec2-metadata-token", body.decode("latin-1"))
            return _keys(_document(body.decode("utf-8", "replace")), self.looked[-1], login[1])
        except WireError as error:
            self.looked[-1] += f" ({clean(error.message, 150)})"
        return None
