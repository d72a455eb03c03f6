"""Documents that the program prints, held to the schema that it publishes."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from conformance.http import Server
from conformance.images import Seed
from conformance.messages import Answer, Request, Response
from tests.ends import Ran, document, run_regsync, tags
from tests.program import report_schema


def check(name: str, written: dict[str, Any]) -> None:
    """Hold one document to the schema, to the shape of its name alone, and to no other field than
    named.
    """
    published = report_schema()
    Draft202012Validator.check_schema(published)
    Draft202012Validator(published).validate(written)
    strict = closed({**published, "anyOf": [{"$ref": f"#/$defs/{name}"}]})
    Draft202012Validator(strict).validate(written)
    others = [each["$ref"] for each in published["anyOf"] if not each["$ref"].endswith(f"/{name}")]
    assert len(others) == len(published["anyOf"]) - 1
    for other in others:
        assert not Draft202012Validator({**published, "anyOf": [{"$ref": other}]}).is_valid(written)


def closed(shape: Any) -> Any:
    """Return a schema that allows no field which it does not name."""
    if isinstance(shape, list):
        return [closed(each) for each in shape]
    if not isinstance(shape, dict):
        return shape
    found = {key: closed(value) for key, value in shape.items()}
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def mixed_run(source: Server, target: Server) -> Ran:
    """Sync an image, skip one, fail one after repetitions, trim one, fail a mapping."""
    Seed(1).image().load_into(source.app, "app", tag="v1")
    for name in ("multi", "whole"):
        Seed(2).index().load_into(source.app, name, tag="v1")
    Seed(3).image().load_into(source.app, "ill", tag="v1")
    names = {"app": "app", "multi": "multi", "ill": "ill"}
    config = document(
        {"source": source, "target": target},
        *({"from": name, "tags": tags("v*")} for name in names),
        {"from": "none"},
        {"from": "whole", "to": "part", "tags": tags("v1"), "platforms": ["linux/amd64"]},
    )

    def intercept(request: Request) -> Answer | None:
        ill = request.repository == "ill" and request.kind == "upload_start"
        return Response(500) if ill else None

    target.app.intercept = intercept
    run_regsync(
        "copy", f"{source.address}/app:v1", f"{target.address}/app:v1", "--no-artifacts", "-q"
    )
    return run_regsync("sync", "--json", "-q", "-c", "-", stdin=config)
