"""Forecast what a run would do: it takes the place of the blob transfer in a dry run.

Owns: what a run would find and move, by GET and HEAD alone; what `analyze` shows.
May not know: how an analysis is printed.
Invariants: nothing is written anywhere; the forecast has the requests and bytes of a run that gets
    the same answers.
Follows: docs/design.md sections 6 and 10 ("Dry run").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from _regsync.oci.manifest import Descriptor, Manifest
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.state.archive import RepositoryKey
from _regsync.state.knowledge import Knowledge
from _regsync.sync.claims import Step
from _regsync.sync.discovery import TagLookup
from _regsync.sync.image import BlobResult, Image, ImageCopy, Tree
from _regsync.sync.transfer import StageIn, known_body

# Images and layers of which an analysis names the largest.
_MOST_NAMED = 10


@dataclass
class _Forecast:
    """What a run sends to one host and a dry run does not."""

    # Requests.
    blob_gets: int = 0
    upload_starts: int = 0
    upload_bodies: int = 0
    manifest_puts: int = 0
    # HEADs that only a dry run sends: in a run the start of the upload tells the same (rule 11).
    saved_heads: int = 0
    # Bytes.
    bytes_to_move: int = 0
    manifest_bytes: int = 0

    def requests(self, sent: Mapping[str, int]) -> dict[str, int]:
        """Return the requests of a run by action; `sent` are those of this dry run."""
        total = Counter(sent)
        total["blob_head"] -= self.saved_heads
        total["blob_get"] += self.blob_gets
        total["upload_start"] += self.upload_starts
        total["upload_body"] += self.upload_bodies
        total["manifest_put"] += self.manifest_puts
        return {action: number for action, number in sorted(total.items()) if number > 0}


class _SourceBlob(NamedTuple):
    """A blob at the source's host from which it is read."""

    host: str
    digest: str


class _Sized(NamedTuple):
    """An image by its name, or a layer by its digest."""

    name: str
    size: int  # bytes


class DryRun:
    """Takes the place of `BlobTransfer`: it asks and counts, and writes nothing."""

    def __init__(self, transport: Transport, knowledge: Knowledge) -> None:
        self._transport = transport
        self._knowledge = knowledge
        # By host.
        self._forecasts = defaultdict[str, _Forecast](_Forecast)
        # The blobs that a run would have read from their source by now.
        self._blobs_read = set[_SourceBlob]()

        # The rest is what an analysis shows: of all images, whether targets hold them or not.
        # By the root's digest, each image or artifact and the bytes of its blobs.
        self._images = dict[str, _Sized]()
        # Of each blob, by digest: its size in bytes, how many images name it, and which target
        # repositories need it.
        self._sizes = dict[str, int]()
        self._uses = Counter[str]()
        self._places = defaultdict[str, set[RepositoryKey]](set)
        # The bytes of all copies, for each target, if none shared a blob with another.
        self._bytes_image_by_image = 0

    def count_copy(self, copy: ImageCopy, lookups: Sequence[TagLookup]) -> None:
        """Count the blobs of an image and its artifacts, even if the target holds them already;
        `lookups` begins with the image's own.
        """
        image, *artifacts = lookups
        if image.tree is not None:
            self._count_tree(copy.source_name, image.tree, copy.target.pool)
        for artifact in artifacts:
            if artifact.tree is not None:
                self._count_tree("", artifact.tree, copy.target.pool)

    def _count_tree(self, name: str, tree: Tree, where: RepositoryKey) -> None:
        """Count the blobs of an image for one target; artifacts have no name, so that an analysis does
        not list them as images.
        """
        manifests = (tree.root, *tree.children)
        sizes = {blob.digest: blob.size for manifest in manifests for blob in manifest.blobs}
        size = sum(sizes.values())
        if tree.root.digest not in self._images:
            self._images[tree.root.digest] = _Sized(name, size)
            self._uses.update(sizes.keys())

        self._sizes.update(sizes)
        self._bytes_image_by_image += size
        for digest in sizes:
            self._places[digest].add(where)

    async def copy_blob(
        self, step: Step, source: Repository, target: Repository, stage_in: StageIn
    ) -> BlobResult:
        """Say how a run would copy a blob, and count what it would send. A repository that may hold
        the blob is asked by HEAD.
        """
        blob = step.blob
        host = target.host.key
        forecast = self._forecasts[host]
        if step.mount_from is not None:
            # A mount is a POST that starts no upload. The forecast is that the host accepts it.
            self._knowledge.record_mount(host)
            forecast.upload_starts += 1
            return BlobResult.MOUNTED

        if not self._knowledge.is_empty(target.pool):
            is_present = await target.has_blob(blob, with_retries=True)
            # A run may ask by the start of the upload instead of a HEAD (rule 11).
            may_ask_by_post = target.probe_from is not None
            if may_ask_by_post and not self._knowledge.needs_head(target.pool, blob.digest):
                forecast.saved_heads += 1
                if is_present:
                    forecast.upload_starts += 1
            if is_present:
                return BlobResult.PRESENT

        self._forecast_read(_SourceBlob(source.host.key, blob.digest), step, stage_in)
        forecast.upload_starts += 1
        forecast.upload_bodies += 1
        forecast.bytes_to_move += blob.size
        return BlobResult.UPLOADED

    def _forecast_read(self, read: _SourceBlob, step: Step, stage_in: StageIn) -> None:
        """Count the GET of a blob, unless its body is known or was kept when it was read before."""
        is_kept = stage_in is not None and read in self._blobs_read
        if known_body(step.blob) is None and not is_kept:
            self._forecasts[read.host].blob_gets += 1
        self._blobs_read.add(read)

    def reserving(self, image: Image, blobs: Iterable[Descriptor]) -> AbstractContextManager[None]:
        """Keep no room: what all images would need is compared in the end."""
        return nullcontext()

    async def put_manifests(
        self, image: Image, own_children: frozenset[str], on_put: Callable[[Manifest], None]
    ) -> None:
        """Count the manifests that a run would put; `on_put` is called with each child."""
        children = [child for child in image.tree.children if child.digest in own_children]
        forecast = self._forecasts[image.target.host.key]
        forecast.manifest_puts += len(children) + 1
        forecast.manifest_bytes += sum(manifest.size for manifest in (*children, image.tree.root))
        for child in children:
            on_put(child)

    def bytes_to_write(self, host: str) -> int:
        """Return the bytes of all blobs and manifests that a run would bring to a host."""
        forecast = self._forecasts[host]
        return forecast.bytes_to_move + forecast.manifest_bytes

    def analysis(self) -> dict[str, Any]:
        """Return what `analyze --json` shows (docs/design.md section 10), sizes in bytes."""
        shared = [digest for digest, uses in self._uses.items() if uses > 1]
        images = [image for image in self._images.values() if image.name]
        layers = [_Sized(digest, size) for digest, size in self._sizes.items()]
        targets = self._targets()
        return {
            "schema": 1,
            "images": len(images),
            "blobs": {
                "unique": len(self._sizes),
                "unique_bytes": sum(self._sizes.values()),
                "shared": len(shared),
                "shared_bytes": sum(self._sizes[digest] for digest in shared),
            },
            "bytes": {
                "image_by_image": self._bytes_image_by_image,
                "each_blob_once": sum(target["bytes"] for target in targets.values()),
            },
            "targets": targets,
            "requests": self._requests(),
            "largest_images": [
                {"image": image.name, "bytes": image.size} for image in _largest(images)
            ],
            "largest_layers": [
                {"digest": layer.name, "bytes": layer.size, "images": self._uses[layer.name]}
                for layer in _largest(layers)
            ],
        }

    def _targets(self) -> dict[str, dict[str, int]]:
        """Return for each target's host the bytes that it needs, each blob once, how many blobs can
        be mounted, and the bytes that a run would move.
        """
        sizes = Counter[str]()
        mounts = Counter[str]()
        for digest, places in self._places.items():
            repositories = Counter(host for host, _ in places)
            for host, count in repositories.items():
                sizes[host] += self._sizes[digest]
                mounts[host] += count - 1  # the first repository gets an upload
        return {
            host: {
                "bytes": sizes[host],
                "mounts_possible": mounts[host],
                "to_move": self._forecasts.get(host, _Forecast()).bytes_to_move,
            }
            for host in sorted(sizes)
        }

    def _requests(self) -> dict[str, dict[str, int]]:
        """Return the requests of a run by host and action."""
        asked = self._transport.requests
        hosts = sorted({*asked, *self._forecasts})
        return {host: self._forecasts[host].requests(asked.get(host, {})) for host in hosts}


def _largest(things: list[_Sized]) -> list[_Sized]:
    """Return the largest, in the same order for the same things."""
    return sorted(things, key=lambda thing: (-thing.size, thing.name))[:_MOST_NAMED]
