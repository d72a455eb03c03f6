"""What counts as a name, a digest, a manifest; what a platform filter leaves of an index, to the
byte.
"""

from __future__ import annotations

import json
from typing import Any

from _regsync.oci.manifest import Manifest, parse_manifest
from _regsync.oci.reference import digest_of
from _regsync.sync.transfer import known_body

CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest(number: int, algorithm: str = "sha256") -> str:
    return digest_of(str(number).encode(), algorithm)


def entry(number: int = 1, media_type: str = LAYER, **fields: object) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest(number), "size": number, **fields}


def image(*layers: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"schemaVersion": 2, "config": entry(0, CONFIG), "layers": list(layers), **fields}


def parse(document: object, content_type: str | None = None, **options: Any) -> Manifest:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_manifest(body, content_type=content_type, **options)


# --- manifests


def test_embedded_data_counts_only_when_it_verifies() -> None:
    good = {"mediaType": LAYER, "digest": digest_of(b"[]"), "size": 2}
    for data, kept in (("W10=", b"[]"), ("W10", None), ("eH0=", None), ("", None), ("é", None)):
        assert known_body(parse(image({**good, "data": data})).layers[0]) == kept
    assert known_body(parse(image({**good, "size": 3, "data": "W10="})).layers[0]) is None
