"""A listing that leads back to itself is an error, never a short answer (docs/design.md section 7,
I12), at either end, and nothing is concluded from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from _regsync.errors import ListingBroken, RegsyncError, Side
from _regsync.registry.remote import RemoteRepository
from _regsync.registry.transport import Call
from tests.inside.wires import Told, plain_registry, transport_of

SUBJECT = f"sha256:{'a' * 64}"

# By what a page is called in its path: the names on it, and what its Link calls the next one.
Script = Mapping[str, tuple[Sequence[str], str | None]]

# A listing, its numbers of requests, and where it leads back to; None: it ends, and is read whole.
SCRIPTS: dict[str, tuple[Script, int, str | None]] = {
    "to itself": ({"": (["a"], "")}, 1, "page 1 leads back to page 1"),
    "to the first page": (
        {"": (["a"], "2"), "2": (["b"], "3"), "3": (["c"], "")},
        3,
        "page 3 leads back to page 1",
    ),
    "to the page before": (
        {"": (["a"], "2"), "2": (["b"], "3"), "3": ([], "2")},
        3,
        "page 3 leads back to page 2",
    ),
    "to a page that is called otherwise": (
        {"": (["a"], "2"), "2": (["b"], "3"), "3": (["a"], "4"), "4": (["d"], None)},
        3,
        "page 2 leads back to page 1",
    ),
    "to a page that is called otherwise, and is the last one": (
        {"": (["a", "b"], "2"), "2": (["a", "b"], None)},
        2,
        "page 1 leads back to page 1",
    ),
    "to names of several pages": (
        {"": (["a"], "2"), "2": (["b"], "3"), "3": (["a", "b"], "4"), "4": (["a", "b"], "5")},
        3,
        "page 2 leads back to what earlier pages name",
    ),
    "nowhere, with an empty page": (
        {"": (["a"], "2"), "2": ([], "3"), "3": (["b"], None)},
        3,
        None,
    ),
    "nowhere, with empty pages first and last": (
        {"": ([], "2"), "2": ([], "3"), "3": (["a", "b"], "4"), "4": ([], None)},
        4,
        None,
    ),
    "nowhere, with half a page": (
        {"": (["a", "c"], "2"), "2": (["b"], "3"), "3": (["d", "e"], None)},
        3,
        None,
    ),
    "nowhere, with the last name again on each page": (
        {"": (["a", "b"], "2"), "2": (["b", "c"], "3"), "3": (["c"], None)},
        3,
        None,
    ),
}


def entry(name: str) -> dict[str, Any]:
    return {"mediaType": "application/vnd.a.b", "digest": f"sha256:{name * 64}", "size": 2}


def body_of(names: Sequence[str], what: str) -> bytes:
    if what == "tags":
        return json.dumps({"tags": names}).encode()
    return json.dumps({"schemaVersion": 2, "manifests": [entry(name) for name in names]}).encode()


class Listed:
    """A repository whose listings are a script."""

    def __init__(
        self, patch: pytest.MonkeyPatch, script: Script, what: str, side: Side = Side.SOURCE
    ) -> None:
        self.asked = list[str]()
        transport = transport_of({})

        async def page(_: object, call: Call, **__: object) -> Told:
            self.asked.append(call.path)
            names, following = script[call.path.partition("page=")[2]]
            target = self.asked[0]
            if following:
                target = f"{target.partition('?')[0]}?page={following}"
            links = [] if following is None else [("link", f"<{target}>; rel=next")]
            return Told(200, links, body_of(names, what))

        patch.setattr(transport, "request", page)
        host = transport.client(plain_registry())
        self._what = what
        self._repository = RemoteRepository(transport, host, "app", side)

    async def read(self) -> list[str]:
        if self._what == "tags":
            return sorted(await self._repository.list_tags() or ())
        found = await self._repository.list_referrers(SUBJECT)
        return sorted(each.digest.partition(":")[2][0] for each in found)


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["tags", "referrers"])
@pytest.mark.parametrize("leads", SCRIPTS)
async def test_a_listing_is_read_whole_or_is_an_error(monkeypatch, leads, what):
    script, requests, words = SCRIPTS[leads]
    listed = Listed(monkeypatch, script, what)
    if words is None:
        assert await listed.read() == sorted(
            {name for names, _ in script.values() for name in names}
        )
    else:
        with pytest.raises(ListingBroken) as caught:
            await listed.read()
        assert f"the list of {what} does not end: {words}" in str(caught.value)
        assert caught.value.code == "SOURCE_ERROR"
        assert not caught.value.retryable
    assert len(listed.asked) == requests


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("side", "code"), [(Side.SOURCE, "SOURCE_ERROR"), (Side.TARGET, "TARGET_ERROR")]
)
async def test_whose_listing_it_is_the_code_says(monkeypatch, side, code):
    listed = Listed(monkeypatch, {"": (["a"], "")}, "tags", side)
    with pytest.raises(RegsyncError) as caught:
        await listed.read()
    assert caught.value.code == code
