"""What the tests share: constants, an empty registry, a clock, how a site is asked without a server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from conformance.images import Image, Seed, encode
from conformance.messages import Response
from conformance.registry import App
from conformance.walks import ACCEPT

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "sha256:" + "0" * 64
OCTETS = ("Content-Type", "application/octet-stream")
TAKE = ("Accept", ACCEPT)


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def seed() -> Seed:
    return Seed(1)


def refused(answer: Response, status: int, *codes: str) -> Response:
    """Assert a refusal in the specification's form; return it."""
    assert (answer.status, answer.codes) == (status, list(codes))
    assert answer.header("Content-Type") == "application/json"
    assert all(entry["message"] for entry in answer.json()["errors"])
    return answer


def basic(user: str, password: str) -> tuple[str, str]:
    """Return the header with a login."""
    login = base64.b64encode(f"{user}:{password}".encode()).decode()
    return "authorization", f"Basic {login}"


def bearer(answer: Response) -> tuple[str, str]:
    """Return the header with the token that was given."""
    assert answer.status == 200
    return "authorization", f"Bearer {answer.json()['token']}"


def location(answer: Response) -> str:
    where = urlsplit(answer.header("Location"))
    return f"{where.path}?{where.query}" if where.query else where.path


def begin(app: App, repository: str = "a/b") -> str:
    answer = app.request("POST", f"/v2/{repository}/blobs/uploads/")
    assert answer.status == 202
    return location(answer)


def put_manifest(app: App, image: Image, reference: str, **changed: Any) -> Response:
    headers = [("Content-Type", changed.get("media_type", image.media_type))]
    return app.request(
        "PUT", f"/v2/a/b/manifests/{reference}", headers, changed.get("body", image.body)
    )


def edited(image: Image, **fields: Any) -> bytes:
    """Return the image's manifest with other fields; a value of ... removes the field."""
    document = {**image.document, **fields}
    return encode({key: value for key, value in document.items() if value is not ...})
