"""A machine in AWS, and each place where it can have an identity.

A source arranges a machine, in which every program has to find the same identity.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel

from _regsync.auth import aws
from _regsync.auth.cloud import Answer, CloudEnvironment, Login
from _regsync.config import Registry
from _regsync.errors import ConnectFailed
from _regsync.providers import kind_of
from conformance.clouds.aws import ACCOUNT, Aws

PRIVATE = f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com"
METADATA = "http://169.254.170.23/v1/credentials"


def registry(host: str = PRIVATE, **options: Any) -> Registry:
    kind = kind_of(host, options.get("auth_type"))
    return Registry(alias="r", scheme="https", host=host, port=443, kind=kind, **options)


class World:
    """AWS, and one machine there: its home, its environment, what it asked with how much patience."""

    def __init__(self, home: Path, **options: Any) -> None:
        self.aws, self.home, self.environ = Aws(**options), home, dict[str, str]()
        self.patience: list[float | None] = []
        self.down: set[str] = set()
        self.skew = 0.0

    def write(self, name: str, text: str) -> str:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def sso_cache(self, name: str, login: Any, **more: str) -> None:
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(login.expires))
        document = {
            "accessToken": login.access,
            "expiresAt": ends,
            "region": "eu-west-1",
            "startUrl": "https://x",
            **more,
        }
        if login.refresh:
            document |= {
                "refreshToken": login.refresh,
                "clientId": login.client[0],
                "clientSecret": login.client[1],
            }
            document["registrationExpiresAt"] = "2099-01-01T00:00:00Z"
        self.write(
            f".aws/sso/cache/{hashlib.sha1(name.encode()).hexdigest()}.json", json.dumps(document)
        )

    def answer(self, method: str, url: str, headers: list[tuple[str, str]], body: bytes) -> Any:
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        kept = [
            (name, value)
            for name, value in headers
            if name.lower() not in ("host", "content-length")
        ]
        return self.aws.request(
            method, target or "/", [("host", parts.netloc), *kept], body or None
        )

    async def fetch(
        self,
        method: str,
        url: str,
        headers: list[tuple[str, str]],
        body: bytes,
        seconds: float | None = None,
    ) -> Answer:
        await anyio.lowlevel.checkpoint()
        self.patience.append(seconds)
        if urlsplit(url).hostname in self.down:
            raise ConnectFailed(f"{urlsplit(url).hostname} is down")
        answer = self.answer(method, url, [("Accept", "application/json"), *headers], body)
        heads = {name.lower(): value for name, value in answer.headers}
        return Answer(answer.status, heads, answer.data)

    @property
    def machine(self) -> CloudEnvironment:
        def read(path: str) -> bytes | None:
            return Path(path).read_bytes() if Path(path).exists() else None

        return CloudEnvironment(
            self.environ, str(self.home), read, lambda: self.aws.now() + self.skew, self.fetch
        )

    async def log_in(
        self, host: str = PRIVATE, *, probing_metadata: bool = False, **options: Any
    ) -> Login | None:
        return await aws.log_in(
            self.machine, registry(host, **options), probing_metadata=probing_metadata
        )

    async def who(self, host: str = PRIVATE, **options: Any) -> str:
        """Log in, and return whose password that is."""
        login = await self.log_in(host, **options)
        assert login is not None
        assert login.credential.username == "AWS"
        self.aws.journal.check()
        return self.aws.owner(login.credential.password)


# The chain: sections 4.5 and 4.6. Each source arranges a world, in which both programs have to find
# the same identity.

Source = Callable[[World], str]


def keys_of(user: Any, prefix: str = "aws_") -> str:
    text = f"{prefix}access_key_id = {user.access}\n{prefix}secret_access_key = {user.secret}\n"
    return text + (f"{prefix}session_token = {user.session}\n" if user.session else "")


def environment(world: World) -> str:
    user = world.aws.identity("user")
    world.environ |= {"AWS_ACCESS_KEY_ID": user.access, "AWS_SECRET_ACCESS_KEY": user.secret}
    return "user"


def environment_for_a_while(world: World) -> str:
    user = world.aws.identity("role", lasting=False)
    world.environ |= {"AWS_ACCESS_KEY_ID": user.access, "AWS_SECRET_ACCESS_KEY": user.secret}
    world.environ["AWS_SESSION_TOKEN"] = user.session
    return "role"


def environment_before_all(world: World) -> str:
    credentials_file(world)
    web_identity(world)
    world.environ["AWS_PROFILE"] = "default"
    return environment(world)


def web_identity(world: World) -> str:
    role = world.aws.role("pod")
    path = world.write("token", world.aws.web_token(role))
    world.environ |= {
        "AWS_WEB_IDENTITY_TOKEN_FILE": path,
        "AWS_ROLE_ARN": role.arn,
        "AWS_ROLE_SESSION_NAME": "pod-1",
    }
    return role.arn


def web_identity_before_files(world: World) -> str:
    credentials_file(world)
    return web_identity(world)


def web_identity_profile(world: World) -> str:
    role = world.aws.role("pod")
    path = world.write("token", world.aws.web_token(role))
    world.write(
        ".aws/config", f"[profile pod]\nrole_arn = {role.arn}\nweb_identity_token_file = {path}\n"
    )
    world.environ["AWS_PROFILE"] = "pod"
    return role.arn


def credentials_file(world: World) -> str:
    world.write(".aws/credentials", f"[default]\n{keys_of(world.aws.identity('filed'))}")
    return "filed"


def credentials_file_elsewhere(world: World) -> str:
    text = f"[some one]\n{keys_of(world.aws.identity('elsewhere', lasting=False))}"
    world.environ |= {
        "AWS_SHARED_CREDENTIALS_FILE": world.write("keys.ini", text),
        "AWS_PROFILE": "some one",
    }
    return "elsewhere"


def config_file(world: World) -> str:
    user = world.aws.identity("configured")
    nested = "s3 =\n  max_concurrent_requests = 20\nregion = eu-west-1\n"
    world.write(
        ".aws/config", f"# mine\n[default]\n{nested}[profile 'my own']\n{nested}{keys_of(user)}"
    )
    world.environ["AWS_PROFILE"] = "my own"
    return "configured"


def credentials_before_config(world: World) -> str:
    world.write(".aws/config", f"[default]\n{keys_of(world.aws.identity('configured'))}")
    return credentials_file(world)


def default_profile_variable(world: World) -> str:
    first, second = world.aws.identity("first"), world.aws.identity("second")
    world.write(".aws/credentials", f"[a]\n{keys_of(first)}[b]\n{keys_of(second)}")
    world.environ |= {"AWS_DEFAULT_PROFILE": "a", "AWS_PROFILE": "b"}
    return "first"


def role_of_a_source_profile(world: World) -> str:
    base = world.aws.identity("base")
    role = world.aws.role("reader", trusts="base", external_id="abc")
    lines = (
        f"role_arn = {role.arn}\nsource_profile = base\nexternal_id = abc\nduration_seconds = 900\n"
    )
    world.write(".aws/config", f"[profile reader]\n{lines}role_session_name = me\n")
    world.write(".aws/credentials", f"[base]\n{keys_of(base)}")
    world.environ["AWS_PROFILE"] = "reader"
    return role.arn


def role_of_a_role(world: World) -> str:
    base = world.aws.identity("base")
    first = world.aws.role("first", trusts="base")
    second = world.aws.role("second", trusts=first.arn)
    world.write(
        ".aws/config",
        f"[profile a]\nrole_arn = {second.arn}\nsource_profile = b\n"
        f"[profile b]\nrole_arn = {first.arn}\nsource_profile = c\n[profile c]\n{keys_of(base)}",
    )
    world.environ["AWS_PROFILE"] = "a"
    return second.arn


def role_of_itself(world: World) -> str:
    base = world.aws.identity("base")
    role = world.aws.role("own", trusts="base")
    world.write(
        ".aws/config",
        f"[default]\nrole_arn = {role.arn}\nsource_profile = default\n{keys_of(base)}",
    )
    return role.arn


def role_of_web_identity(world: World) -> str:
    pod = world.aws.role("pod")
    path = world.write("token", world.aws.web_token(pod))
    far = world.aws.role("far", trusts=pod.arn)
    world.write(
        ".aws/config",
        f"[profile far]\nrole_arn = {far.arn}\nsource_profile = pod\n"
        f"[profile pod]\nrole_arn = {pod.arn}\nweb_identity_token_file = {path}\n",
    )
    world.environ["AWS_PROFILE"] = "far"
    return far.arn


def role_by(source: str) -> Source:
    def arrange(world: World) -> str:
        trusted = {
            "Environment": environment,
            "EcsContainer": container,
            "Ec2InstanceMetadata": instance,
        }[source](world)
        role = world.aws.role("named", trusts=trusted)
        world.write(
            ".aws/config", f"[profile named]\nrole_arn = {role.arn}\ncredential_source = {source}\n"
        )
        world.environ["AWS_PROFILE"] = "named"
        return role.arn

    return arrange


def sso(world: World) -> str:
    login = world.aws.sso_login((ACCOUNT, "reader"), renewable=True)
    world.write(
        ".aws/config",
        f"[profile dev]\nsso_session = corp\nsso_account_id = {ACCOUNT}\nsso_role_name = reader\n"
        "[sso-session corp]\nsso_start_url = https://corp.awsapps.com/start\nsso_region = eu-west-1\n",
    )
    world.sso_cache("corp", login)
    world.environ["AWS_PROFILE"] = "dev"
    return "sso:reader"


def sso_of_old(world: World) -> str:
    start = "https://corp.awsapps.com/start"
    login = world.aws.sso_login((ACCOUNT, "reader"))
    world.write(
        ".aws/config",
        f"[default]\nsso_start_url = {start}\nsso_region = us-east-2\nsso_account_id = {ACCOUNT}\n"
        "sso_role_name = reader\n",
    )
    world.sso_cache(start, login)
    return "sso:reader"


def role_of_sso(world: World) -> str:
    sso(world)
    role = world.aws.role("behind", trusts="sso:reader")
    config = (world.home / ".aws/config").read_text()
    world.write(
        ".aws/config", f"{config}[profile behind]\nrole_arn = {role.arn}\nsource_profile = dev\n"
    )
    world.environ["AWS_PROFILE"] = "behind"
    return role.arn


def container(world: World) -> str:
    world.aws.container = ("/v2/credentials/abc", "")
    world.environ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = "/v2/credentials/abc"
    return "container"


def container_with_a_token(world: World) -> str:
    world.aws.container = ("/v1/credentials", "a-token")
    world.environ |= {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": METADATA,
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "a-token",
    }
    return "container"


def pod_identity(world: World) -> str:
    world.aws.container = ("/v1/credentials", "from-a-file")
    world.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = "http://[fd00:ec2::23]/v1/credentials"
    world.environ["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = "the file comes first"
    world.environ["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = world.write(
        "pod-token", "from-a-file"
    )
    return "container"


def instance(world: World) -> str:
    world.aws.instance_role = "worker"
    return "instance:worker"


def instance_elsewhere(world: World) -> str:
    world.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = "http://127.0.0.1:1338/"
    world.down.add("169.254.169.254")
    return instance(world)


def instance_by_ipv6(world: World) -> str:
    world.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"] = "IPv6"
    world.down.add("169.254.169.254")
    return instance(world)


def instance_behind_an_empty_profile(world: World) -> str:
    world.write(
        ".aws/config", "[default]\nregion = eu-west-1\n[profile other]\nregion = eu-west-1\n"
    )
    world.environ["AWS_PROFILE"] = "other"
    return instance(world)


# What is asked for one login: services in order.
SOURCES: dict[str, tuple[Source, str]] = {
    "environment": (environment, "ecr"),
    "environment, session": (environment_for_a_while, "ecr"),
    "environment before all": (environment_before_all, "ecr"),
    "web identity": (web_identity, "sts ecr"),
    "web identity before files": (web_identity_before_files, "sts ecr"),
    "web identity, profile": (web_identity_profile, "sts ecr"),
    "credentials file": (credentials_file, "ecr"),
    "credentials file elsewhere": (credentials_file_elsewhere, "ecr"),
    "config file": (config_file, "ecr"),
    "credentials before config": (credentials_before_config, "ecr"),
    "AWS_DEFAULT_PROFILE": (default_profile_variable, "ecr"),
    "role of a profile": (role_of_a_source_profile, "sts ecr"),
    "role of a role": (role_of_a_role, "sts sts ecr"),
    "role of itself": (role_of_itself, "sts ecr"),
    "role of web identity": (role_of_web_identity, "sts sts ecr"),
    "role of sso": (role_of_sso, "portal.sso sts ecr"),
    "role of the container": (role_by("EcsContainer"), "container sts ecr"),
    "role of the instance": (role_by("Ec2InstanceMetadata"), "imds imds imds sts ecr"),
    "sso": (sso, "portal.sso ecr"),
    "sso of old": (sso_of_old, "portal.sso ecr"),
    "container": (container, "container ecr"),
    "container with a token": (container_with_a_token, "container ecr"),
    "pod identity": (pod_identity, "container ecr"),
    "instance": (instance, "imds imds imds ecr"),
    "instance elsewhere": (instance_elsewhere, "imds imds imds ecr"),
    "instance by IPv6": (instance_by_ipv6, "imds imds imds ecr"),
    "instance behind an empty profile": (instance_behind_an_empty_profile, "imds imds imds ecr"),
}
