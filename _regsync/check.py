"""`auth check`: what a configuration's registries let us do, before any transfer.

Owns: which question is put to a repository, and how the answer is told. May not know: how a login is made. Invariant:
no manifest is read or written, no repository created: an upload is begun, and ended at once, only in one that is there.
"""
from __future__ import annotations
import math
import time
from typing import Any
from _regsync import discover, session
from _regsync.config import Config, Registry
from _regsync.errors import RegistryError, Side, SyncError
from _regsync.oci import Descriptor
from _regsync.output import Console
from _regsync.pacing import Want
from _regsync.providers import ROWS
from _regsync.registry import Repository, Upload
from _regsync.report import Outcome
from _regsync.state import Knowledge
from _regsync.transport import Transport
__all__ = ["check"]

_WORKERS, _LISTING = 16, 8 * 1024 * 1024  # not all servers know `n`

async def check(found: Config, console: Console) -> int:
    """Ask for every repository in use, tell what works and what is missing; return the exit status."""
    connected = session.connect(console)
    discovery, needs = discover.Discovery(connected, Knowledge()), dict[tuple[Registry, str], Side]()
    for mapping in found.mappings:
        needs.setdefault((mapping.source, mapping.source_repository), Side.SOURCE)
        needs |= {(target, mapping.target_repository): Side.TARGET for target in mapping.targets}
    rows = list[dict[str, Any]]()
    try:
        for registry in {registry.alias: registry for registry, _ in needs}.values(): connected.prepare(registry)
        ends = [discovery.repository(*where, side) for where, side in needs.items()]
        left = iter(ends)
        async def work() -> None:
            for repository in left: rows.append(await _row(connected, repository, console))
        await discover.together([work] * _WORKERS)
    finally: connected.close()
    if console.as_json: console.document({"schema": 1, "access": sorted(rows, key=lambda row: str(row["repository"]))})
    return 4 if any(row["error"] for row in rows) else 0

async def _row(connected: Transport, repository: Repository, console: Console) -> dict[str, Any]:
    upload, error = None, None
    try:
        with repository.located("check", str(repository)): upload = await _ask(connected, repository)
    except SyncError as caught: error = caught
    registry, login, rights = repository.host.registry, repository.host.authenticator, repository.rights
    kept = "docker_config" if login.chain is None and login.origin != "GITHUB_TOKEN" else ROWS[registry.kind].auth
    expires = login.chain.expires if login.chain else math.inf
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires)) if expires < math.inf else None
    if error is not None:
        console.log("error", "check_failed", f"{error.code}: {error}", code=error.code, hint=error.hint)
    elif not console.as_json:
        told = (login.origin or "anonymous", f"until {until}" if until else "",
            "which it does not ask for" if login.origin and not login.proven else "",
            "not there yet: the first push creates it" if upload == "absent" else "")
        console.line(f"ok  {repository}  {rights}  ({', '.join(filter(None, told))})")
    cause = Outcome("", "", "", error=error).as_json()["error"]
    return {"registry": registry.alias, "repository": str(repository), "rights": rights,
        "method": registry.auth_type or (kept if login.origin else "anonymous"), "source": login.origin,
        "login_used": login.proven, "expires": until, "upload": upload, "error": cause}

async def _ask(connected: Transport, repository: Repository) -> str | None:
    host, call = repository.host, repository.call("tag_list", "GET", "tags/list?n=1")
    try: await connected.request(host, call, ok=(200,), limit=_LISTING)
    except RegistryError as error:
        # What hides a repository may let us push to it all the same; what ECR has not got it does not create.
        absent = error.status == 404 and not host.registry.kind.startswith("ecr")
        if repository.side is Side.SOURCE or not (absent or error.status in (401, 403)): raise
        if absent: return "absent"
    if repository.side is Side.SOURCE: return None
    async with connected.gate.admitted((Want(host.key),)), connected.pool.lease(host.origin) as lease:
        upload = Upload(repository, connected, lease, Descriptor("", "", 0))
        await upload.start()
        await upload.cancel_upload()
    return "opened"
