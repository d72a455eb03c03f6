"""Two registries of any kind, a family of artifacts at the source, and what has to be true at the
target.

Shared by the tests about artifacts. Everything is in memory on a virtual clock; the state is a file
beside the configuration, so that a second run knows what the first did.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from conformance.journal import Entries
from conformance.personas import imitate
from conformance.walks import Family, Graph, equal, has_api, referrers_tag, walk
from tests.ends import Ran, Virtual, document, only, tags

HOUR = 3600.0
MOVES = "POST PUT PATCH DELETE"


class Scene:
    """A family at a source of one kind, an empty target of another, and syncs between them.

    `listed`: the rule is a glob, so that the source is listed; else the tag is named and nothing
    is.
    """

    def __init__(
        self,
        world: Virtual,
        directory: Path,
        made: Family,
        source: str = "strict",
        target: str = "strict",
        *,
        listed: bool = True,
        **rule: Any,
    ) -> None:
        self.world, self.made, self.file = world, made, directory / "mirror.yaml"
        self.source, self.target = (
            imitate(kind, now=anyio.current_time, wall=world.wall) for kind in (source, target)
        )
        world.listen(self.source, "source.test")
        world.listen(self.target, "target.test")
        made.load_into(self.source)
        self.registries: dict[str, Any] = {
            end: {"url": f"http://{end}.test"} for end in ("source", "target")
        }
        self.mapping: dict[str, Any] = {
            "from": "app",
            "tags": tags("v*" if listed else "v1"),
            "artifacts": rule,
        }
        if made.platforms:
            self.mapping["platforms"] = list(made.platforms)

    def write(self, **top: Any) -> None:
        text = document(self.registries, self.mapping, defaults={"artifacts": {}}, **top)
        self.file.write_text(text)

    async def run(self, *command: str, **top: Any) -> Ran:
        """Sync once, or run another command; what was exchanged before is no longer in the journals."""
        for site in (self.source, self.target):
            site.journal.check()
            site.journal.clear()
        self.write(**top)
        with anyio.fail_after(8 * HOUR):
            words = command or ("sync",)
            return await self.world.run(*words, "--json", "-q", "-c", str(self.file))

    async def succeed(self, **top: Any) -> Ran:
        """Sync once, and have it go well."""
        ran = await self.run(**top)
        assert (ran.status, ran.failed) == (0, []), ran.err
        return ran

    async def settle(self) -> Ran:
        """Sync once more, and have it write nothing."""
        ran = await self.succeed()
        self.moved().none()
        assert only(ran.images)["status"] == "skipped", ran.out
        return ran

    def moved(self) -> Entries:
        """Return what the last run wrote at the target, or tried to."""
        return self.target.journal.matching(MOVES)

    def check(self, *, replaced: bool = False) -> None:
        """The target has the image and everything that hangs on it at the source, and nothing else.

        `replaced`: and lists that were true when they were put, and have no tag any more.
        """
        there = walk(self.target, "app", self.made.kept)
        assert equal(walk(self.source, "app", self.made.kept), there)
        held = self.target.repositories["app"].manifests
        assert not self.made.lost & held.keys(), "what has no subject there travelled"
        self.check_nothing_else(there, replaced=replaced)

    def check_nothing_else(self, there: Graph, *, replaced: bool = False) -> None:
        """Everything that the target holds belongs to the image or to what hangs on it; lists are
        put once.
        """
        held = self.target.repositories["app"]
        named = held.tags["v1"]
        top = walk(self.target, "app", [named])
        assert not (self.made.platforms and named in top.referrers), (
            "something refers to an index that was trimmed, which no source has"
        )
        lists = {**top.lists, **there.lists}
        wanted = top.manifests | there.manifests | set(lists.values())
        assert wanted <= held.manifests.keys()
        more = held.manifests.keys() - wanted
        assert replaced or not more, f"nobody asked for {sorted(more)}"
        for digest in more:
            listed = {part["digest"] for part in held.manifests[digest].children}
            assert any(listed < each.keys() for each in there.referrers.values()), (
                f"{digest} lists {sorted(listed)}"
            )
        contents = top.contents.keys() | there.contents.keys()
        assert held.blobs.keys() == contents - held.manifests.keys()
        assert held.tags == {"v1": named, **there.tags, **lists}
        assert not (lists and has_api(self.target)), "fallback tags where there is the API"
        assert set(self.target.repositories) == {"app"}

    def check_order(self) -> None:
        """No referrer's manifest was put before its subject's (I2), no list before what it names."""
        puts = self.target.journal.matching("PUT", "manifest", status=201)
        first = {put.response_headers["docker-content-digest"]: put for put in reversed(puts)}
        subjects: Mapping[str, str] = {
            each.top: each.document["subject"]["digest"] for each in self.made.sample.attached
        }
        for digest in subjects.keys() & first.keys():
            subject = subjects[digest]
            Entries([first[subject]], subject).before([first[digest]])
        for tag in {referrers_tag(each) for each in subjects.values()}:
            for put in puts:
                if put.reference == tag:
                    listed = self.target.manifest("app", tag)
                    assert listed is not None
                    parts = [first[part["digest"]] for part in listed.children]
                    Entries(parts, tag).before([put])

    def check_nothing_wrong(self) -> None:
        """Whatever the target holds is true: no list names what is not there, nothing is without
        its subject.
        """
        held = self.target.repositories.get("app")
        if held is None:
            return
        walk(self.target, "app", list(held.manifests))
        for stored in held.manifests.values():
            assert stored.subject is None or stored.subject in held.manifests, (
                f"{stored.digest} has no subject"
            )
        right = walk(self.source, "app", [self.made.image.top])
        lists = {
            held.tags[tag] for tag in held.tags if tag.startswith("sha256-") and "." not in tag
        }
        assert held.manifests.keys() - lists <= right.contents.keys() | {held.tags.get("v1")}
