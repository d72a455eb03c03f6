"""The commands: each reads what its arguments name, and has the work done.

Owns: which configuration, mapping or rule the arguments mean.
May not know: how arguments are written, how anything is asked or copied.
Invariants: a command imports what it needs when it runs, so that `version` and `--help` need little.
Follows: docs/design.md section 2.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from _regsync.errors import ConfigError
from _regsync.text import printable, reason_of

if TYPE_CHECKING:
    from argparse import Namespace

    from _regsync.app.console import Console
    from _regsync.config.model import ArtifactRule, Config, MappingRule
    from _regsync.config.reader import ConfigFile
    from _regsync.oci.manifest import Platform
    from _regsync.oci.reference import Reference
    from _regsync.sync.lockfile import Lock
    from _regsync.sync.retry import Retry
    from _regsync.tags import TagRule

LARGEST_CONFIG = 32 * 1024 * 1024  # bytes
DEFAULT_INTERVAL = "5m"
DEFAULT_HEALTH_ADDRESS = "127.0.0.1"
DEFAULT_HEALTH_PORT = 8080

MOST_NAMED = 10  # images in one warning


def read_bytes(name: str, most: int) -> bytes:
    """Read a file, `-` from standard input; ConfigError where it has more than `most` bytes."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(most + 1)
        else:
            with open(name, "rb") as stream:
                data = stream.read(most + 1)
    except OSError as error:
        printable_name = printable(name) or "a file without a name"
        reason = reason_of(error)
        raise ConfigError(f"{printable_name} cannot be read: {reason}") from error
    if len(data) > most:
        raise ConfigError(f"{printable(name)} is larger than {most} bytes")
    return data


def read_file(name: str) -> ConfigFile:
    """Read a configuration's file, `-` from standard input."""
    from _regsync.config.reader import ConfigFile

    return ConfigFile(
        text=read_bytes(name, LARGEST_CONFIG),
        name="standard input" if name == "-" else name,
        environ=os.environ,
        base_dir=None if name == "-" else os.path.dirname(os.path.abspath(name)),
        home=os.path.expanduser("~"),
    )


def read_config(name: str | None, console: Console | None = None, *, lint: bool = False) -> Config:
    """Read a configuration, an empty one without a name; its warnings go to the console."""
    if name is None:
        from _regsync.config.model import Config

        return Config({}, ())

    from _regsync.config.reader import load

    config = load(read_file(name), should_lint=lint)
    if console is not None:
        for warning in config.warnings:
            console.log("warning", "config", warning)
    return config


def lock_path(arguments: Namespace) -> str:
    """Return the path of the lock: beside the configuration `FILE.yaml` it is `FILE.lock`."""
    if arguments.lock is not None:
        return str(arguments.lock)
    if arguments.config == "-":
        raise ConfigError(
            "--lock PATH is required when the configuration comes from standard input"
        )
    name, _ = os.path.splitext(arguments.config)
    return f"{name}.lock"


def lock_for(arguments: Namespace, config: Config) -> Lock | None:
    """Return the lock of a run with `--locked`, else None; ConfigError unless it is for this
    configuration.
    """
    if not arguments.locked and arguments.lock is None:
        return None
    from _regsync.app.locking import open_lock

    file = open_lock(lock_path(arguments))
    if file.stamp is None:
        raise ConfigError(
            f"the lock file {printable(file.path)} does not exist",
            hint="run `regsync lock` to write it",
        )
    file.lock.check(config.mappings)
    return file.lock


def read_reference(text: str) -> Reference:
    """Read a reference; the path of an image layout becomes absolute."""
    from _regsync.oci.reference import parse_reference

    reference = parse_reference(text)
    if reference.is_in_layout:
        path = os.path.abspath(os.path.expanduser(reference.host))
        reference = reference._replace(host=path)
    return reference


def check_has_repository(reference: Reference) -> None:
    """Raise ConfigError for an image layout without a repository in it."""
    if not reference.repository:
        hint = f"write {reference.registry}//REPO:TAG"
        raise ConfigError(f"reference {str(reference)!r}: the repository is missing", hint=hint)


def shard_of(shard: str | None, config: Config, log: Callable[..., None]) -> Config:
    """Return the part of a configuration that is one shard's, or all of it without a shard.

    A shard is `I/N`, or `/N` with I from a variable of the environment.
    """
    if shard is None:
        return config
    from _regsync.sync.mappings import parse_shard, share

    targets = [target for mapping in config.mappings for target in mapping.targets]
    if any(target.is_layout for target in targets):
        raise ConfigError(
            "--shard cannot be used with an image layout as target: only one process may write it",
            hint="leave --shard out, or give each part a configuration and a directory of its own",
        )
    number, total = parse_shard(shard, os.environ)
    part = share(config, number, total)
    message = f"shard {number} of {total}: {len(part.mappings)} of {len(config.mappings)} mappings"
    log("info", "shard", message, mappings=len(part.mappings), of=len(config.mappings))
    return part


def run_copy(arguments: Namespace, console: Console) -> int:
    from _regsync.app.environment import run_async
    from _regsync.app.running import SingleImage, run
    from _regsync.config.model import ArtifactRule

    config = read_config(arguments.config)
    source = read_reference(arguments.src)
    target = read_reference(arguments.dst)
    check_has_repository(source)
    if not target.repository:
        # Only DST as a layout may leave it out: the image keeps the source's repository.
        target = target._replace(repository=source.repository)
    reference = source.digest or source.tag or "latest"
    if source.digest is None and source.tag is None:
        console.log("info", "default_tag", f"{source}: no tag given, using latest")

    platforms = tuple(arguments.platform)
    # An index that is trimmed to its platforms gets another digest.
    has_same_digest = target.digest == source.digest and not platforms
    if target.digest is not None and not has_same_digest:
        raise ConfigError(
            "DST: a digest is allowed only where SRC has the same digest and --platform is not used",
            hint="give DST a tag, or leave the digest out",
        )

    artifacts = ArtifactRule(enabled=not arguments.no_artifacts)
    mapping = mapping_between(source, target, config, platforms, artifacts)
    image = SingleImage(mapping, reference, target.digest or target.tag or reference)
    config = config._replace(mappings=(mapping,))
    return run_async(partial(run, config, console, image=image))


def mapping_between(
    source: Reference,
    target: Reference,
    config: Config,
    platforms: tuple[Platform, ...],
    artifacts: ArtifactRule,
) -> MappingRule:
    """Return a mapping between two repositories, as a configuration could have it; ConfigError where it
    could never be carried out.
    """
    from _regsync.config.model import MappingRule, registry_for
    from _regsync.tags import TagRule

    mapping = MappingRule(
        index=0,
        source=registry_for(source.registry, config),
        source_repository=source.repository,
        targets=(registry_for(target.registry, config),),
        target_repository=target.repository,
        tags=TagRule(),
        platforms=platforms or None,
        artifacts=artifacts,
    )
    is_within_registry = mapping.source.address == mapping.targets[0].address
    if is_within_registry and mapping.source.max_concurrent == 1:
        # A copy takes a permit for reading and one for writing in one step, and there is only one (I8).
        raise ConfigError(
            f"{mapping.source.authority}: max_concurrent is 1, but a copy within one registry reads"
            " and writes at the same time",
            hint="set max_concurrent to 2 or more",
        )
    return mapping


def run_sync(arguments: Namespace, console: Console) -> int:
    from _regsync.app.environment import run_async
    from _regsync.app.running import run

    config = read_config(arguments.config, console)
    retry = retry_for(arguments, config, console.log)
    config = shard_of(arguments.shard, config, console.log)
    lock = lock_for(arguments, config)
    if retry is not None:
        # This comes last: shards and the lock are those of whole mappings.
        config = retry.narrowed(config)
    kind: Literal["plan", "sync"] = "plan" if arguments.dry_run else "sync"
    recheck = arguments.recheck
    return run_async(
        partial(run, config, console, kind=kind, recheck=recheck, lock=lock, retry=retry)
    )


def retry_for(arguments: Namespace, config: Config, log: Callable[..., None]) -> Retry | None:
    """Return which images of a report are to be tried again, None without `--retry-from`; warn of
    those that no mapping selects any more.
    """
    if arguments.retry_from is None:
        return None
    from _regsync.app.report_file import LARGEST_REPORT, read_report
    from _regsync.sync.retry import Retry

    path = arguments.retry_from
    if path == arguments.config == "-":
        raise ConfigError(
            "configuration and report cannot both come from standard input",
            hint="name a file for one of the two",
        )
    name = "standard input" if path == "-" else printable(path)
    report = read_report(read_bytes(path, LARGEST_REPORT), name)
    images = [(image.source, image.target) for image in report.with_status("failed", "undone")]
    if not images:
        log(
            "info",
            "nothing_to_retry",
            f"{name}: nothing to retry: no image failed or was left undone",
        )

    retry = Retry(images)
    unselected = retry.unselected(config)
    if unselected:
        shown = "; ".join(unselected[:MOST_NAMED])
        if len(unselected) > MOST_NAMED:
            shown += f"; and {len(unselected) - MOST_NAMED} more"
        text = f"{name}: not retried, because no mapping selects them any more: {shown}"
        log("warning", "retry_unselected", text, images=len(unselected))
    return retry


def run_lock(arguments: Namespace, console: Console) -> int:
    from _regsync.app import locking
    from _regsync.app.environment import run_async

    config = read_config(arguments.config, console)
    options = locking.LockOptions(
        mappings=locking.mappings_from(arguments.only, config),
        keeps_others=bool(arguments.only),
        recheck=arguments.recheck,
        writes=not arguments.diff,
        as_table=arguments.markdown,
    )
    file = locking.open_lock(lock_path(arguments))
    return run_async(partial(locking.update_lock, file, config, options, console))


def run_analyze(arguments: Namespace, console: Console) -> int:
    from _regsync.app.environment import run_async
    from _regsync.app.running import run

    config = shard_of(arguments.shard, read_config(arguments.config, console), console.log)
    lock = lock_for(arguments, config)
    return run_async(partial(run, config, console, kind="analysis", lock=lock))


def run_audit(arguments: Namespace, console: Console) -> int:
    from _regsync.app.auditing import audit
    from _regsync.app.environment import run_async

    if arguments.read < 0:
        raise ConfigError("--read: N must be 0 or more", hint="see `regsync audit --help`")
    receipt = arguments.receipt
    if receipt is not None and not os.path.isdir(os.path.dirname(receipt) or "."):
        raise ConfigError(f"{printable(receipt)} cannot be written: its directory does not exist")
    config = shard_of(arguments.shard, read_config(arguments.config, console), console.log)
    lock = lock_for(arguments, config)
    return run_async(
        partial(audit, config, console, read=arguments.read, receipt=receipt, lock=lock)
    )


def run_auth(arguments: Namespace, console: Console) -> int:
    from _regsync.app.access import check_access
    from _regsync.app.environment import run_async

    config = read_config(arguments.config, console)
    return run_async(partial(check_access, config, console))


def run_watch(arguments: Namespace, console: Console) -> int:
    from _regsync.app import watch
    from _regsync.app.environment import run_async
    from _regsync.config import reader
    from _regsync.config.fields import parse_duration

    def load(log: Callable[..., None], file: ConfigFile) -> Config:
        return shard_of(arguments.shard, reader.load(file), log)

    if arguments.config == "-":
        raise ConfigError("watch needs a file, not -, because it reads the configuration again")
    try:
        interval = parse_duration(arguments.interval or DEFAULT_INTERVAL)
    except ValueError as error:
        raise ConfigError(f"--interval: {error}") from error
    if not interval:
        raise ConfigError("--interval must be above 0", hint="write a duration such as 15m")
    address = arguments.health_bind or DEFAULT_HEALTH_ADDRESS
    port = DEFAULT_HEALTH_PORT if arguments.health_port is None else arguments.health_port
    return run_async(
        partial(
            watch.run,
            console,
            read=partial(read_file, arguments.config),
            load=load,
            read_lock=partial(lock_for, arguments),
            interval=interval,
            health_at=(address, port),
        )
    )


def run_tags(arguments: Namespace, console: Console) -> int:
    from _regsync.app.environment import run_async
    from _regsync.app.running import list_tags
    from _regsync.config.model import registry_for
    from _regsync.tags import TagRule

    config = read_config(arguments.config)
    where = read_reference(arguments.repo)
    check_has_repository(where)
    if where.tag or where.digest:
        raise ConfigError(
            f"reference {str(where)!r}: only a repository can be listed",
            hint="leave out the tag or digest, and select tags with --glob",
        )

    registry = registry_for(where.registry, config)
    rule = rule_from(arguments)
    rules = [rule]
    # Without options the rules are those of the configuration; without these all tags are listed.
    if rule == TagRule():
        rules = rules_for(registry.repository_key(where.repository), config, console) or rules
    return run_async(partial(list_tags, registry, where.repository, rules, console))


def rule_from(arguments: Namespace) -> TagRule:
    """Return the rule that the options of `tags` make; ConfigError for one that is wrong."""
    from _regsync.tags import TagRule, select

    fields: dict[str, Any] = {}
    for name in TagRule._fields:
        # Not every field has an option.
        value = getattr(arguments, name, None)
        fields[name] = tuple(value) if isinstance(value, list) else value
    rule = TagRule(**fields)
    try:
        select((), rule)  # without tags, because this checks the rule
    except ValueError as error:
        raise ConfigError(str(error), hint="see `regsync tags --help`") from error
    return rule


def rules_for(source_key: object, config: Config, console: Console) -> list[TagRule]:
    """Return the rules of the mappings that copy from a repository, each once."""
    rules: list[TagRule] = []
    for mapping in config.mappings:
        if mapping.source.repository_key(mapping.source_repository) == source_key:
            console.log("info", "rule", f"the rule is that of mappings[{mapping.index}]")
            if mapping.tags not in rules:
                rules.append(mapping.tags)
    return rules


def run_validate(arguments: Namespace, console: Console) -> int:
    read_config(arguments.file, console, lint=True)
    return 0


def run_expand(arguments: Namespace, console: Console) -> int:
    from _regsync.config.expansion import expand

    write_text(expand(read_file(arguments.file), show_secrets=arguments.show_secrets))
    return 0


def run_report(arguments: Namespace, console: Console) -> int:
    from _regsync.app.report_file import LARGEST_REPORT, read_report

    data = read_bytes(arguments.file, LARGEST_REPORT)
    name = "standard input" if arguments.file == "-" else printable(arguments.file)
    run = read_report(data, name)
    if arguments.to == "html":
        from _regsync.app.report_page import as_page

        write_text(as_page(run))
    else:
        from _regsync.app.report_forms import as_junit, as_markdown, as_text

        forms = {"text": as_text, "markdown": as_markdown, "junit": as_junit}
        write_text(forms[arguments.to](run))
    return 0


def run_schema(arguments: Namespace, console: Console) -> int:
    from _regsync.config import fields
    from _regsync.sync import report

    document = report.schema() if arguments.report else fields.schema()
    write_text(json.dumps(document, indent=2) + "\n")
    return 0


def write_text(text: str) -> None:
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:  # YAML is UTF-8, whatever the terminal's encoding is
        sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()


def run_version(arguments: Namespace, console: Console) -> int:
    from _regsync.app import version

    if arguments.sbom:
        return version.inventory()
    return version.show(arguments.closed, as_json=arguments.json)
