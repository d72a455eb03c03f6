"""Do the same work with every program that is found: requests, bytes, time, and whether it is right.

Programs are found on the PATH or named by --peer (regclient, ocync, skopeo, crane). Scenes of
counts run once, between registries of the harness, which count requests and the bytes of manifests
and blobs; times there are only those of waits. Scenes of times run in rounds, another program first
each time, between docker-registry processes whose data are in memory; times, CPU and memory are the
client's alone, start-up included. A program that is run several times for one scene is given the sum
of times and the largest memory.

After each run the targets are asked what they hold. What differs from the source is printed beside
the figures, and so is an exit status that is not 0.

    bench.py compare --json FILE                  everything, into a file
    bench.py compare times --json FILE            only scenes of times: they replace those in FILE
    bench.py compare --table FILE                 the tables of such a file, as Markdown
    bench.py compare --table FILE --into DOC.md   the same, between the marks of a document
    bench.py compare cold away --peer ocync=PATH  two scenes, with a program that is not on the PATH

Owns: the scenes, the order of runs, what is right.
May not know: how a program is told what to do (peers.py), how tables are written (tables.py).
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from conformance.faults import Rule
from conformance.http import Reception, run_in_thread
from conformance.images import PLATFORMS, Fleet, Image, Seed
from conformance.messages import Answer, Request
from conformance.rates import Cap, Metered, Rates
from conformance.registry import App
from tools.benches.bytes import Tally, least, tally_of
from tools.benches.cost import joining, small_group
from tools.benches.peers import Job, Ours, Peer, add_peer_option, find_peers, run_job
from tools.benches.place import app_of
from tools.benches.props import started_line
from tools.benches.registries import Harness, Images, Registry, empty_registry
from tools.benches.runner import MB, MIB, BenchError, choose, conditions, folder_in_memory
from tools.benches.tables import Measured, Outcome, Side, print_outcome, tables

__all__ = ["SCENES", "add_options", "run"]

# 100 tags in 10 repositories, each with 5 layers that all share and 3 of its own.
FLEET = Fleet(size=70_000)
FEW = Fleet(size=70_000, repositories=5, tags=4)
MANY = Fleet(size=70_000, repositories=1, tags=300, own=1)
SEEN = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"
LOGGED = re.compile(r'time="?\S+ level=\S+ msg="')  # what a log puts in front of a message
FIRST_MARK = "<!-- measured: begin -->"
LAST_MARK = "<!-- measured: end -->"
COUNTING_LIMIT = 120  # seconds for one run


@dataclass(frozen=True)
class Content:
    """What a source holds: tagged images, and referrers that are held by digest."""

    tagged: Images
    attached: Mapping[str, Sequence[Image]]  # repository -> referrers

    def load_into(self, registry: Registry) -> None:
        """Hold all of it."""
        registry.load(self.tagged)
        for repository, images in self.attached.items():
            assert isinstance(registry, Harness)
            for image in images:
                image.load_into(app_of(registry.server), repository)


def fleet(described: Fleet) -> Content:
    """Make images without referrers."""
    return Content(described.images(), {})


def signed(*, is_late: bool = False) -> Content:
    """Make 20 images; unless they are still to come, with cosign's tags and referrers of OCI 1.1."""
    tagged: dict[str, dict[str, Image]] = {}
    attached: dict[str, list[Image]] = {}
    for number in range(2):
        seed = Seed(number)
        repository = f"fleet/app-{number}"
        images = {f"1.{tag}.0": seed.image(sizes=(3000, 5000)) for tag in range(10)}
        tagged[repository] = dict(images)
        if is_late:
            continue
        attached[repository] = []
        for image in images.values():
            tagged[repository][image.top.replace(":", "-") + ".sig"] = seed.image(sizes=(300,))
            bill = seed.artifact(image, "application/spdx+json")
            signature = seed.artifact(bill, "application/vnd.dev.sigstore.bundle.v0.3+json")
            attached[repository] += [bill, signature]
    return Content(tagged, attached)


def big() -> Content:
    """Make one image of 8 layers of 64 MiB."""
    return Content({"fleet/big": {"v1": Seed(1).image(sizes=[64 * MIB] * 8)}}, {})


def forty_megabytes() -> Content:
    """Make one image with a layer of 40 MB."""
    return Content({"fleet/big": {"v1": Seed(2).image(sizes=[40 * MB])}}, {})


def errors_now_and_then(source: App, target: App) -> None:
    """Answer 1 % of requests with 503, which ones being the same for every program."""
    for app in (source, target):
        app.faults.on().chance(0.01).status(503)


def throttle(target: App) -> None:
    """Take 40 requests a second."""
    target.auth = Metered(Rates(Cap(40)))


def break_once(app: App, methods: str, side: Literal["request", "response"]) -> None:
    """Break the first body that is longer than 24 MiB, behind these."""
    rules: list[Rule] = []
    rule = app.faults.on(methods, "blob upload", where=lambda request: not rules[0].done)
    rules.append(rule.drop(after=24 * MIB, of=side))


@dataclass(frozen=True)
class Scene:
    """What is copied where, how the registries are reached, and in which phases it is measured.

    Phases: "cold"; "unchanged" after it; "lost", which is unchanged without anything that the
    program remembers; "changed", when the source has gone from `before` to `now`.
    """

    text: str
    now: Callable[[], Content]
    before: Callable[[], Content] | None = None
    phases: Sequence[str] = ("cold",)
    targets: int = 1
    is_timed: bool = False  # between docker-registry processes, in rounds
    rounds: int = 100  # at most
    limit: int = COUNTING_LIMIT  # seconds for one run
    has_artifacts: bool = False
    is_immutable: bool = False
    is_one_host: bool = False  # from one repository of a registry into others of it
    has_small_cpu: bool = False  # a tenth of a processor
    platform: str = ""
    delay: float = 0.0  # seconds each way, at both sides
    outage: tuple[float, int] | None = None  # seconds, and the bytes after which it begins
    faults: Callable[[App, App], None] | None = None  # set at the source and the first target
    has_least: bool = False  # the least that it needs can be computed

    @property
    def kind(self) -> str:
        """What it is measured for."""
        return "times" if self.is_timed else "counts"


SCENES: Mapping[str, Scene] = {
    "cold": Scene(
        "100 tags of 8 layers in 10 repositories",
        lambda: fleet(FLEET),
        phases=("cold", "unchanged", "lost"),
        has_least=True,
    ),
    "changed": Scene(
        "100 tags, 5 of them moved",
        lambda: fleet(replace(FLEET, moved=5)),
        lambda: fleet(FLEET),
        phases=("changed",),
        has_least=True,
    ),
    "new": Scene(
        "300 tags, 5 of them new",
        lambda: fleet(MANY),
        lambda: fleet(replace(MANY, left_out=5)),
        phases=("changed",),
        has_least=True,
    ),
    "immutable": Scene(
        "300 tags that never move, 5 of them new",
        lambda: fleet(MANY),
        lambda: fleet(replace(MANY, left_out=5)),
        phases=("changed",),
        is_immutable=True,
        has_least=True,
    ),
    "three": Scene(
        "100 tags to three targets",
        lambda: fleet(FLEET),
        phases=("cold", "unchanged"),
        targets=3,
        has_least=True,
    ),
    "indexes": Scene(
        "100 indexes of 4 platforms",
        lambda: fleet(replace(FLEET, platforms=PLATFORMS)),
        phases=("cold", "unchanged"),
        has_least=True,
    ),
    "platform": Scene(
        "100 indexes of 4 platforms, one of them wanted",
        lambda: fleet(replace(FLEET, platforms=PLATFORMS)),
        phases=("cold", "unchanged"),
        platform="linux/amd64",
        limit=30,
    ),
    "one host": Scene(
        "100 tags to other repositories of their registry",
        lambda: fleet(FLEET),
        phases=("cold",),
        is_one_host=True,
    ),
    "signed": Scene(
        "20 images with cosign's tag, an SBOM and its signature",
        signed,
        phases=("cold", "unchanged"),
        has_artifacts=True,
    ),
    "signed later": Scene(
        "20 images signed after they were copied",
        signed,
        lambda: signed(is_late=True),
        phases=("changed",),
        has_artifacts=True,
    ),
    "errors": Scene(
        "100 tags, 1 % of requests answered with 503",
        lambda: fleet(FLEET),
        faults=errors_now_and_then,
        has_least=True,
    ),
    "throttled": Scene(
        "20 tags to a target that takes 40 requests a second",
        lambda: fleet(FEW),
        faults=lambda source, target: throttle(target),
        has_least=True,
    ),
    "broken read": Scene(
        "a layer of 40 MB, the source breaks off once, after 24 MiB",
        forty_megabytes,
        faults=lambda source, target: break_once(source, "GET", "response"),
    ),
    "broken write": Scene(
        "a layer of 40 MB, the target breaks off once, after 24 MiB",
        forty_megabytes,
        faults=lambda source, target: break_once(target, "PUT PATCH", "request"),
    ),
    "time": Scene(
        "100 tags of 8 layers in 10 repositories",
        lambda: fleet(FLEET),
        phases=("cold", "unchanged", "lost"),
        is_timed=True,
        has_least=True,
    ),
    "time three": Scene(
        "100 tags to three targets",
        lambda: fleet(FLEET),
        phases=("cold", "unchanged"),
        targets=3,
        is_timed=True,
        rounds=1,
        has_least=True,
    ),
    "big": Scene("one image of 8 layers of 64 MiB", big, is_timed=True, limit=120),
    "10 ms": Scene(
        "20 tags, both registries 10 ms away each way",
        lambda: fleet(FEW),
        phases=("cold", "unchanged"),
        is_timed=True,
        rounds=1,
        delay=0.01,
        has_least=True,
    ),
    "40 ms": Scene(
        "20 tags, both registries 40 ms away each way",
        lambda: fleet(FEW),
        phases=("cold", "unchanged"),
        is_timed=True,
        rounds=1,
        limit=120,
        delay=0.04,
        has_least=True,
    ),
    "away": Scene(
        "100 tags, the target refuses connections for 1 s in the middle",
        lambda: fleet(FLEET),
        is_timed=True,
        rounds=1,
        limit=45,
        outage=(1.0, 5 * MB),
    ),
    "pod": Scene(
        "100 tags, with a tenth of a processor",
        lambda: fleet(FLEET),
        phases=("cold", "unchanged"),
        is_timed=True,
        rounds=1,
        limit=120,
        has_small_cpu=True,
        has_least=True,
    ),
}


# ---------------------------------------------------------------- registries


class Tolerant(App):
    """A registry that takes a POST without any length as one without a body.

    RFC 9112 section 6.3 allows it, and docker-registry takes it; the harness alone would refuse.
    """

    def start(self, request: Request) -> Answer | Reception:
        """Decide on a request's head."""
        has_length = request.header("content-length") or request.is_chunked
        if request.method == "POST" and not has_length:
            request.headers = [*request.headers, ("content-length", "0")]
        return super().start(request)


class Stage:
    """The registries of one scene for one program, and where that keeps what it remembers."""

    def __init__(
        self, scene: Scene, source: Registry, targets: Sequence[Registry], job: Job
    ) -> None:
        self.scene = scene
        self.source = source
        self.targets = targets
        self.job = job

    def take_requests(self) -> tuple[Side, Side]:
        """Return what the source and all targets were asked since the last time."""
        source = self.source.exchanges()
        if self.scene.is_one_host:
            names = self.job.repositories
            target = [each for each in source if each.repository not in names]
            source = [each for each in source if each.repository in names]
        else:
            target = [one for each in self.targets for one in each.exchanges()]
        return self._side(tally_of(source)), self._side(tally_of(target))

    def mistakes(self) -> int:
        """Count the requests since the last time that no correct client sends."""
        return sum(len(each.server.journal.violations) for each in self._harness())

    def end_faults(self) -> None:
        """Let nothing go wrong from now on."""
        for registry in self._harness():
            app_of(registry.server).faults.rules.clear()

    def _harness(self) -> list[Harness]:
        """Return the registries that are the harness's, each of them once."""
        registries = dict.fromkeys((self.source, *self.targets))
        return [each for each in registries if isinstance(each, Harness)]

    def _side(self, tally: Tally) -> Side:
        """Keep the bytes only where they were counted: a log does not tell what came by PATCH."""
        return Side(dict(tally.requests), None if self.scene.is_timed else tally.bytes)

    def differences(self, content: Content) -> str:
        """Say which tags and referrers are missing or wrong at the targets; "" if none is."""
        wrong_tags = []
        lacking_referrers = []
        for registry in self.targets:
            with closing(http.client.HTTPConnection(registry.address, timeout=60)) as connection:
                for name, to in self.job.repositories.items():
                    tagged = content.tagged[name]
                    wrong_tags += [
                        tag
                        for tag, image in tagged.items()
                        if not self.is_held(connection, to, tag, image)
                    ]
                    lacking_referrers += [
                        image.top
                        for image in content.attached.get(name, ())
                        if ask(connection, to, image.top).status != 200
                    ]

        copies = len(self.targets)
        counts = []
        if wrong_tags:
            total = copies * sum(len(tagged) for tagged in content.tagged.values())
            counts.append(f"{len(wrong_tags)} of {total} tags are missing or name something else")
        if lacking_referrers:
            total = copies * sum(len(images) for images in content.attached.values())
            counts.append(f"{len(lacking_referrers)} of {total} referrers are missing")
        return ", ".join(counts)

    def is_held(
        self, connection: http.client.HTTPConnection, repository: str, tag: str, image: Image
    ) -> bool:
        """Tell whether a tag names what it should: the image, or its index with one platform left."""
        answer = ask(connection, repository, tag)
        body = answer.body
        if answer.status != 200:
            return False
        if not self.scene.platform:
            return body == image.body
        wanted = {
            entry["digest"]
            for entry in image.document["manifests"]
            if f"{entry['platform']['os']}/{entry['platform']['architecture']}"
            == self.scene.platform
        }
        entries = json.loads(body).get("manifests", [])
        held = {
            entry["digest"]
            for entry in entries
            if ask(connection, repository, entry["digest"]).status == 200
        }
        # An index with an entry that leads nowhere is not right, one with more platforms neither.
        return held == wanted and len(entries) == len(wanted)


class Heard(NamedTuple):
    """An answer of a registry."""

    status: int
    body: bytes


def ask(connection: http.client.HTTPConnection, repository: str, reference: str) -> Heard:
    """Get a manifest."""
    path = f"/v2/{repository}/manifests/{reference}"
    connection.request("GET", path, headers={"Accept": SEEN})
    answer = connection.getresponse()
    return Heard(answer.status, answer.read())


class Theatre:
    """Where scenes are set: a directory in memory, and the programs."""

    def __init__(self, work: Path, peers: Sequence[Peer], rounds: int) -> None:
        self.work = work
        self.peers = peers
        self.rounds = rounds

    def play(self, name: str, scene: Scene) -> Iterator[Outcome]:
        """Measure one scene with all programs."""
        now = scene.now()
        before = scene.before() if scene.before else now
        rounds = min(self.rounds, scene.rounds) if scene.is_timed else 1
        with ExitStack() as stack:
            shared: Registry | None = None
            if scene.is_timed:
                shared = stack.enter_context(self.registry(scene))
                before.load_into(shared)
            group = stack.enter_context(small_group()) if scene.has_small_cpu else None
            if scene.has_small_cpu and group is None:
                return
            able = deque(peer for peer in self.peers if peer.has_platforms or not scene.platform)
            for _ in range(rounds):
                for peer in able:
                    with self.stage(name, scene, peer, shared, now) as stage:
                        if shared is None:
                            before.load_into(stage.source)
                            set_faults(stage)
                        yield from self.run_phases(name, stage, peer, before, now, group)
                able.rotate(-1)  # each round begins with another program

    @contextmanager
    def registry(self, scene: Scene) -> Iterator[Registry]:
        """Start an empty registry."""
        if scene.is_timed:
            with empty_registry(self.work) as debian:
                yield debian
        else:
            with run_in_thread(Tolerant()) as server:
                yield Harness(server)

    @contextmanager
    def stage(
        self, scene_name: str, scene: Scene, peer: Peer, shared: Registry | None, content: Content
    ) -> Iterator[Stage]:
        """Start empty targets, and a source unless it is shared."""
        with ExitStack() as stack:
            source = shared or stack.enter_context(self.registry(scene))
            targets = [source]
            if not scene.is_one_host:
                targets = [stack.enter_context(self.registry(scene)) for _ in range(scene.targets)]
            prefix = "mirror" if scene.is_one_host else "fleet"
            for target in targets:
                target.announce(content.tagged)
            job = Job(
                home=self.work / "home" / scene_name / peer.name,
                source=stack.enter_context(reached(scene, source.address)),
                targets=tuple(
                    stack.enter_context(reached(scene, target.address, is_target=True))
                    for target in targets
                ),
                repositories={
                    name: f"{prefix}/{name.rpartition('/')[2]}" for name in content.tagged
                },
                has_artifacts=scene.has_artifacts,
                platform=scene.platform,
                is_immutable=scene.is_immutable,
            )
            peer.forget(job)
            yield Stage(scene, source, targets, job)

    def run_phases(
        self, name: str, stage: Stage, peer: Peer, before: Content, now: Content, group: Path | None
    ) -> Iterator[Outcome]:
        """Run a program in all phases of a scene, in the control group if there is one.

        Begins with a cold run. If the source holds other content later, this run only fills the
        targets and has no outcome.
        """
        scene = stage.scene
        for phase in ("cold", *(phase for phase in scene.phases if phase != "cold")):
            content = now if phase == "changed" else before
            if phase == "changed":
                now.load_into(stage.source)
            if phase == "lost":
                peer.forget(stage.job)
            stage.take_requests()  # what was asked until now does not count
            ran = run_job(peer, stage.job, scene.limit, joining(group))
            mistakes = stage.mistakes()
            source, target = stage.take_requests()
            stage.end_faults()
            wrong = stage.differences(content)
            if phase == "cold" and scene.before is not None:
                continue
            yield Outcome(
                scene=name,
                phase=phase,
                peer=peer.name,
                status=ran.status,
                wrong=wrong,
                said=last_complaint(ran.err or ran.out) if ran.status else "",
                mistakes=mistakes,
                source=source,
                target=target,
                wall=ran.spent.wall,
                cpu=ran.spent.cpu,
                peak=ran.spent.peak,
            )


def set_faults(stage: Stage) -> None:
    """Let go wrong what the scene says."""
    if stage.scene.faults is None:
        return
    source = stage.source
    target = stage.targets[0]
    assert isinstance(source, Harness)
    assert isinstance(target, Harness)
    stage.scene.faults(app_of(source.server), app_of(target.server))


@contextmanager
def reached(scene: Scene, address: str, *, is_target: bool = False) -> Iterator[str]:
    """Put a long line in front of a registry, or one that breaks; yield where to ask."""
    arguments: tuple[str, ...] = ()
    if scene.delay:
        arguments = ("delay", str(scene.delay))
    if scene.outage and is_target:
        seconds, count = scene.outage
        arguments = ("away", str(seconds), str(count))
    if not arguments:
        yield address
        return
    with started_line(*arguments, address) as near:
        yield near


def last_complaint(text: str) -> str:
    """Return the last line about an error, else about a failure, else of all; cut to 120 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for word in (r"\berror\b", r"\b(failed|fatal)\b", ""):
        chosen = [line for line in lines if re.search(word, line, re.IGNORECASE)]
        if chosen:
            return LOGGED.sub("", chosen[-1])[:120]
    return ""


# ---------------------------------------------------------------- the least


def least_requests_and_bytes(scene: Scene) -> Iterator[tuple[str, int, int]]:
    """Return phase, requests and bytes of a program that knows all but what the tags name today."""
    if not scene.has_least:
        return
    now = scene.now().tagged
    before = scene.before().tagged if scene.before else now
    nothing: Images = {repository: {} for repository in now}
    held = {"cold": nothing, "changed": before, "unchanged": now, "lost": now}
    for phase in scene.phases:
        bound = least(
            held[phase],
            now,
            targets=scene.targets,
            is_immutable=scene.is_immutable,
            is_stateful=phase != "cold",
        )
        yield phase, bound.request_count, bound.bytes


# ---------------------------------------------------------------- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    titles = [f"  {name:<13} {scene.text}" for name, scene in SCENES.items()]
    parser.epilog = "\n".join(["scenes:", *titles])
    parser.add_argument(
        "scenes",
        nargs="*",
        metavar="SCENE",
        help="one of those below, or counts or times: all of that kind (default: both)",
    )
    add_peer_option(parser)
    parser.add_argument("-n", dest="rounds", type=int, default=3, help="rounds (%(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", help="write the runs into this file, in place of those it has"
    )
    parser.add_argument("--table", metavar="FILE", help="measure nothing: print what FILE holds")
    parser.add_argument("--into", metavar="FILE", help="with --table: write it into this document")


def run(options: argparse.Namespace) -> int:
    """Measure the chosen scenes and print each run as soon as it has ended."""
    if options.table:
        write_tables(Path(options.table), options.into)
        return 0

    scenes = chosen_scenes(options.scenes)
    peers: list[Peer] = [Ours(), *find_peers(options.peer)]
    measured = Measured(
        conditions={kind: conditions() for kind in sorted({each.kind for each in scenes.values()})},
        versions={peer.name: peer.version() for peer in peers},
        settings={peer.name: peer.settings for peer in peers},
        scenes={name: scene.text for name, scene in scenes.items()},
    )
    for kind, text in measured.conditions.items():
        print(f"{kind}: {text}")
    for name, version in measured.versions.items():
        print(f"{name}: {version}; {measured.settings[name]}")
    file = Path(options.json) if options.json else None
    if file and file.exists():
        kept = Measured.from_document(json.loads(file.read_text(encoding="utf-8")))
        measured.take_over(kept, but=scenes)

    with folder_in_memory() as work:
        theatre = Theatre(work, peers, options.rounds)
        for name, scene in scenes.items():
            print(f"{name}: {scene.text}", flush=True)
            for phase, requests, size in least_requests_and_bytes(scene):
                measured.least[f"{name}, {phase}"] = (requests, size)
                print(f"  {phase:<10} {'least':<10} {requests} requests, {size / MB:.2f} MB")
            for outcome in theatre.play(name, scene):
                measured.outcomes.append(outcome)
                print_outcome(outcome)
            if file:
                file.write_text(json.dumps(measured.document(), indent=1), encoding="utf-8")
    return 0


def write_tables(measured: Path, into: str | None) -> None:
    """Print the tables of an earlier measurement, or write them into a document."""
    document = json.loads(measured.read_text(encoding="utf-8"))
    text = tables(Measured.from_document(document))
    if into:
        write_between_marks(Path(into), text)
    else:
        print(text)


def chosen_scenes(names: Sequence[str]) -> dict[str, Scene]:
    """Return the named scenes, in their own order; a kind stands for all of its scenes."""
    by_kind: dict[str, list[str]] = {}
    for name, scene in SCENES.items():
        by_kind.setdefault(scene.kind, []).append(name)
    wanted = [name for word in names for name in by_kind.get(word, [word])]
    chosen = choose(wanted, SCENES)
    return {name: scene for name, scene in SCENES.items() if name in chosen}


def write_between_marks(file: Path, text: str) -> None:
    """Replace what stands between the two marks of a document."""
    before, first, rest = file.read_text(encoding="utf-8").partition(FIRST_MARK)
    _, last, behind = rest.partition(LAST_MARK)
    if not (first and last):
        raise BenchError(f"{file} has no {FIRST_MARK} with {LAST_MARK} behind it")
    file.write_text(f"{before}{first}\n{text}\n{last}{behind}", encoding="utf-8")
