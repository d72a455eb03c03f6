"""Registries that are filled without requests and tell what they were asked.

Owns: Debian's docker-registry, started empty, and the harness's, both under one surface; what one
request to them was.
May not know: what is measured.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from conformance.http import Server
from conformance.images import Image
from conformance.messages import Request
from conformance.programs import docker_registry
from tools.benches.place import app_of

__all__ = ["Debian", "Exchange", "Harness", "Images", "Registry", "empty_registry"]

Images = Mapping[str, Mapping[str, Image]]  # repository -> tag -> image


class Exchange(NamedTuple):
    """One request as a registry saw it."""

    method: str
    kind: str
    repository: str
    query: Mapping[str, str]
    status: int
    bytes: int  # of manifests and blobs, in either direction

    @property
    def name(self) -> str:
        """How it is counted: listings and mounts apart, all others by method and kind."""
        if self.kind == "tag_list":
            return "list"
        if self.kind == "upload_start":
            mounts = self.query.get("mount") and self.query.get("from") != self.repository
            return "mount" if mounts and self.status == 201 else "POST upload"
        return f"{self.method} {self.kind}"


class Harness:
    """A registry of the harness, in a thread."""

    def __init__(self, server: Server) -> None:
        self.address = server.address
        self.server = server

    def announce(self, images: Images) -> None:
        """Learn nothing: the journal tells how much came."""

    def load(self, images: Images) -> None:
        """Hold images."""
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                image.load_into(app_of(self.server), repository, tag)

    def exchanges(self) -> list[Exchange]:
        """Return what was asked since the last time."""
        entries = list(self.server.journal.entries)
        self.server.journal.clear()
        exchanges = []
        for entry in entries:
            is_pull = entry.method == "GET" and entry.kind in ("manifest", "blob")
            came = entry.response_bytes if is_pull and entry.status in (200, 206) else 0
            exchanges.append(
                Exchange(
                    entry.method,
                    entry.kind,
                    entry.repository,
                    entry.query,
                    entry.status or 0,
                    came + entry.request_bytes,
                )
            )
        return exchanges


class Debian:
    """A docker-registry: its storage is written as it would write it, its log is read."""

    def __init__(self, address: str, home: Path) -> None:
        self.address = address
        self._storage = home / "data" / "docker" / "registry" / "v2"
        self._log = home / "registry.log"
        self._read = len(self._log.read_text())
        self._sizes: dict[str, int] = {}

    def load(self, images: Images) -> None:
        """Hold images, in the files of distribution's storage.

        https://github.com/distribution/distribution/blob/v2.8.2/registry/storage/paths.go
        """
        for repository, tagged in images.items():
            place = self._storage / "repositories" / repository
            for tag, image in tagged.items():
                for digest, body in image.contents().items():
                    algorithm, _, hexed = digest.partition(":")
                    blob = self._storage / "blobs" / algorithm / hexed[:2] / hexed / "data"
                    write_file(blob, body)
                    kind = "_manifests/revisions" if digest in image.manifests else "_layers"
                    write_file(place / kind / algorithm / hexed / "link", digest.encode())
                algorithm, _, hexed = image.top.partition(":")
                named = place / "_manifests" / "tags" / tag
                write_file(named / "index" / algorithm / hexed / "link", image.top.encode())
                write_file(named / "current" / "link", image.top.encode())

    def announce(self, images: Images) -> None:
        """Learn how large things are: a log tells what was sent, not what came."""
        for repository, tagged in images.items():
            for tag, image in tagged.items():
                self._sizes[f"{repository}:{tag}"] = len(image.body)
                for digest, body in image.contents().items():
                    self._sizes[digest] = len(body)

    def exchanges(self) -> list[Exchange]:
        """Return what was asked since the last time."""
        text = self._log.read_text()[self._read :]
        self._read += len(text)
        lines = [line for line in text.splitlines() if 'msg="response completed' in line]
        return [self._exchange_of(line) for line in lines]

    def _exchange_of(self, line: str) -> Exchange:
        fields = {
            name: plain or quoted
            for name, quoted, plain in re.findall(r'([\w.]+)=(?:"([^"]*)"|(\S+))', line)
        }
        uri = fields["http.request.uri"]
        method = fields["http.request.method"]
        status = int(fields["http.response.status"])
        request = Request(method, uri, [])
        query = dict(parse_qsl(urlsplit(uri).query))
        is_pull = method == "GET" and request.kind in ("manifest", "blob")
        if is_pull and status in (200, 206):
            size = int(fields["http.response.written"])
        else:
            size = self._pushed(method, request, query)
        return Exchange(method, request.kind, request.repository, query, status, size)

    def _pushed(self, method: str, request: Request, query: Mapping[str, str]) -> int:
        """Return how many bytes of a manifest or a blob came with a request."""
        if method == "PUT" and request.kind == "manifest":
            if ":" in request.reference:
                return self._sizes[request.reference]
            return self._sizes[f"{request.repository}:{request.reference}"]
        if method in ("PUT", "POST") and "digest" in query:
            return self._sizes[query["digest"]]
        return 0


def write_file(path: Path, content: bytes) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


Registry = Harness | Debian


@contextmanager
def empty_registry(work: Path, tls: tuple[str, str] | None = None) -> Iterator[Debian]:
    """Run a docker-registry with its data below `work`; they are gone afterwards.

    `tls` has the paths of certificate and key.
    """
    directory = tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True)
    with directory as home, docker_registry(home, tls=tls) as address:
        yield Debian(address, Path(home))
