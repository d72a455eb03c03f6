"""Run each command: read the files that its arguments name, and start the work.

Invariants: a command imports the modules that it needs when it runs, so that `version` and `--help`
start fast.
Follows: docs/design.md section 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from _regsync import FIPS_BUILD, IS_STATIC, __version__, edge, fips
from _regsync.errors import ConfigError, SyncError
from _regsync.text import printable, reason_of

if TYPE_CHECKING:
    from argparse import Namespace

    from _regsync.app.console import Console
    from _regsync.app.pages import Json
    from _regsync.config import Config, ConfigFile
    from _regsync.oci import Reference
    from _regsync.pins import Lock
    from _regsync.sync.mappings import Retry
    from _regsync.tags import TagRule

# What a command gives: its exit status, or the work that is left to do on an event loop, which
# returns the exit status.
Outcome: TypeAlias = "int | Callable[[], Awaitable[int]]"

LARGEST_CONFIG = 32 * 1024 * 1024  # bytes


# Files.


def read_bytes(name: str, limit: int) -> bytes:
    """Read a file, or standard input if `name` is `-`.

    Raises ConfigError if the file cannot be read or has more than `limit` bytes.
    """
    try:
        if name == "-":
            data = sys.stdin.buffer.read(limit + 1)
        else:
            with open(name, "rb") as stream:
                data = stream.read(limit + 1)
    except OSError as error:
        printable_name = printable(name) or "a file without a name"
        reason = reason_of(error)
        raise ConfigError(f"{printable_name} cannot be read: {reason}") from error
    if len(data) > limit:
        raise ConfigError(f"{printable(name)} is larger than {limit} bytes")
    return data


def read_config_file(name: str) -> ConfigFile:
    """Read the text of a configuration, from standard input if `name` is `-`."""
    from _regsync.config import ConfigFile

    return ConfigFile(
        text=read_bytes(name, LARGEST_CONFIG),
        name=input_name(name),
        environ=edge.current().environ,
        base_dir="" if name == "-" else os.path.dirname(os.path.abspath(name)),
    )


def read_report_file(path: str) -> Json:
    """Read the JSON report of a run, from standard input if `path` is `-`."""
    from _regsync.app.pages import LARGEST_REPORT, read_report

    return read_report(read_bytes(path, LARGEST_REPORT), input_name(path))


def input_name(path: str) -> str:
    """Return how messages name a file, or standard input if `path` is `-`."""
    return "standard input" if path == "-" else printable(path)


def read_config(name: str, console: Console) -> Config:
    """Read a configuration for a run, and log its warnings."""
    config = load_config(name)
    log_warnings(config, console)
    return with_all_repositories(config, console.log)


def load_config(name: str | None) -> Config:
    """Read a configuration without showing its warnings. Without a name, return an empty one."""
    from _regsync.config import Config, load

    return Config({}, ()) if name is None else load(read_config_file(name))


def log_warnings(config: Config, console: Console) -> None:
    for warning in config.warnings:
        console.log("warning", "config", warning)


def with_all_repositories(config: Config, log: Callable[..., None]) -> Config:
    """Return a configuration in which each repository of a layout has a mapping, if one mapping
    stands for all of them.

    The new mappings come after all others, so that what a mapping says of one repository goes
    before. Raises ConfigError if a layout cannot be read.
    """
    from _regsync.config import ALL_REPOSITORIES

    mappings = [rule for rule in config.mappings if rule.source_repository != ALL_REPOSITORIES]
    for rule in config.mappings:
        if rule.source_repository != ALL_REPOSITORIES:
            continue
        from _regsync.layout import list_repositories  # few runs need it

        try:
            names = list_repositories(rule.source.host)
        except SyncError as error:
            raise ConfigError(f"mappings[{rule.index}]: {error}", hint=error.hint) from error
        if not names:
            text = f"mappings[{rule.index}]: {rule.source.authority} names no repository"
            log("warning", "no_repository", text)
        free_index = len(config.mappings) + len(mappings)
        mappings += [
            rule._replace(index=index, source_repository=name, target_repository=name)
            for index, name in enumerate(names, start=free_index)
        ]
    return config._replace(mappings=tuple(mappings))


def lock_path(arguments: Namespace) -> str:
    """Return the path of the lock file. The default for `mirror.yaml` is `mirror.lock`.

    Raises ConfigError if the path is not given and the configuration comes from standard input.
    """
    if arguments.lock is not None:
        return str(arguments.lock)
    if arguments.config == "-":
        raise ConfigError(
            "--lock PATH is required when the configuration comes from standard input"
        )
    name, _ = os.path.splitext(arguments.config)
    return f"{name}.lock"


def read_lock(arguments: Namespace, config: Config) -> Lock | None:
    """Read the lock file. Returns None without `--locked` and `--lock`.

    Raises ConfigError if the file does not exist or was made for other mappings.
    """
    if not arguments.locked and arguments.lock is None:
        return None
    from _regsync.app.running import open_lock

    path = lock_path(arguments)
    lock = open_lock(path)
    if lock is None:
        raise ConfigError(
            f"the lock file {printable(path)} does not exist", hint="run `regsync lock` to write it"
        )
    lock.check(config.mappings)
    return lock


def check_can_be_written(path: str | None) -> None:
    """Raise ConfigError if a command is to write a file where there can be none."""
    if path is None:
        return
    reason = ""
    if os.path.isdir(path or "."):
        reason = "it names no file"
    elif not os.path.isdir(os.path.dirname(path) or "."):
        reason = "its directory does not exist"
    if reason:
        raise ConfigError(f"'{printable(path)}' cannot be written: {reason}")


def read_reference(text: str) -> Reference:
    """Parse a reference from the command line. The path of an image layout is made absolute."""
    from _regsync.oci import LAYOUT_SCHEME, parse_reference

    reference = parse_reference(text)
    if reference.is_in_layout:
        path = reference.registry.removeprefix(f"{LAYOUT_SCHEME}:")
        path = os.path.abspath(os.path.expanduser(path))
        reference = reference._replace(registry=f"{LAYOUT_SCHEME}:{path}")
    return reference


def check_has_repository(reference: Reference) -> None:
    """Raise ConfigError if the reference names an image layout but no repository in it."""
    if not reference.repository:
        hint = f"write {reference.registry}//REPO"
        raise ConfigError(f"reference {str(reference)!r}: the repository is missing", hint=hint)


def select_shard(shard: str | None, config: Config, log: Callable[..., None]) -> Config:
    """Return a configuration with only the mappings of one shard, or `config` if `shard` is None.

    `shard` is the value of `--shard`: `I/N`, or `/N` if an environment variable holds I. Raises
    ConfigError if `shard` is invalid.
    """
    if shard is None:
        return config
    from _regsync.sync.mappings import config_of_shard, parse_shard

    number, total = parse_shard(shard, edge.current().environ)
    part = config_of_shard(config, number, total)
    message = f"shard {number} of {total}: {len(part.mappings)} of {len(config.mappings)} mappings"
    log("info", "shard", message, mappings=len(part.mappings), of=len(config.mappings))
    return part


# Commands.


def run_copy(arguments: Namespace, console: Console) -> Outcome:
    from _regsync.app.running import run
    from _regsync.config import ArtifactRule, MappingRule, registry_for
    from _regsync.tags import TagRule

    config = load_config(arguments.config)
    source = read_reference(arguments.src)
    target = read_reference(arguments.dst)
    check_has_repository(source)
    source_reference = source.digest or source.tag or "latest"
    # An index that is trimmed to some platforms has another digest than the source's.
    has_same_digest = target.digest == source.digest and not arguments.platform
    if target.digest is not None and not has_same_digest:
        raise ConfigError(
            "DST: a digest is allowed only where SRC has the same digest and --platform is not used",
            hint="give DST a tag, or leave the digest out",
        )

    mapping = MappingRule(
        index=0,
        source=registry_for(source.registry, config),
        source_repository=source.repository,
        targets=(registry_for(target.registry, config),),
        # An image layout may be named without a repository: the image keeps the source's.
        target_repository=target.repository or source.repository,
        tags=TagRule(),
        platforms=tuple(arguments.platform) or None,
        artifacts=ArtifactRule(enabled=not arguments.no_artifacts),
    )
    is_within_registry = mapping.source.address == mapping.targets[0].address
    if is_within_registry and mapping.source.max_concurrent == 1:
        # A copy needs two permits at once, one to read and one to write (I8).
        raise ConfigError(
            f"{mapping.source.authority}: max_concurrent is 1, but a copy within one registry reads"
            " and writes at the same time",
            hint="set max_concurrent to 2 or more",
        )
    references = (source_reference, target.digest or target.tag or source_reference)
    config = config._replace(mappings=(mapping,))
    # With `recheck` the image's artifacts are looked up whatever the saved state says about them.
    return partial(run, config, console, kind="copy", references=references, recheck=True)


def run_sync(arguments: Namespace, console: Console) -> Outcome:
    from _regsync.app.running import run

    config = read_config(arguments.config, console)
    retry = read_retry(arguments, config, console.log)
    if retry is not None:
        config = config._replace(mappings=retry.mappings)
    config = select_shard(arguments.shard, config, console.log)
    lock = read_lock(arguments, config)
    check_can_be_written(arguments.summary)
    return partial(
        run,
        config,
        console,
        kind="plan" if arguments.dry_run else "sync",
        recheck=arguments.recheck,
        verify=arguments.verify,
        lock=lock,
        retry=retry,
        summary_path=arguments.summary,
    )


def read_retry(arguments: Namespace, config: Config, log: Callable[..., None]) -> Retry | None:
    """Read which images failed or were left undone in the report of `--retry-from`.

    Returns None without `--retry-from`. Logs a message if no mapping writes a repository of such an
    image. Raises ConfigError if the report is invalid.
    """
    if arguments.retry_from is None:
        return None
    from _regsync.sync.mappings import Retry

    path = arguments.retry_from
    if path == "-" and arguments.config == "-":
        raise ConfigError(
            "configuration and report cannot both come from standard input",
            hint="name a file for one of the two",
        )
    report = read_report_file(path)
    images = [
        (image["source"], image["target"])
        for image in report["images"]
        if image["status"] in ("failed", "undone")
    ]
    retry = Retry(images, config.mappings)
    if images and not retry.mappings:  # the report is of another configuration
        text = "nothing to retry: no image of these mappings failed or was left undone"
        log("warning", "nothing_to_retry", f"{input_name(path)}: {text}")
    return retry


def run_lock(arguments: Namespace, console: Console) -> Outcome:
    from _regsync.app.running import update_lock

    config = read_config(arguments.config, console)
    path = lock_path(arguments)
    check_can_be_written(path)
    return partial(
        update_lock,
        path,
        config,
        console,
        only=arguments.only,
        recheck=arguments.recheck,
        is_check=arguments.check,
    )


def run_audit(arguments: Namespace, console: Console) -> Outcome:
    from _regsync.app.running import audit

    check_can_be_written(arguments.receipt)
    config = select_shard(arguments.shard, read_config(arguments.config, console), console.log)
    lock = read_lock(arguments, config)
    return partial(
        audit,
        config,
        console,
        reads_blobs=arguments.read,
        receipt_path=arguments.receipt,
        lock=lock,
    )


def run_auth(arguments: Namespace, console: Console) -> Outcome:
    from _regsync.app.access import check_access

    config = read_config(arguments.config, console)
    return partial(check_access, config, console)


def run_watch(arguments: Namespace, console: Console) -> Outcome:
    from _regsync.app import watch
    from _regsync.config import parse_duration

    if arguments.config == "-":
        raise ConfigError("watch needs a file, not -, because it reads the configuration again")
    try:
        interval = parse_duration(arguments.interval)
    except ValueError as error:
        raise ConfigError(f"--interval: {error}") from error
    if interval == 0:
        raise ConfigError("--interval must be above 0", hint="write a duration such as 15m")

    def read_inputs(log: Callable[..., None]) -> watch.Inputs:
        config = with_all_repositories(load_config(arguments.config), log)
        config = select_shard(arguments.shard, config, log)
        return watch.Inputs(config, read_lock(arguments, config))

    return partial(
        watch.run, console, read_inputs, interval, arguments.health_bind, arguments.health_port
    )


def run_tags(arguments: Namespace, console: Console) -> Outcome:
    from _regsync.app.running import list_tags
    from _regsync.config import registry_for
    from _regsync.tags import TagRule

    config = with_all_repositories(load_config(arguments.config), console.log)
    reference = read_reference(arguments.repo)
    check_has_repository(reference)
    if reference.tag or reference.digest:
        raise ConfigError(
            f"reference {str(reference)!r}: only a repository can be listed",
            hint="leave out the tag or digest, and select tags with --glob",
        )

    registry = registry_for(reference.registry, config)
    rules = [rule_from_options(arguments)]
    if rules == [TagRule()]:
        # Without options, the rules of the mappings that copy from the repository. Keys are
        # compared, because a repository may have several names: two aliases may have one address.
        key = registry.repository_key(reference.repository)
        mappings = [
            mapping
            for mapping in config.mappings
            if mapping.source.repository_key(mapping.source_repository) == key
        ]
        for mapping in mappings:
            console.log("info", "rule", f"the rule is that of mappings[{mapping.index}]")
        if arguments.config and not mappings:
            console.log("info", "rule", "no mapping copies from there, so that all tags are listed")
        # Several mappings may have the same rule.
        rules = list(dict.fromkeys(mapping.tags for mapping in mappings)) or rules
    return partial(list_tags, registry, reference.repository, rules, console)


def rule_from_options(arguments: Namespace) -> TagRule:
    """Return the tag rule that the options of `tags` describe.

    Raises ConfigError if a pattern or a version range is invalid.
    """
    from _regsync.tags import TagRule, select

    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in TagRule._fields
    }
    rule = TagRule(**given)
    try:
        select((), rule)  # `select` checks the rule, even without tags
    except ValueError as error:
        raise ConfigError(str(error), hint="see `regsync tags --help`") from error
    return rule


def run_validate(arguments: Namespace, console: Console) -> int:
    log_warnings(load_config(arguments.file), console)
    return 0


def run_expand(arguments: Namespace, console: Console) -> int:
    from _regsync.config import expand

    console.print_text(expand(read_config_file(arguments.file)))
    return 0


def run_report(arguments: Namespace, console: Console) -> int:
    from _regsync.app import pages

    forms = {"markdown": pages.as_markdown, "junit": pages.as_junit, "html": pages.as_page}
    run = read_report_file(arguments.file)
    with pages.expecting_report(input_name(arguments.file)):
        text = forms[arguments.to](run)
    console.print_text(text)
    return 0


def run_schema(arguments: Namespace, console: Console) -> int:
    from _regsync.config import schema

    console.print_text(json.dumps(schema(), indent=2) + "\n")
    return 0


def run_version(arguments: Namespace, console: Console) -> int:
    facts = describe_version(arguments.closed_reason)
    if arguments.json:
        console.print_document(facts)
    else:
        console.print_line("regsync {version} ({gate}), {python}, {openssl}".format(**facts))
    return 0


def describe_version(closed_reason: str) -> dict[str, object]:
    """Return the document of `version --json`. The FIPS gate is closed for `closed_reason`, if any."""
    provider = None  # name and version of the FIPS provider, if the gate holds
    if not FIPS_BUILD:
        gate = "no FIPS gate in this build"
    elif closed_reason:
        gate = f"FIPS gate closed: {closed_reason}"
    else:
        provider = fips.provider()
        gate = "FIPS gate holds: {name} {version} is active".format(**provider)
        if IS_STATIC:
            gate += f": {fips.CLAIM}"
    try:
        import _ssl  # faster than `ssl`, and the version is all that is needed

        openssl = _ssl.OPENSSL_VERSION
    except ImportError:  # an interpreter that was built without OpenSSL
        openssl = "no OpenSSL"
    return {
        "schema": 1,
        "version": __version__,
        "build": ("static-" if IS_STATIC else "") + ("fips" if FIPS_BUILD else "nofips"),
        "python": f"CPython {sys.version.split()[0]}",
        "openssl": openssl,
        "gate": gate,
        "gate_holds": provider is not None,
        "provider": provider,
    }
