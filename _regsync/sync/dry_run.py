"""Forecast the requests and bytes of a run, in place of the blob transfer.

Owns: the forecast of what a run would copy, made with GET and HEAD requests alone; the figures of
    `analyze`.
May not know: how an analysis is printed.
Invariants: nothing is written anywhere; the forecast has the same requests and bytes as a run that
    gets the same answers.
Follows: docs/design.md sections 6 and 10 ("Dry run").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from _regsync.oci.manifest import Manifest
from _regsync.registry.repository import Repository
from _regsync.registry.transport import Transport
from _regsync.state.archive import RepositoryKey
from _regsync.state.knowledge import Knowledge
from _regsync.sync.claims import Step
from _regsync.sync.discovery import TagLookup
from _regsync.sync.image import BlobResult, Image, ImageCopy, Tree
from _regsync.sync.transfer import BytesFrom, known_body

# How many of the largest images and of the largest layers an analysis names.
_MOST_NAMED = 10


@dataclass
class _Forecast:
    """How the requests of a run to one host differ from those of a dry run."""

    # Numbers of requests that only a run sends.
    blob_gets: int = 0
    upload_starts: int = 0
    upload_bodies: int = 0
    manifest_puts: int = 0
    # The number of HEADs that only a dry run sends. A run sends a probing POST instead (rule 11).
    saved_heads: int = 0
    # Bytes of blobs and of manifests that only a run sends.
    bytes_to_move: int = 0
    manifest_bytes: int = 0

    def requests_of_run(self, sent: Mapping[str, int]) -> dict[str, int]:
        """Return the forecast number of requests of a run by action, without zeros.

        `sent` has the number of requests that this dry run has sent, by action.
        """
        total = Counter(sent)
        total["blob_head"] -= self.saved_heads
        total["blob_get"] += self.blob_gets
        total["upload_start"] += self.upload_starts
        total["upload_body"] += self.upload_bodies
        total["manifest_put"] += self.manifest_puts
        return {action: number for action, number in sorted(total.items()) if number > 0}


class _SourceBlob(NamedTuple):
    """A blob at the host from which it is read."""

    host: str
    digest: str


class _Sized(NamedTuple):
    """The size of an image or of a layer."""

    # The reference of an image, or the digest of a layer. Empty for an artifact.
    name: str
    # Bytes.
    size: int


class DryRun:
    """A replacement for `BlobTransfer` that writes nothing and counts what a run would send."""

    def __init__(self, transport: Transport, knowledge: Knowledge) -> None:
        self._transport = transport
        self._knowledge = knowledge
        # By host.
        self._forecasts = defaultdict[str, _Forecast](_Forecast)
        # The blobs that a run would have read from their source by now.
        self._blobs_read = set[_SourceBlob]()

        # The fields below are for an analysis. They include images that the targets have already.
        # By the digest of the root, each image or artifact with the bytes of its blobs.
        self._images = dict[str, _Sized]()
        # By the digest of a blob: its size in bytes, how many images name it, and the target
        # repositories that need it.
        self._blob_sizes = dict[str, int]()
        self._image_counts = Counter[str]()
        self._target_keys = defaultdict[str, set[RepositoryKey]](set)
        # The bytes of all copies to all targets, if no image shared a blob with another image.
        self._bytes_image_by_image = 0

    def count_copy(self, copy: ImageCopy, lookups: Sequence[TagLookup]) -> None:
        """Count the blobs of an image and its artifacts, even if the target has them already.

        `lookups` are the look-up of the image, followed by the look-ups of its artifacts. An image
        or artifact whose manifests have not been fetched is not counted.
        """
        image_lookup, *artifact_lookups = lookups
        if image_lookup.tree is not None:
            self._count_tree(copy.source_name, image_lookup.tree, copy.target.store_key)
        for artifact_lookup in artifact_lookups:
            if artifact_lookup.tree is not None:
                # Without a name, so that an analysis does not list the artifact as an image.
                self._count_tree("", artifact_lookup.tree, copy.target.store_key)

    def _count_tree(self, name: str, tree: Tree, target_key: RepositoryKey) -> None:
        """Count the blobs of an image or artifact for one target.

        `name` is the image's reference at the source. It is empty for an artifact.
        """
        manifests = (tree.root, *tree.children)
        sizes = {blob.digest: blob.size for manifest in manifests for blob in manifest.blobs}
        size = sum(sizes.values())
        if tree.root.digest not in self._images:
            self._images[tree.root.digest] = _Sized(name, size)
            self._image_counts.update(sizes.keys())

        self._blob_sizes.update(sizes)
        self._bytes_image_by_image += size
        for digest in sizes:
            self._target_keys[digest].add(target_key)

    async def copy_blob(
        self, step: Step, source: Repository, target: Repository, bytes_from: BytesFrom
    ) -> BlobResult:
        """Return how a run would copy a blob, and count the requests and bytes of the run.

        Sends a HEAD for the blob, unless the run would mount it or the target repository is empty.
        """
        blob = step.blob
        host = target.host.key
        forecast = self._forecasts[host]
        if step.mount_from is not None:
            # A mount is one POST, and no upload follows. The forecast assumes that the host accepts
            # the mount.
            self._knowledge.record_mount(host)
            forecast.upload_starts += 1
            return BlobResult.MOUNTED

        if not self._knowledge.is_empty(target.store_key):
            is_present = await target.has_blob(blob, with_retries=True)
            # A run may send a probing POST instead of a HEAD (rule 11).
            may_ask_by_post = target.probe_from is not None
            if may_ask_by_post and not self._knowledge.needs_head(target.store_key, blob.digest):
                forecast.saved_heads += 1
                # If the blob is absent, the upload below counts the POST.
                if is_present:
                    forecast.upload_starts += 1
            if is_present:
                return BlobResult.PRESENT

        self._forecast_read(_SourceBlob(source.host.key, blob.digest), step, bytes_from)
        forecast.upload_starts += 1
        forecast.upload_bodies += 1
        forecast.bytes_to_move += blob.size
        return BlobResult.UPLOADED

    def _forecast_read(self, read: _SourceBlob, step: Step, bytes_from: BytesFrom) -> None:
        """Count the GET of a blob, unless its body is known or would be staged already.

        A blob that the run has read before is staged, unless each upload reads the source.
        """
        is_staged = bytes_from is not BytesFrom.SOURCE and read in self._blobs_read
        if known_body(step.blob) is None and not is_staged:
            self._forecasts[read.host].blob_gets += 1
        self._blobs_read.add(read)

    async def put_manifests(
        self, image: Image, own_manifests: frozenset[str], on_put: Callable[[Manifest], None]
    ) -> None:
        """Count the manifests that a run would put, and call `on_put` with each child."""
        children = [child for child in image.tree.children if child.digest in own_manifests]
        forecast = self._forecasts[image.target.host.key]
        forecast.manifest_puts += len(children) + 1
        forecast.manifest_bytes += sum(manifest.size for manifest in (*children, image.tree.root))
        for child in children:
            on_put(child)

    def bytes_to_write(self, host: str) -> int:
        """Return the bytes of all blobs and manifests that a run would send to a host."""
        forecast = self._forecasts[host]
        return forecast.bytes_to_move + forecast.manifest_bytes

    def analysis(self) -> dict[str, Any]:
        """Return the document of `analyze --json` (docs/design.md section 10).

        Sizes are in bytes.
        """
        shared = [digest for digest, count in self._image_counts.items() if count > 1]
        images = [image for image in self._images.values() if image.name]
        layers = [_Sized(digest, size) for digest, size in self._blob_sizes.items()]
        targets = self._targets()
        return {
            "schema": 1,
            "images": len(images),
            "blobs": {
                "unique": len(self._blob_sizes),
                "unique_bytes": sum(self._blob_sizes.values()),
                "shared": len(shared),
                "shared_bytes": sum(self._blob_sizes[digest] for digest in shared),
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
                {
                    "digest": layer.name,
                    "bytes": layer.size,
                    "images": self._image_counts[layer.name],
                }
                for layer in _largest(layers)
            ],
        }

    def _targets(self) -> dict[str, dict[str, int]]:
        """Return the figures for each target host, by host.

        They are the bytes of its images with each blob counted once, the number of possible mounts,
        and the bytes that a run would send.
        """
        sizes = Counter[str]()
        mounts = Counter[str]()
        for digest, target_keys in self._target_keys.items():
            counts = Counter(target_key.host for target_key in target_keys)
            for host, count in counts.items():
                sizes[host] += self._blob_sizes[digest]
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
        """Return the number of requests of a run by host and action."""
        sent = self._transport.requests
        hosts = sorted({*sent, *self._forecasts})
        return {host: self._forecasts[host].requests_of_run(sent.get(host, {})) for host in hosts}


def _largest(things: list[_Sized]) -> list[_Sized]:
    """Return the largest things, largest first. Things of the same size are sorted by name."""
    return sorted(things, key=lambda thing: (-thing.size, thing.name))[:_MOST_NAMED]
