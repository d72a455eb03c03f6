"""`auth check`: what a configuration's registries let us do, before any transfer.
Owns: which question is put to a repository, and how the answer is told. May not know: how a login is made. Invariant:
no manifest is read or written, no repository created: an upload is begun, and ended at once, only where one is."""
from __future__ import annotations
import math, time
from typing import Any
from _regsync import discover, session
from _regsync.config import Config, Registry
from _regsync.errors import RegistryError, Side, SyncError
from _regsync.oci import Descriptor
from _regsync.output import Console
from _regsync.pacing import Want
from _regsync.registry import Repository, Upload
from _regsync.report import Outcome
from _regsync.state import Knowledge
from _regsync.transport import Transport
async def check(found: Config, console: Console) -> int:
    """Ask for every repository in use, tell what works and what is missing; return the exit status."""
    connected, needs, rows = session.connect(console), dict[tuple[Registry, str], Side](), list[dict[str, Any]]()
    for mapping in found.mappings:
        needs.setdefault((mapping.source, mapping.source_repository), Side.SOURCE)
        needs |= {(target, mapping.target_repository): Side.TARGET for target in mapping.targets}
    try:
        for registry, _ in needs: connected.prepare(registry)
        discovery = discover.Discovery(connected, Knowledge())
        left = iter([discovery.repository(*where, side) for where, side in needs.items()])
        async def work() -> None:
            for repository in left: rows.append(await _row(connected, repository, console))
        await discover.together([work] * 16)
    finally: connected.close()
    if console.as_json: console.document({"schema": 1, "access": sorted(rows, key=lambda row: str(row["repository"]))})
    return 4 if any(row["error"] for row in rows) else 0
async def _row(connected: Transport, repository: Repository, console: Console) -> dict[str, Any]:
    login, method, upload, error = repository.host.authenticator, repository.host.registry.auth_type, None, None
    try:
        with repository.located("check", str(repository)): upload = await _ask(connected, repository)
    except SyncError as caught:
        error = caught
        console.log("error", "check_failed", f"{error.code}: {error}", code=error.code, hint=error.hint)
    expires = login.chain.expires if login.chain else math.inf
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires)) if 0 <= expires < 1e11 else None
    source = None if login.anonymous or not login.proven else login.credential.origin  # who is not asked shows none
    later = "not there yet, so no push was tried" if upload == "absent" else ""
    told = ", ".join(filter(None, (source or "anonymous", until and f"until {until}", later)))
    if not (error or console.as_json): console.line(f"ok  {repository}  {repository.rights}  ({told})")
    return {"registry": repository.host.registry.alias, "repository": str(repository), "rights": repository.rights,
        "method": method or "detected", "source": source, "expires": until, "upload": upload,
        "error": Outcome("", "", "", error=error).as_json()["error"]}
async def _ask(connected: Transport, repository: Repository) -> str | None:
    host, writes = repository.host, repository.side is Side.TARGET
    call = repository.call("tag_list", "GET", "tags/list?n=1")
    try: await connected.request(host, call, ok=(200,), limit=8 * 1024 * 1024)
    except RegistryError as error:
        # What hides a repository may let us push to it all the same; what ECR has not got it does not create.
        if not writes or error.status not in (401, 403, 404): raise
        if error.status == 404 and host.registry.kind.startswith("ecr"): raise
        if error.status == 404: return "absent"
    if not writes: return None
    async with connected.gate.admitted((Want(host.key),)), connected.pool.lease(host.origin) as lease:
        upload = Upload(repository, connected, lease, Descriptor("", "", 0))
        await upload.start()
        await upload.cancel_upload()
    return "opened"
