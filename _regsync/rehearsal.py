"""A run that changes nothing: what would be moved, and what it would cost.
Owns: the part of `transfer.Mover` in a dry run, and the numbers of `analyze`. May not know: which image is next.
Invariant: GET and HEAD only; its requests and bytes are those of a run that gets the same answers, since the same
discovery, claims and execution lead to it. Follows design.md sections 6 and 10 ("Dry run")."""
from __future__ import annotations
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from _regsync import oci, pacing, plan, providers, registry, state, transfer
from _regsync.report import size_text
from _regsync.transport import Transport
class Rehearsal:
    """Stands where the mover stands."""
    def __init__(self, transport: Transport, knowledge: state.Knowledge) -> None:
        self._transport, self._knowledge = transport, knowledge
        # By host and action, beside what is asked here; HEADs that the upload starts of a run spare count below zero.
        self._expected = defaultdict[str, Counter[str]](Counter)
        self._read, self._moved = set[tuple[str, str]](), Counter[str]()
        # Of all images that were looked at: blobs' sizes, in how many images, and where they go.
        self._sizes, self._images = dict[str, int](), dict[str, tuple[str, int]]()
        self._uses, self._places, self._plain = Counter[str](), defaultdict[str, set[state.RepositoryKey]](set), 0
    def look_at(self, name: str, tree: plan.Tree, where: state.RepositoryKey) -> None:
        """Take in one image, or artifact (no name), on its way to one repository, also one that is there already."""
        blobs = {blob.digest: blob.size for each in (tree.root, *tree.children) for blob in each.blobs}
        self._sizes.update(blobs)
        if tree.root.digest not in self._images: self._uses.update(blobs.keys())
        self._images.setdefault(tree.root.digest, (name, sum(blobs.values())))
        self._plain += sum(blobs.values())
        for digest in blobs: self._places[digest].add(where)
    async def bring(self, step: plan.Step, source: registry.Repository, target: registry.Repository, *, fan_out: bool,
            disk: bool = True) -> transfer.Brought:
        """Say how a blob would come to its place; a repository that may hold it is asked."""
        blob, host = step.blob, target.host.key
        if step.mount_from is not None:
            self._knowledge.accept_mount(host)
            self._expected[host]["upload_start"] += 1
            return "mounted"
        if not self._knowledge.is_empty(target.key):
            async with self._transport.gate.admitted((pacing.Want(host),), float(step.work.order)):
                present = await target.has_blob(blob)
            probes = self._knowledge.may_probe(target.key, providers.ROWS[target.host.registry.kind].probe is not None)
            self._expected[host]["blob_head"] -= probes
            if present:
                self._expected[host]["upload_start"] += probes
                return "there"
        read = (source.host.key, blob.digest)
        if transfer.known_body(blob) is None and not (fan_out and read in self._read):
            self._expected[source.host.key]["blob_get"] += 1
        self._read.add(read)
        self._expected[host].update({"upload_start": 1, "upload_body": 1})
        self._moved[host] += blob.size
        return "uploaded"
    async def put(self, tree: plan.Tree, work: plan.Work, target: registry.Repository, reference: str,
            arrived: Callable[[oci.Manifest], None]) -> None:
        """Count the manifests that would be put."""
        own = [child for child in tree.children if child.digest in work.own_children]
        self._expected[target.host.key]["manifest_put"] += len(own) + 1
        for child in own: arrived(child)
    async def absent(self, tree: plan.Tree, target: registry.Repository) -> frozenset[str]:
        """Nothing is put, so nothing is refused."""
        return frozenset()
    def expected(self) -> dict[str, dict[str, int]]:
        """Return the requests of a run like this one, by host and action."""
        counted = {host: Counter(actions) for host, actions in self._transport.requests.items()}
        for host, actions in self._expected.items(): counted.setdefault(host, Counter()).update(actions)
        return {host: dict(sorted((+actions).items())) for host, actions in sorted(counted.items())}
    def analysis(self) -> dict[str, Any]:
        """Return what `analyze --json` shows; sizes in bytes."""
        shared = [digest for digest, uses in self._uses.items() if uses > 1]
        targets: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for digest, places in self._places.items():
            for host, repositories in Counter(host for host, _ in places).items():
                targets[host].update(bytes=self._sizes[digest], mounts_possible=repositories - 1)
        named = [each for each in self._images.values() if each[0]]
        layers, images = (sorted(found, key=lambda each: (-each[1], each[0]))[:10] for found
            in (self._sizes.items(), named))
        return {"schema": 1, "images": len(named),
            "blobs": {"unique": len(self._sizes), "unique_bytes": sum(self._sizes.values()), "shared": len(shared),
            "shared_bytes": sum(self._sizes[digest] for digest in shared)},
            "bytes": {"image_by_image": self._plain, "each_blob_once": sum(each["bytes"] for each in targets.values())},
            "targets": {host: {**each, "to_move": self._moved[host]} for host, each in sorted(targets.items())},
            "requests": self.expected(), "largest_images": [{"image": name, "bytes": size} for name, size in images],
            "largest_layers": [{"digest": digest, "bytes": size, "images": self._uses[digest]} for digest, size
            in layers]}
def lines(found: Mapping[str, Any]) -> list[str]:
    """Return an analysis as text."""
    blobs, (plain, once) = found["blobs"], found["bytes"].values()
    every, shared = size_text(blobs["unique_bytes"]), size_text(blobs["shared_bytes"])
    told = [f"Images: {found['images']}",
        f"Blobs: {blobs['unique']} unique ({every}), {blobs['shared']} of them shared ({shared})",
        f"Data: {size_text(plain)} image by image, {size_text(once)} with each blob once, "
        f"{size_text(plain - once)} saved"]
    for host, target in found["targets"].items():
        moved = f"{size_text(target['to_move'])} to move of {size_text(target['bytes'])}"
        told.append(f"Target {host}: {moved}, {target['mounts_possible']} mounts possible")
    for host, actions in found["requests"].items():
        counts = ", ".join(f"{count} {action}" for action, count in actions.items())
        told.append(f"Requests {host}: {sum(actions.values())} ({counts})")
    told += [f"Image {size_text(each['bytes']):>10} {each['image']}" for each in found["largest_images"]]
    return told + [f"Layer {size_text(each['bytes']):>10} {each['digest']} in {each['images']} images" for each
        in found["largest_layers"]]
