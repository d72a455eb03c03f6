"""Secrets where they do not belong: in broken configurations and credential files, in arguments, in
what is printed of objects; and the laws by which a new command, key or variable has to have its
canary.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.canaries import Traces
from tests.canary_scene import COMMANDS, ECR, ELSEWHERE, VARIANTS, Scene, arranged, said
from tests.ends import ROOT, run_regsync, virtual
from tests.program import command_names, run_process

SECRET = "hQ2k7dmw3x/9Qv5tn8cjz:7Qf4bs6yuk+2Qr9gh3epw"
PLAIN = "hQ2k7dmw3x9Qv5tn8cjz7Qf4bs6yuk2Qr9gh3epw"
URL = f"https://mirror:{SECRET}@registry.test"


@pytest.fixture
def traces(tmp_path: Path, clean_env: Path) -> Traces:
    from tests.canaries import Canaries

    canaries = Canaries()
    canaries.add("the secret", SECRET)
    canaries.add("the secret in one word", PLAIN)
    return Traces(canaries, tmp_path, clean_env)


# Broken configurations.

REGISTRY = "registries: {{one: {{url: registry.test, {}}}}}\nmappings: []\n"
BROKEN: dict[str, str] = {
    **{
        f"the password is {name}": REGISTRY.format(
            f"auth_type: basic, credentials: {{username: me, password: {value}}}"
        )
        for name, value in {
            "a list": f"['{SECRET}']",
            "a mapping": f"{{'{PLAIN}': 1}}",
            "a mapping of its words": f"{{password: '{SECRET}'}}",
            "an alias": f"*{PLAIN}",
            "a tag": f"!{PLAIN}",
            "a tag of YAML's own": f"!!{PLAIN} x",
            "a tag in full": f"!<{PLAIN}> x",
            "an anchor": f"&{PLAIN}",
            "a directive": f"%{PLAIN}",
            "reserved": f"@{PLAIN}",
            "a block": f"|{PLAIN}",
            "quoted by halves": f"'{SECRET}",
            "escaped": f'"{PLAIN}\\q"',
            "followed by more": f"{PLAIN}: {PLAIN}",
            "an open variable": f"'${{{PLAIN}'",
            "an odd variable": f"'${{A B:-{SECRET}}}'",
            "a variable that is not set": f"'{SECRET}${{NOT_SET}}'",
            "a control character": f'"{PLAIN}\\x07"',
            "a raw control character": f"'{PLAIN}\x07'",
            "long": f"'{SECRET * 3000}",
        }.items()
    },
    "the password on two lines": f"registries:\n  one:\n    credentials:\n      password:\n {SECRET}\n",
    "the password below a tab": f"registries:\n  one:\n    credentials:\n\tpassword: {SECRET}\n",
    "the password twice": REGISTRY.format(
        f"credentials: {{username: me, password: '{SECRET}', password: '{SECRET}'}}"
    ),
    "the credentials are text": REGISTRY.format(f"auth_type: basic, credentials: 'me:{SECRET}'"),
    "the credentials are a list": REGISTRY.format(
        f"auth_type: basic, credentials: [me, '{SECRET}']"
    ),
    "the user's name has a colon": REGISTRY.format(
        f"credentials: {{username: 'me:{SECRET}', password: x}}"
    ),
    "the credentials are a key": REGISTRY.format(
        f"auth_type: basic, credentials: {{'me:{SECRET}'}}"
    ),
    "the password has the user's name for a key": REGISTRY.format(
        f"auth_type: basic, credentials: {{me: '{SECRET}'}}"
    ),
    "a misspelt password": REGISTRY.format(
        f"auth_type: basic, credentials: {{username: me, pasword: '{SECRET}'}}"
    ),
    "a token with a blank": REGISTRY.format(f"auth_type: static_token, token: 'Bearer {SECRET}'"),
    "a token without its type": REGISTRY.format(f"token: '{SECRET}'"),
    "a token for a type": REGISTRY.format(f"auth_type: '{SECRET}'"),
    "a token for a number": REGISTRY.format(f"max_concurrent: '{SECRET}'"),
    "a token for a flag": REGISTRY.format(f"head_first: '{SECRET}'"),
    "a proxy of another scheme": REGISTRY.format(f"proxy: 'socks5://me:{SECRET}@proxy.test'"),
    "a proxy with a path in its password": REGISTRY.format(
        f"proxy: 'http://me:{SECRET}@proxy.test:99999'"
    ),
    "a proxy with a path in its user": REGISTRY.format(
        f"proxy: 'http://{SECRET.partition(':')[0]}@proxy.test'"
    ),
    "a url with a login": f"registries: {{one: {{url: '{URL}'}}}}\nmappings: []\n",
    "a url with a login and no host": f"registries: {{one: {{url: 'https://{SECRET}@'}}}}\nmappings: []\n",
    "a url with a signature": f"registries: {{one: {{url: 'https://registry.test/?sig={PLAIN}'}}}}\nmappings: []\n",
    "a source with a login": f"registries: {{one: {{url: a.test}}}}\nmappings: [{{from: app, source: '{URL}'}}]\n",
    "targets with a login": f"registries: {{one: {{url: a.test}}}}\nmappings: [{{from: app, targets: ['{URL}']}}]\n",
    "a repository with a login": f"registries: {{one: {{url: a.test}}}}\nmappings: [{{from: '{URL}', to: '{URL}'}}]\n",
    "a list for a document": f"- {URL}\n",
    "text for a document": f"{URL}\n",
    "two documents": f"a: {URL}\n---\nb: {URL}\n",
    "no UTF-8": f"a: {SECRET}\udcff{SECRET}\n",
}
READERS = (
    ("validate", "-vv", "FILE"),
    ("expand", "-vv", "FILE"),
    ("sync", "-vv", "--json", "-c", "FILE"),
    ("auth", "check", "-vv", "--log-format", "json", "-c", "FILE"),
)


@pytest.mark.rule("R19")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_configuration_is_told_without_its_secret(name, tmp_path, traces):
    file = tmp_path / "mirror.yaml"
    file.write_bytes(BROKEN[name].encode("utf-8", "surrogateescape"))
    traces = Traces(traces.canaries, tmp_path)
    for words in READERS:
        ran = run_regsync(*(word.replace("FILE", str(file)) for word in words))
        assert ran.status == 3, ran.err
        assert not traces.found(said(ran))


# Credential files.

FILES: dict[str, str] = {
    "not JSON": f'{{"auths": {{"127.0.0.1:1": {{"auth": "{SECRET}',
    "a list": f'["{SECRET}"]',
    "an entry that is text": f'{{"auths": {{"127.0.0.1:1": "{SECRET}"}}}}',
    "an auth that is no base64": f'{{"auths": {{"127.0.0.1:1": {{"auth": "{SECRET}"}}}}}}',
    "an auth without a colon": f'{{"auths": {{"127.0.0.1:1": {{"auth": "{PLAIN}"}}}}}}',
    "a password that is a list": f'{{"auths": {{"127.0.0.1:1": {{"password": ["{SECRET}"]}}}}}}',
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_credential_file_is_told_without_its_secret(name, tmp_path, traces):
    for env in (
        {"DOCKER_AUTH_CONFIG": FILES[name]},
        {"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")},
    ):
        (tmp_path / "auth.json").write_text(FILES[name])
        traces = Traces(traces.canaries, tmp_path)
        ran = run_regsync("tags", "-vv", "--json", "127.0.0.1:1/app", env=env)
        assert ran.status == 4, ran.err
        assert not traces.found(said(ran))


PROFILES = {
    "no section": f"aws_secret_access_key = {SECRET}\n",
    "no value": f"[default]\n{SECRET}\n",
    "a half": f"[default]\naws_access_key_id =\naws_secret_access_key = {SECRET}\n",
    "twice": f"[default]\naws_secret_access_key = {SECRET}\naws_secret_access_key = {SECRET}\n",
    "no ASCII": f"[default]\naws_access_key_id = ä\naws_secret_access_key = {SECRET}\n",
}


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("name", PROFILES)
async def test_a_broken_profile_is_told_without_its_secret(world, name, clean_env, traces):
    (clean_env / ".aws").mkdir()
    (clean_env / ".aws" / "credentials").write_text(PROFILES[name])
    traces = Traces(traces.canaries, clean_env)
    scene = Scene(world, clean_env, clean_env)
    scene.registries = {
        "ecr": {"url": ECR, "auth_type": "ecr"},
        "target": {"url": "http://target.test"},
    }
    file = scene.config()
    ran = await scene.run("sync", "-vv", "--json", "-c", str(file))
    assert ran.status
    assert not traces.found(said(ran))


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("kind", ["not JSON", "a type", "a key", "a url", "a source"])
async def test_a_broken_google_file_is_told_without_its_secret(world, kind, clean_env, traces):
    user = {
        "type": "authorized_user",
        "client_id": "c",
        "client_secret": SECRET,
        "refresh_token": SECRET,
    }
    texts = {
        "not JSON": f'{{"type": "authorized_user", "refresh_token": "{SECRET}',
        "a type": json.dumps({**user, "type": 7}),
        "a key": json.dumps(
            {
                "type": "service_account",
                "private_key": SECRET,
                "private_key_id": "1",
                "client_email": "x",
            }
        ),
        "a url": json.dumps({**user, "token_uri": f"https://me:{SECRET}@evil.test/"}),
        "a source": json.dumps(
            {"type": "external_account", "credential_source": {"url": f"ftp://{SECRET}@x"}}
        ),
    }
    (file := clean_env / "google.json").write_text(texts[kind])
    traces = Traces(traces.canaries, clean_env)
    scene = Scene(world, clean_env, clean_env, env={"GOOGLE_APPLICATION_CREDENTIALS": str(file)})
    scene.registries = {
        "gar": {"url": "europe-docker.pkg.dev"},
        "target": {"url": "http://target.test"},
    }
    ran = await scene.run("sync", "-vv", "--json", "-c", str(scene.config()))
    assert ran.status
    assert not traces.found(said(ran))


# Variables with a login where none is expected.


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, form)
            for name in ("HTTPS_PROXY", "HTTP_PROXY")
            for form in (
                f"http://me:{SECRET}@proxy.test:1",
                f"me:{PLAIN}@proxy.test:1",
                f"socks5://me:{SECRET}@proxy.test:1",
                f"http://{PLAIN}/{PLAIN}@proxy.test:1",
                f"http://me:{PLAIN}#@proxy.test:1",
                f"http://me:{SECRET}@proxy.test:no",
                f"http://me:{SECRET}@proxy test",
            )
        ),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"https://me:{PLAIN}@credentials.test/x"),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://me:{PLAIN}@credentials.test/x?{PLAIN}"),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://me:{PLAIN}@metadata.test"),
        ("AZURE_AUTHORITY_HOST", f"https://me:{PLAIN}@login.test"),
        ("GCE_METADATA_HOST", f"me:{PLAIN}@metadata.test"),
        ("SSL_CERT_FILE", f"https://me:{PLAIN}@registry.test/ca.pem"),
    ],
)
async def test_a_variable_with_a_login_is_told_without_it(world, name, value, tmp_path, traces):
    scene = Scene(world, tmp_path, tmp_path, env={name: value})
    if name.startswith("AZURE"):
        scene.env |= {"AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_SECRET": SECRET}
    hosts = {"ecr": ECR, "acr": "name.azurecr.io", "gar": "europe-docker.pkg.dev"}
    scene.registries = {kind: {"url": host, "auth_type": kind} for kind, host in hosts.items()}
    scene.registries |= {
        "plain": {"url": "http://plain.test"},
        "target": {"url": "https://target.test"},
    }
    ran = await scene.run("sync", "-vv", "--json", "-c", str(scene.config()))
    assert ran.status
    assert not traces.found(said(ran))


# Arguments.

TYPED: list[tuple[str, ...]] = [
    (URL,),
    (f"mirror:{PLAIN}@registry.test",),
    ("cpoy", f"{URL}/app", "b.test/app"),
    ("copy", f"{URL}/app:v1", "b.test/app"),
    ("copy", "a.test/app:v1", f"mirror:{PLAIN}@registry.test/app"),
    ("copy", "a.test/app", "b.test/app", f"{URL}/app"),
    ("copy", "a.test/app", "b.test/app", f"--password={PLAIN}"),
    ("copy", "a.test/app", "b.test/app", "--platform", f"mirror:{PLAIN}@registry.test"),
    ("tags", f"{URL}/app"),
    ("tags", f"mirror:{PLAIN}@registry.test/app"),
    ("tags", "a.test/app", "--semver", URL),
    ("tags", "a.test/app", "--glob", f"{URL}["),
    ("tags", "a.test/app", "--sort", URL),
    ("tags", "a.test/app", "--latest", URL),
    ("sync", URL),
    ("sync", "-c", URL),
    ("sync", "-c", "-", URL),
    ("sync", "-c", "/dev/null", "--shard", f"mirror:{PLAIN}@x"),
    ("watch", "-c", URL),
    ("watch", "-c", "/dev/null", "--interval", URL),
    ("watch", "-c", "/dev/null", "--health-bind", URL),
    ("watch", "-c", "/dev/null", "--health-port", URL),
    ("auth", URL),
    ("auth", "check", URL),
    ("audit", "--log-format", URL, "-c", "x"),
    ("validate", URL),
    ("expand", URL),
    ("schema", URL),
    ("version", f"--user=mirror:{PLAIN}@registry.test"),
]


def test_what_is_not_known_is_named_without_what_follows():
    ran = run_regsync("copy", "a.test/app", "b.test/app", "--user", "me", f"--password={PLAIN}")
    assert ran.err.startswith(
        "error: CONFIG_ERROR: unrecognized arguments: --user *** --password\n"
    )
    assert "command 'cpoy'\nhint: " in run_regsync("cpoy").err
    assert "command '***'" in run_regsync(PLAIN).err


@pytest.mark.rule("R19")
@pytest.mark.parametrize(
    "words", TYPED, ids=lambda words: " ".join(words).replace(SECRET, "*").replace(PLAIN, "*")
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_login_among_the_arguments_is_not_repeated(words, form, traces):
    more = () if form == "text" else ("--json", "--log-format", "json")
    ran = run_regsync(*words, *more, "-vv")
    assert ran.status in (3, 2, 4)
    assert not traces.found(said(ran))


# What is printed of objects.


def ours() -> Iterator[object]:
    """Give every living object of a class of the program's."""
    for each in gc.get_objects():
        if str(type(each).__module__).startswith("_regsync"):
            yield each


@pytest.mark.anyio
@pytest.mark.virtual_time
@pytest.mark.parametrize("variant", ["", "of the environment", "of containers"])
async def test_no_object_shows_a_secret(world, variant, tmp_path, clean_env):
    """At some requests of a run, whatever is alive in it is printed."""
    classes = Counter[str]()
    shown: dict[str, str] = {}
    earlier = list(
        ours()
    )  # of other tests: kept, so that no new object has the identity of one of these
    known = set(map(id, earlier))
    scene = arranged(world, tmp_path, clean_env, variant)

    def look(host: str, request: Any, answer: Any, text: str) -> Any:
        if scene.asked in (5, 12, 20, 30, 120):
            for each in (each for each in ours() if id(each) not in known):
                classes[name := type(each).__qualname__] += 1
                if classes[name] < 40 and (
                    found := scene.canaries.found(repr(each)[:20_000].encode())
                ):
                    shown[name] = str(found)
        return answer

    scene.answers = look
    await scene.run("sync", "-q", "-c", str(scene.config()))
    assert {
        "Registry",
        "Credential",
        "CloudEnvironment",
        "Machine",
        "Request",
        "Call",
        "Authenticator",
    } <= {*classes}
    assert shown.keys() <= {"Call", "Headers", "_Hop"}, "which hold what servers sign, for a moment"


# By key of the configuration: the place of its canary (canary_scene), or why it has none.
KEYS = {
    "token": "token",
    "password": "credentials.password",
    "proxy": "proxy",
    "client_key": "a file, which test_canary_failures has",
    "credentials": "of password",
}
# As above, by variable: what its value, or the file that it names, has.
VARIABLES = {
    "HTTPS_PROXY": "HTTPS_PROXY",
    "DOCKER_AUTH_CONFIG": "DOCKER_AUTH_CONFIG",
    "GITHUB_TOKEN": "GITHUB_TOKEN",
    "REGISTRY_AUTH_FILE": "REGISTRY_AUTH_FILE",
    "DOCKER_CONFIG": "docker's config.json",
    "GOOGLE_APPLICATION_CREDENTIALS": "Google refresh_token",
    "AZURE_CLIENT_SECRET": "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE": "AZURE_FEDERATED_TOKEN_FILE",
    "IDENTITY_HEADER": "IDENTITY_HEADER",
    "AWS_ACCESS_KEY_ID": "a name, as a user's",
    "AWS_SECRET_ACCESS_KEY": "AWS secret_access_key",
    "AWS_SESSION_TOKEN": "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN": "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
}
# Words of names of secrets that are in the program's text and no variables' names.
_SECRET = re.compile(
    r"token|secret|passw|credential|\bkey|_key|session|auth|proxy|identity_header", re.IGNORECASE
)

# An option in a command's help that takes no value: its meaning follows, or is on the next line.
_WITHOUT_VALUE = re.compile(r"^  (?:-[a-z], )?(--?[a-z-]+)(?:  .*)?$", re.MULTILINE)


@pytest.mark.new
def test_each_command_has_canaries():
    assert {words[0] for words in COMMANDS.values()} | ELSEWHERE == {*command_names()}


@pytest.mark.new
def test_each_option_that_changes_what_is_printed_has_canaries():
    """`--show-secrets` shows them; help and the usual options are in each command's runs."""
    options = {
        option
        for name in command_names()
        for option in _WITHOUT_VALUE.findall(run_process(name, "--help").out)
    } - {"--help", "-q", "-v", "--no-progress"}
    run = {word for words in COMMANDS.values() for word in words}
    assert options - run == {"--show-secrets", "--no-artifacts", "--report", "--sbom"}


def test_each_secret_key_of_the_configuration_has_its_canary():
    every = {*names_of(run_regsync("schema").report)}
    assert {name for name in every if _SECRET.search(name)} - {"auth_type"} == set(KEYS)


def names_of(schema: Any) -> Iterator[str]:
    """Give the names of all properties in a schema."""
    if isinstance(schema, dict):
        properties = schema.get("properties", {})
        yield from properties
        for each in (*schema.values(), *properties.values()):
            yield from names_of(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from names_of(each)


@pytest.mark.anyio
@pytest.mark.virtual_time
async def test_each_variable_with_a_secret_has_its_canary(tmp_path, clean_env):
    text = "".join(path.read_text() for path in (ROOT / "_regsync").rglob("*.py"))
    every = set(re.findall(r"\b[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b", text))
    names = {name for name in every if _SECRET.search(name)}
    # aws.py names them without their beginning, in lower case.
    aws = (ROOT / "_regsync" / "auth" / "aws.py").read_text()
    lower = {f"AWS_{name.upper()}" for name in re.findall(r"[\"(]([a-z]+(?:_[a-z]+)+)\"", aws)}
    assert VARIABLES.keys() <= every | lower
    others = {
        name for name in names - VARIABLES.keys() if not any(name in each for each in VARIABLES)
    }
    assert others == OTHERS
    places: set[str] = set()
    for variant in ("", *VARIANTS):
        async with virtual() as world:
            places |= arranged(world, tmp_path, clean_env, variant).canaries.places.keys()
    assert {*VARIABLES.values(), *KEYS.values()} - places == {
        *("a name, as a user's", "a file, which test_canary_failures has", "of password")
    }


# A code of errors, statuses of an upload's session, examples, and variables with hosts.
OTHERS = {
    "AUTH_ERROR",
    "SESSION_GONE",
    "REGISTRY_TOKEN",
    "MIRROR_PASSWORD",
    "HTTP_PROXY",
    "NO_PROXY",
    "AZURE_AUTHORITY_HOST",
}
