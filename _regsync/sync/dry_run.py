"""."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from _regsync.oci.manifest import Manifest
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.state.knowledge import Knowledge, RepositoryKey
from _regsync.sync.claims import Step, Work
from _regsync.sync.image import Tree
from _regsync.sync.staging import Staging
from _regsync.sync.transfer import Keep, Mover, _Brought, known_body


class Rehearsal(Mover):
    """Stands where the mover stands in a dry run, by GET and HEAD alone, and counts what `analyze`
    shows. Its requests and bytes are those of a run that gets the same answers (docs/design.md
    sections 6 and 10, "Dry run")."""

    def __init__(self, transport: Transport, knowledge: Knowledge, staging: Staging) -> None:
        super().__init__(transport, knowledge, staging)
        # By host and action, beside what is asked here; HEADs that the upload starts of a run spare
        # count below zero.
        self._expected = defaultdict[str, Counter[str]](Counter)
        self._read = set[tuple[str, str]]()
        self._to_move = Counter[str]()
        # Of all images that were looked at: blobs' sizes, in how many images, and where they go.
        self._sizes = dict[str, int]()
        self._images = dict[str, tuple[str, int]]()
        self._uses = Counter[str]()
        self._places = defaultdict[str, set[RepositoryKey]](set)
        self._plain = 0

    def look_at(self, name: str, tree: Tree, where: RepositoryKey) -> None:
        """Take in one image, or artifact (no name), on its way to one repository, also one that is
        there already.
        """
        blobs = {
            blob.digest: blob.size for each in (tree.root, *tree.children) for blob in each.blobs
        }
        self._sizes.update(blobs)
        if tree.root.digest not in self._images:
            self._uses.update(blobs.keys())
        self._images.setdefault(tree.root.digest, (name, sum(blobs.values())))
        self._plain += sum(blobs.values())
        for digest in blobs:
            self._places[digest].add(where)

    async def bring(
        self, step: Step, source: Repository, target: Repository, keep: Keep
    ) -> _Brought:
        """Say how a blob would come to its place; a repository that may hold it is asked."""
        blob = step.blob
        host = target.host.key
        if step.mount_from is not None:
            self._knowledge.accept_mount(host)
            self._expected[host]["upload_start"] += 1
            return "mounted"
        if not self._knowledge.is_empty(target.key):
            present = await target.has_blob(blob)
            probes = self._knowledge.may_probe(target.key, target.row.probe is not None)
            self._expected[host]["blob_head"] -= probes
            if present:
                self._expected[host]["upload_start"] += probes
                return "there"
        read = (source.host.key, blob.digest)
        if known_body(blob) is None and not (keep and read in self._read):
            self._expected[source.host.key]["blob_get"] += 1
        self._read.add(read)
        self._expected[host].update({"upload_start": 1, "upload_body": 1})
        self._to_move[host] += blob.size
        return "uploaded"

    async def put(
        self,
        tree: Tree,
        work: Work,
        target: Repository,
        reference: str,
        arrived: Callable[[Manifest], None],
    ) -> None:
        own = [child for child in tree.children if child.digest in work.own_children]
        self._expected[target.host.key]["manifest_put"] += len(own) + 1
        for child in own:
            arrived(child)

    def analysis(self) -> dict[str, Any]:
        """Return what `analyze --json` shows; sizes in bytes, requests of a run like this one by
        host and action.
        """
        counted = {host: Counter(actions) for host, actions in self._transport.requests.items()}
        for host, actions in self._expected.items():
            counted.setdefault(host, Counter()).update(actions)
        requests = {
            host: dict(sorted((+actions).items())) for host, actions in sorted(counted.items())
        }
        shared = [digest for digest, uses in self._uses.items() if uses > 1]
        targets: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for digest, places in self._places.items():
            for host, repositories in Counter(host for host, _ in places).items():
                targets[host].update(bytes=self._sizes[digest], mounts_possible=repositories - 1)
        named = [each for each in self._images.values() if each[0]]
        layers, images = (
            sorted(found, key=lambda each: (-each[1], each[0]))[:10]
            for found in (self._sizes.items(), named)
        )
        return {
            "schema": 1,
            "images": len(named),
            "blobs": {
                "unique": len(self._sizes),
                "unique_bytes": sum(self._sizes.values()),
                "shared": len(shared),
                "shared_bytes": sum(self._sizes[digest] for digest in shared),
            },
            "bytes": {
                "image_by_image": self._plain,
                "each_blob_once": sum(each["bytes"] for each in targets.values()),
            },
            "targets": {
                host: {**each, "to_move": self._to_move[host]}
                for host, each in sorted(targets.items())
            },
            "requests": requests,
            "largest_images": [{"image": name, "bytes": size} for name, size in images],
            "largest_layers": [
                {"digest": digest, "bytes": size, "images": self._uses[digest]}
                for digest, size in layers
            ],
        }
