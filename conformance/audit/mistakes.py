"""Find the mistakes of a client in the journals of all servers that it has used.

Owns: the table of mistakes and their order.
May not know: how a client works, which task it had.
Invariants: a finding has the name of its mistake and its exchanges. In a run in which something
failed (`Run.is_disturbed`) no request is unnecessary, but for bytes of a blob that move again
without a failure, and manifests that are read again because a target failed.

The rules are in `protocol` (requests that strict registries refuse), `safety` (secrets and content)
and `discipline` (requests that were not needed).

    findings = audit({server.url: server.app for server in (source, target)})
    assert not findings, report(findings)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..server.exchange import Site
from . import discipline, protocol, safety
from .evidence import Act, Run
from .rules import RULES, Class, Finding

__all__ = ["KINDS", "MISTAKES", "Act", "Class", "Finding", "audit", "latest", "report"]

# Each module adds its rules to RULES when it is imported.
_MODULES = (protocol, safety, discipline)

KINDS: tuple[Class, ...] = ("protocol", "safety", "discipline")
# What is wrong, by name of the mistake.
MISTAKES: Mapping[str, str] = {name: rule.text for name, rule in RULES.items()}


def latest(sites: Mapping[str, Site]) -> int:
    """Return the newest place in the order of all journals, for `since` of a later audit."""
    return max(
        (
            max(entry.begun, entry.ended or 0)
            for site in sites.values()
            for entry in site.journal.entries
        ),
        default=0,
    )


def audit(
    sites: Mapping[str, Site],
    *,
    kinds: Collection[Class] = KINDS,
    since: int = 0,
    excused: Collection[str] = (),
    readonly: Collection[str] = (),
    remembered: bool = False,
    away: Collection[str] = (),
    has_failed: bool = False,
) -> list[Finding]:
    """Return the mistakes of one run.

    `kinds` selects the rules. `excused` holds names of mistakes that a test provokes. `since`
    excludes earlier runs (see `latest`). `Run` describes the other arguments. A violation in a
    registry's journal that no rule explains is the mistake `refused_as_wrong`.
    """
    run = Run(
        sites, since, readonly=readonly, remembered=remembered, away=away, has_failed=has_failed
    )
    findings = [
        Finding(rule.name, rule.kind, rule.text, acts)
        for rule in RULES.values()
        if rule.kind in kinds and (rule.is_always or not run.is_disturbed)
        for acts in rule.check(run)
    ]
    if "protocol" in kinds:
        findings += _unexplained_violations(run, findings)
    return [finding for finding in findings if finding.name not in excused]


def _unexplained_violations(run: Run, findings: Iterable[Finding]) -> list[Finding]:
    """Return a finding for each violation in a journal whose request is in no finding."""
    found_entries = {
        id(act.entry) for finding in findings if finding.kind == "protocol" for act in finding.acts
    }
    unexplained = []
    for place, site in run.sites.items():
        acts = [act for act in run.acts if act.place == place]
        for text in tuple(site.journal.violations):
            about = [act for act in acts if text.startswith(f"{act.method} {act.target}: ")]
            about = about or [act for act in acts if act.kind == "token" and "token" in text]
            explained = [act for act in about if id(act.entry) in found_entries]
            if not explained:
                unexplained.append(
                    Finding("refused_as_wrong", "protocol", f"{place}: {text}", tuple(about))
                )

    return unexplained


def report(findings: Iterable[Finding]) -> str:
    """Format findings for the message of a failed test."""
    return "the client made mistakes:\n" + "\n".join(map(str, findings))
