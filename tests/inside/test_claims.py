"""Claims under every order of events that hypothesis can think of, and the rules of what is known."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from _regsync.oci.manifest import Descriptor
from _regsync.state import Knowledge, RepositoryKey
from _regsync.sync.claims import Claims, ImageClaims, Step

HOSTS = ("one.example", "two.example")
REPOSITORIES = ("a/app", "b/base", "c/cli", "d/db")
ROOT = f"sha256:{'e' * 64}"
BLOBS = tuple(f"sha256:{number:064x}" for number in range(1, 8))
# Children and the blobs that each names; the last one's own digest is a blob of other images too.
CHILDREN = {
    f"sha256:{'c':0>63}1": BLOBS[0:2],
    f"sha256:{'c':0>63}2": BLOBS[1:4],
    BLOBS[6]: BLOBS[4:5],
}
# The mount rule of a host: mounts everything, mounts nothing, or refuses some pairs of
# repositories.
ALWAYS, NEVER, SOMETIMES = "always", "never", "sometimes"


def blob(digest: str, size: int = 10) -> Descriptor:
    return Descriptor("application/octet-stream", digest, size)


def work(where: RepositoryKey, *digests: str, children: tuple[str, ...] = ()) -> ImageClaims:
    return ImageClaims(where, {digest: blob(digest) for digest in digests}, children)


@dataclass(eq=False)
class Image:
    """One image as the conductor keeps it: steps in hand, steps running, and whether one has
    failed.
    """

    work: ImageClaims
    root: str
    queue: list[Step] = field(default_factory=list)
    running: list[Step] = field(default_factory=list)
    ready: bool = False
    finishing: list[str] | None = None
    broken: bool = False
    ended: str = ""


class World:
    """The conductor's use of `Claims`, with registries that remember what they hold.

    Every method asserts what has to hold for the event; `check` what has to hold at any time.
    """

    def __init__(self, mounts: dict[str, str], at_source: tuple[str, ...] = ()) -> None:
        self.knowledge = Knowledge()
        self.claims = Claims(self.knowledge)
        self.mounts = mounts
        self.refused_pairs: set[tuple[str, str, str]] = set()
        self.blobs: set[tuple[RepositoryKey, str]] = set()
        self.manifests: set[tuple[RepositoryKey, str]] = set()
        self.mountable: set[tuple[RepositoryKey, str]] = set()
        self.uploads: Counter[tuple[str, str]] = Counter()
        self.images: dict[ImageClaims, Image] = {}
        self.all: list[Image] = []
        self.trace: list[str] = []
        self.failures = 0
        if at_source:
            source = RepositoryKey(HOSTS[0], "source/repo")
            self._put(source, ROOT, at_source)

    def _put(self, where: RepositoryKey, digest: str, blobs: tuple[str, ...]) -> None:
        self.manifests.add((where, digest))
        for each in blobs:
            self.blobs.add((where, each))
            self.mountable.add((where, each))
        self.knowledge.confirm_manifest(where, digest, blobs)

    # --- events -------------------------------------------------------------------------------

    def promote(
        self, where: RepositoryKey, layers: tuple[str, ...], children: tuple[str, ...]
    ) -> None:
        """As the conductor does: what is committed is left out together with what it names."""
        lacking = tuple(
            each for each in children if not self.knowledge.is_manifest_believed(where, each)
        )
        named = dict.fromkeys(
            (*layers, *(digest for child in lacking for digest in CHILDREN[child]))
        )
        image = Image(
            work(where, *named, children=lacking), f"sha256:{'f':0<32}{len(self.all):032x}"
        )
        self.all.append(image)
        self.images[image.work] = image
        steps = self.claims.promote(image.work)
        assert all(step.claims is image.work for step in steps), (
            "a promotion gives work to its image only"
        )
        self._queue(steps)
        if image.work.is_ready():
            self._make_ready(image.work)

    def _queue(self, steps: list[Step]) -> None:
        for step in steps:
            mount = f" from {step.mount_from}" if step.mount_from else ""
            self.trace.append(
                f"{self.all.index(self.images[step.claims])} {step.blob.digest[-2:]}{mount}"
            )
            self.images[step.claims].queue.append(step)

    def _make_ready(self, ready: ImageClaims) -> None:
        image = self.images[ready]
        assert not image.ready, "an image becomes ready once"
        image.ready = True

    def startable(self) -> list[Image]:
        return [
            each
            for each in self.images.values()
            if not each.broken and (each.queue or (each.ready and each.finishing is None))
        ]

    def start(self, image: Image) -> None:
        steps, image.queue = image.queue, []
        for step in steps:
            place = (step.claims.where, step.blob.digest)
            flying = [(s.claims.where, s.blob.digest) for each in self.all for s in each.running]
            assert place not in flying, "in flight twice"
            assert place not in self.blobs, "brought again"
            if step.mount_from is not None:
                source = (step.claims.where[0], step.mount_from)
                assert (source, step.blob.digest) in self.mountable, (
                    "mount from an uncommitted repository"
                )
                assert step.mount_from != step.claims.where[1]
            image.running.append(step)
        if image.ready and image.finishing is None:
            image.finishing = sorted(image.work.own_manifests)

    def busy(self) -> list[Image]:
        return [
            each
            for each in self.all
            if each.running or (each.finishing is not None and not each.ended)
        ]

    def end_step(self, image: Image, step: Step, *, fails: bool, refuse: bool) -> None:
        image.running.remove(step)
        where, digest = step.claims.where, step.blob.digest
        mounted = False
        if step.mount_from is not None:
            pair = (*where, step.mount_from)
            rule_ = self.mounts[where[0]]
            if rule_ == SOMETIMES and refuse:
                self.refused_pairs.add(pair)
            mounted = rule_ != NEVER and pair not in self.refused_pairs
            if mounted:
                self.knowledge.record_mount(where[0])
            else:
                self.knowledge.record_refused_mount(
                    where, step.mount_from, is_source_confirmed=True
                )
        if fails and not mounted:
            image.broken = True
            self.failures += 1
        else:
            if not mounted:
                self.uploads[where[0], digest] += 1
            self.blobs.add((where, digest))
            for ready in self.claims.blob_arrived(image.work, digest):
                self._make_ready(ready)
        if step.mount_from is not None:
            self._queue(self.claims.mount_ended(where[0], mounted=mounted))
        self._settle(image)

    def end_put(self, image: Image, *, fails: bool) -> None:
        """Put one more child, or the root after the last one."""
        assert image.finishing is not None
        where = image.work.where
        if fails:
            image.broken = True
            self.failures += 1
        elif image.finishing:
            child = image.finishing.pop()
            self._must_hold(where, CHILDREN[child], ())
            self._put(where, child, CHILDREN[child])
            for ready in self.claims.manifest_arrived(image.work, child):
                self._make_ready(ready)
        else:
            named = tuple(image.work.blobs)
            self._must_hold(where, named, image.work.manifests)
            self._put(where, image.root, named)
            self._queue(self.claims.image_committed(image.work))
            image.ended = "synced"
            del self.images[image.work]
        self._settle(image)

    def _must_hold(
        self, where: RepositoryKey, blobs: tuple[str, ...], children: tuple[str, ...]
    ) -> None:
        assert all((where, each) in self.blobs for each in blobs), "I1: a blob is missing"
        assert all((where, each) in self.manifests for each in children), "I1: a child is missing"

    def _settle(self, image: Image) -> None:
        if not image.broken or image.running or image.ended:
            return
        owned = {key: place.waiters[:] for key, place in image.work.owned.items()}
        image.ended = "failed"
        steps, ready = self.claims.withdraw(image.work)
        del self.images[image.work]
        for key, waiters in owned.items():
            living = [each for each in waiters if not each.is_withdrawn]
            if living:
                heir = min(living, key=lambda each: each.order)
                assert key in heir.owned, "the earliest promoted waiter owns"
        self._queue(steps)
        for each in ready:
            self._make_ready(each)

    # --- what has to hold ----------------------------------------------------------------------

    def check(self) -> None:
        for key, place in self.claims._claims.items():
            assert place.owner.owned[key] is place
            assert not place.owner.is_withdrawn, "nobody waits for a failed image"
            orders = [place.owner.order, *(each.order for each in place.waiters)]
            assert orders == sorted(set(orders)), (
                "rule 9: owners before those who wait, earliest first"
            )
        for (host, digest), leader in self.claims._leaders.items():
            assert not leader.image.is_withdrawn
            assert len(set(leader.followers)) == len(leader.followers), "nobody waits twice"
            for place in leader.followers:
                assert self.claims._claims[place.key] is place, "who waits has a claim"
                assert (place.host, place.key.digest) == (host, digest)
                assert leader.image.order < place.owner.order, "rule 9: leaders before followers"
        for each in self.images.values():
            waits = sum(each.work in place.waiters for place in self.claims._claims.values())
            owns = sum(not is_manifest for _, _, is_manifest in each.work.owned)
            assert each.work.missing == waits + owns, "what is missing is owned or waited for"
        if not self.startable() and not self.busy():
            assert not self.images, "nothing runs and an image waits: it would wait for ever"

    def run_out(self, chance: random.Random) -> None:
        """Let everything end without further failures."""
        while (startable := self.startable()) or self.busy():
            if startable:
                self.start(chance.choice(startable))
            else:
                image = chance.choice(self.busy())
                if image.running:
                    self.end_step(
                        image, image.running[0], fails=False, refuse=chance.random() < 0.5
                    )
                else:
                    self.end_put(image, fails=False)
            self.check()
        assert all(image.ended for image in self.all)
        assert not self.claims._claims
        assert not self.claims._leaders
        if not self.failures:
            for (host, digest), times in self.uploads.items():
                assert self.mounts[host] != ALWAYS or times == 1, (
                    f"{digest} was uploaded {times} times"
                )


class ClaimsMachine(RuleBasedStateMachine):
    """Any order of promotions, starts, ends, refusals and failures."""

    @initialize(
        mounts=st.fixed_dictionaries(
            {host: st.sampled_from((ALWAYS, NEVER, SOMETIMES)) for host in HOSTS}
        ),
        at_source=st.sampled_from(((), BLOBS[0:1], BLOBS[2:5])),
        failing=st.booleans(),
    )
    def begin(self, mounts: dict[str, str], at_source: tuple[str, ...], failing: bool) -> None:
        self.world = World(mounts, at_source)
        self.failing = failing

    @rule(
        host=st.sampled_from(HOSTS),
        repository=st.sampled_from(REPOSITORIES),
        layers=st.lists(st.sampled_from(BLOBS), max_size=4, unique=True).map(tuple),
        children=st.lists(st.sampled_from(tuple(CHILDREN)), max_size=2, unique=True).map(tuple),
    )
    def promote(
        self, host: str, repository: str, layers: tuple[str, ...], children: tuple[str, ...]
    ) -> None:
        if len(self.world.all) < 12:
            self.world.promote(RepositoryKey(host, repository), layers, children)

    @precondition(lambda self: self.world.startable())
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        startable = self.world.startable()
        self.world.start(startable[data.draw(st.integers(0, len(startable) - 1))])

    @precondition(lambda self: self.world.busy())
    @rule(data=st.data(), fails=st.booleans(), refuse=st.booleans())
    def end(self, data: st.DataObject, fails: bool, refuse: bool) -> None:
        busy = self.world.busy()
        image = busy[data.draw(st.integers(0, len(busy) - 1))]
        if image.running:
            step = image.running[data.draw(st.integers(0, len(image.running) - 1))]
            self.world.end_step(image, step, fails=fails and self.failing, refuse=refuse)
        else:
            self.world.end_put(image, fails=fails and self.failing)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_out(random.Random(7))


TestClaimsInAnyOrder = ClaimsMachine.TestCase
TestClaimsInAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)


def simulate(seed: int, images: int = 30) -> World:
    """Run a crowded world from one seed, with more images than hypothesis would make."""
    chance = random.Random(seed)
    failing = chance.choice((0.0, 0.1, 0.4))
    rules = {host: chance.choice((ALWAYS, ALWAYS, NEVER, SOMETIMES)) for host in HOSTS}
    world = World(rules, chance.choice(((), BLOBS[0:3])))
    left = images
    while left or world.startable() or world.busy():
        what = chance.random()
        if left and what < 0.3:
            left -= 1
            world.promote(
                RepositoryKey(chance.choice(HOSTS), chance.choice(REPOSITORIES)),
                tuple(chance.sample(BLOBS, chance.randint(0, 4))),
                tuple(chance.sample(tuple(CHILDREN), chance.randint(0, 2))),
            )
        elif world.startable() and what < 0.6:
            world.start(chance.choice(world.startable()))
        elif busy := world.busy():
            image = chance.choice(busy)
            fails, refuse = chance.random() < failing, chance.random() < 0.5
            if image.running:
                world.end_step(image, chance.choice(image.running), fails=fails, refuse=refuse)
            else:
                world.end_put(image, fails=fails)
        world.check()
    world.run_out(chance)
    return world


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_every_image_of_a_crowd_ends_and_no_blob_is_brought_twice(first):
    """I1 and I4."""
    for seed in range(first, first + 10):
        simulate(seed)


def test_the_same_events_give_the_same_steps():
    """I10."""
    assert [simulate(seed).trace for seed in (3, 4)] == [simulate(seed).trace for seed in (3, 4)]


# --- single paths, each by name -------------------------------------------------------------------

A, B, C = (RepositoryKey(HOSTS[0], name) for name in REPOSITORIES[:3])


def claims_of(*works: ImageClaims) -> tuple[Claims, list[list[Step]]]:
    claims = Claims(Knowledge())
    return claims, [claims.promote(each) for each in works]


def finish(claims: Claims, done: ImageClaims) -> list[Step]:
    """Everything that `done` owns arrives, then its manifest."""
    for _, digest, is_manifest in list(done.owned):
        if is_manifest:
            claims.manifest_arrived(done, digest)
        else:
            claims.blob_arrived(done, digest)
    claims.knowledge.confirm_manifest(
        done.where, f"sha256:{'f':0<32}{done.order:032x}", list(done.blobs)
    )
    return claims.image_committed(done)


def shown(steps: list[Step]) -> list[tuple[RepositoryKey, str, str | None]]:
    return [(step.claims.where, step.blob.digest, step.mount_from) for step in steps]


def test_a_follower_mounts_after_the_leaders_manifest_and_not_before():
    leader, follower = work(A, BLOBS[0]), work(B, BLOBS[0])
    claims, (first, second) = claims_of(leader, follower)
    assert shown(first) == [(A, BLOBS[0], None)]
    assert second == []
    assert claims.blob_arrived(leader, BLOBS[0]) == [leader]
    assert not follower.is_ready()
    assert shown(finish(claims, leader)) == [(B, BLOBS[0], A[1])]


def test_a_follower_mounts_from_whichever_repository_commits_first():
    """A small image that shares a layer need not let others wait for the leader's large ones."""
    leader, small, follower = work(A, BLOBS[0], BLOBS[1]), work(A, BLOBS[0]), work(B, BLOBS[0])
    claims, _ = claims_of(leader, small, follower)
    assert claims.blob_arrived(leader, BLOBS[0]) == [small]
    assert shown(finish(claims, small)) == [(B, BLOBS[0], A[1])]
    assert finish(claims, leader) == []


def test_an_heir_uses_its_own_description_of_the_blob():
    """One image that lies about a size must not take the others with it."""
    liar, honest = (
        ImageClaims(A, {BLOBS[0]: blob(BLOBS[0], 99)}),
        ImageClaims(A, {BLOBS[0]: blob(BLOBS[0], 10)}),
    )
    claims, _ = claims_of(liar, honest)
    steps, ready = claims.withdraw(liar)
    assert [(step.claims, step.blob.size) for step in steps] == [(honest, 10)]
    assert ready == []


def test_one_digest_wanted_as_blob_and_as_child_is_two_places():
    both, waiting = work(A, BLOBS[0], children=(BLOBS[0],)), work(A, children=(BLOBS[0],))
    claims, (steps, _) = claims_of(both, waiting)
    assert len(steps) == 1
    assert claims.blob_arrived(both, BLOBS[0]) == [both]
    assert both.own_manifests == {BLOBS[0]}
    assert claims.manifest_arrived(both, BLOBS[0]) == [waiting]
    assert both.own_manifests == frozenset()


def test_an_heir_that_fails_too_passes_on_what_it_inherited():
    first, second, third = (work(A, BLOBS[0]) for _ in range(3))
    claims, _ = claims_of(first, second, third)
    assert shown(claims.withdraw(first).steps) == [(A, BLOBS[0], None)]
    steps, _ = claims.withdraw(second)
    assert [step.claims for step in steps] == [third]


def test_a_waiter_that_failed_before_inherits_nothing():
    first, second, third = (work(A, BLOBS[0]) for _ in range(3))
    claims, _ = claims_of(first, second, third)
    assert claims.withdraw(second) == ([], [])
    steps, _ = claims.withdraw(first)
    assert [step.claims for step in steps] == [third]


def test_a_failed_follower_without_waiters_is_forgotten_by_its_leader():
    leader, follower = work(A, BLOBS[0]), work(B, BLOBS[0])
    claims, _ = claims_of(leader, follower)
    assert claims.withdraw(follower) == ([], [])
    assert finish(claims, leader) == []


def test_a_failed_followers_waiter_goes_on_following():
    leader, follower, waiter = work(A, BLOBS[0]), work(B, BLOBS[0]), work(B, BLOBS[0])
    claims, _ = claims_of(leader, follower, waiter)
    assert claims.withdraw(follower) == ([], [])
    steps = finish(claims, leader)
    assert [(step.claims, step.mount_from) for step in steps] == [(waiter, A[1])]


def test_a_failed_leaders_earliest_follower_leads_and_the_others_follow_it():
    leader, second, third = work(A, BLOBS[0]), work(B, BLOBS[0]), work(C, BLOBS[0])
    claims, _ = claims_of(leader, second, third)
    assert shown(claims.withdraw(leader).steps) == [(B, BLOBS[0], None)]
    assert shown(finish(claims, second)) == [(C, BLOBS[0], B[1])]


def test_an_heir_uploads_rather_than_wait_for_a_younger_image():
    """Two images that wait for each other would wait for ever (rule 9)."""
    claims = Claims(Knowledge())
    claims.knowledge.confirm_manifest(A, ROOT, [BLOBS[0]])
    claims.knowledge.record_mount(A[0])
    claims.knowledge.record_refused_mount(C, A[1], is_source_confirmed=True)
    mounting, heir, younger = work(B, BLOBS[0]), work(B, BLOBS[0]), work(C, BLOBS[0])
    assert shown(claims.promote(mounting)) == [(B, BLOBS[0], A[1])]
    assert claims.promote(heir) == []
    assert shown(claims.promote(younger)) == [(C, BLOBS[0], None)]
    claims.knowledge.record_refused_mount(B, A[1], is_source_confirmed=True)
    steps, _ = claims.withdraw(mounting)
    assert shown(steps) == [(B, BLOBS[0], None)]


def test_a_failed_leaders_waiter_in_its_repository_leads_when_it_was_promoted_first():
    leader, waiter, follower = work(A, BLOBS[0]), work(A, BLOBS[0]), work(B, BLOBS[0])
    claims, _ = claims_of(leader, waiter, follower)
    steps, _ = claims.withdraw(leader)
    assert [step.claims for step in steps] == [waiter]
    assert shown(finish(claims, waiter)) == [(B, BLOBS[0], A[1])]


def test_an_image_that_inherits_its_last_missing_child_is_ready():
    child = next(iter(CHILDREN))
    owner, heir = work(A, children=(child,)), work(A, children=(child,))
    claims, _ = claims_of(owner, heir)
    assert not heir.is_ready()
    assert claims.withdraw(owner) == ([], [heir])
    assert heir.own_manifests == {child}


def test_nobody_waits_at_a_host_that_refused_its_only_mount():
    claims, _ = claims_of(leader := work(A, BLOBS[0]), work(B, BLOBS[0]), work(C, BLOBS[0]))
    claims.knowledge.record_refused_mount(B, "x/other", is_source_confirmed=True)
    assert [step.claims.where for step in claims.mount_ended(A[0], mounted=False)] == [B, C]
    assert finish(claims, leader) == []
    assert shown(claims.promote(work(D, BLOBS[0]))) == [(D, BLOBS[0], None)]


D = RepositoryKey(HOSTS[0], REPOSITORIES[3])


def test_only_the_refused_pair_stops_waiting_at_a_host_that_mounts():
    claims, _ = claims_of(leader := work(A, BLOBS[0]), work(B, BLOBS[0]), work(C, BLOBS[0]))
    claims.knowledge.record_mount(A[0])
    claims.knowledge.record_refused_mount(B, A[1], is_source_confirmed=True)
    assert shown(claims.mount_ended(A[0], mounted=False)) == [(B, BLOBS[0], None)]
    assert shown(finish(claims, leader)) == [(C, BLOBS[0], A[1])]


def test_a_blob_is_covered_while_it_is_led_and_once_it_is_committed():
    claims, _ = claims_of(leader := work(A, BLOBS[0], BLOBS[1]), other := work(B, BLOBS[2]))
    covered = [digest for digest in BLOBS if claims.is_covered(A[0], digest)]
    finish(claims, leader)
    claims.withdraw(other)
    assert covered == list(BLOBS[:3])
    assert [digest for digest in BLOBS if claims.is_covered(A[0], digest)] == list(BLOBS[:2])
    assert not claims.is_covered(HOSTS[1], BLOBS[0])


# --- knowledge ------------------------------------------------------------------------------------


def test_a_blob_in_an_uncommitted_repository_is_not_a_mount_source():
    knowledge = Knowledge()
    knowledge.confirm_blob(A, BLOBS[0])
    assert knowledge.is_blob_believed(A, BLOBS[0])
    assert knowledge.mount_source(B, BLOBS[0]) is None
    knowledge.confirm_manifest(A, ROOT, [BLOBS[0]])
    assert knowledge.mount_source(B, BLOBS[0]) == A[1]
    assert knowledge.mount_source(A, BLOBS[0]) is None
    assert knowledge.mount_source(RepositoryKey(HOSTS[1], B[1]), BLOBS[0]) is None


def test_a_refused_pair_leaves_the_next_repository_to_mount_from():
    knowledge = Knowledge()
    knowledge.confirm_manifest(A, ROOT, [BLOBS[0]])
    knowledge.confirm_manifest(C, ROOT, [BLOBS[0]])
    knowledge.record_mount(A[0])
    knowledge.record_refused_mount(B, A[1], is_source_confirmed=True)
    assert knowledge.mount_source(B, BLOBS[0]) == C[1]


def test_a_host_mounts_nothing_after_three_refusals_that_rested_on_an_earlier_run():
    """The repository may have lost the blob since that run; three have hardly lost theirs."""
    knowledge = Knowledge()
    for number in (1, 2):
        knowledge.record_refused_mount(B, f"x/lost{number}", is_source_confirmed=False)
        assert knowledge.supports_mounts(B.host) is None
    knowledge.record_refused_mount(B, "x/lost3", is_source_confirmed=False)
    assert knowledge.supports_mounts(B.host) is False


def test_doubtful_refusals_of_one_host_say_nothing_of_another():
    knowledge = Knowledge()
    other = RepositoryKey(HOSTS[1], A.name)
    for number in range(2):
        knowledge.record_refused_mount(A, f"x/lost{number}", is_source_confirmed=False)
    knowledge.record_refused_mount(other, "x/lost", is_source_confirmed=False)
    assert knowledge.supports_mounts(HOSTS[0]) is None
    assert knowledge.supports_mounts(HOSTS[1]) is None


def test_a_mount_that_holds_outweighs_a_refusal_that_came_first():
    """Two first mounts are in flight together; the one that is refused may be answered first."""
    knowledge = Knowledge()
    knowledge.confirm_manifest(A, ROOT, [BLOBS[0]])
    knowledge.record_refused_mount(B, A[1], is_source_confirmed=True)
    assert knowledge.mount_source(C, BLOBS[0]) is None
    knowledge.record_mount(A[0])
    assert knowledge.mount_source(C, BLOBS[0]) == A[1]
    assert knowledge.mount_source(B, BLOBS[0]) is None


@pytest.mark.parametrize(
    ("populated", "learnt", "expected"),
    [
        pytest.param(False, {}, False, id="no manifests there: the POST costs nothing"),
        pytest.param(True, {}, True, id="nothing learnt"),
        pytest.param(True, {"is_202_if_absent": True}, True, id="only a 202 seen"),
        pytest.param(True, {"is_201_if_present": True}, False, id="a 201 seen"),
        pytest.param(
            True, {"is_202_if_absent": True, "is_201_if_present": True}, False, id="both seen"
        ),
        pytest.param(
            True,
            {"is_202_if_absent": True, "is_201_if_present": False},
            True,
            id="202 for a present one",
        ),
        pytest.param(
            True,
            {"is_202_if_absent": False, "is_201_if_present": True},
            True,
            id="201 for an absent one",
        ),
        pytest.param(
            False, {"is_202_if_absent": False}, True, id="201 for an absent one, no manifests"
        ),
    ],
)
def test_an_unknown_blob_is_asked_for_by_rule_11(populated, learnt, expected):
    knowledge = Knowledge()
    if populated:
        knowledge.record_populated(A)
    knowledge.record_probe_answer(RepositoryKey(A[0], "a/sibling"), **learnt)
    assert knowledge.needs_head(A, BLOBS[0]) is expected


def test_a_blob_that_was_forgotten_is_asked_for_by_head():
    """Its registry may have said 201 to it, and refused the manifest that names it."""
    knowledge = Knowledge()
    knowledge.record_probe_answer(A, is_202_if_absent=True, is_201_if_present=True)
    knowledge.record_probed_blob(A, BLOBS[0])
    assert knowledge.is_blob_believed(A, BLOBS[0])
    assert not knowledge.is_confirmed(A, BLOBS[0])
    knowledge.forget(A, BLOBS[0])
    assert not knowledge.is_blob_believed(A, BLOBS[0])
    assert knowledge.needs_head(A, BLOBS[0])
    assert not knowledge.needs_head(A, BLOBS[1])


def test_what_a_probe_taught_holds_for_one_first_segment_of_one_host():
    knowledge = Knowledge()
    knowledge.record_probe_answer(A, is_202_if_absent=True, is_201_if_present=True)
    assert knowledge.probe_answers(RepositoryKey(A[0], "a"))[1]
    assert not knowledge.probe_answers(B)[1]
    assert not knowledge.probe_answers(RepositoryKey(HOSTS[1], A[1]))[1]


def test_our_own_commits_do_not_make_an_empty_repository_a_populated_one():
    """Else every further tag of a first sync would pay a HEAD for each of its new blobs."""
    knowledge = Knowledge()
    knowledge.confirm_manifest(A, ROOT, [BLOBS[0]])
    assert not knowledge.needs_head(A, BLOBS[1])


def test_the_first_mount_on_a_host_is_of_the_smallest_blob_and_the_others_wait_for_it():
    sizes = {BLOBS[0]: 900, BLOBS[1]: 20, BLOBS[2]: 300}
    lead = ImageClaims(A, {digest: blob(digest, size) for digest, size in sizes.items()})
    follower = ImageClaims(B, {digest: blob(digest, size) for digest, size in sizes.items()})
    claims, _ = claims_of(lead, follower)
    assert shown(finish(claims, lead)) == [(B, BLOBS[1], A[1])]
    # A mount that broke off says nothing of the host: the next one is the first then.
    assert shown(claims.mount_ended(A[0], mounted=False)) == [(B, BLOBS[2], A[1])]
    claims.knowledge.record_mount(A[0])
    assert shown(claims.mount_ended(A[0], mounted=False)) == [(B, BLOBS[0], A[1])]


def test_who_waits_for_the_first_mount_uploads_where_it_was_refused():
    lead, follower = work(A, *BLOBS[:3]), work(B, *BLOBS[:3])
    claims, _ = claims_of(lead, follower)
    assert len(finish(claims, lead)) == 1
    claims.knowledge.record_refused_mount(B, A[1], is_source_confirmed=True)
    assert shown(claims.mount_ended(A[0], mounted=False)) == [
        (B, BLOBS[1], None),
        (B, BLOBS[2], None),
    ]


def test_an_image_that_fails_with_the_first_mount_hands_it_on():
    lead, one, two = work(A, BLOBS[0]), work(B, BLOBS[0]), work(C, BLOBS[0])
    claims, _ = claims_of(lead, one, two)
    assert shown(finish(claims, lead)) == [(B, BLOBS[0], A[1])]
    steps, _ = claims.withdraw(one)
    assert shown(steps) == [(C, BLOBS[0], A[1])]


def test_a_blob_that_another_image_brings_counts_as_present_for_those_who_waited():
    owner, waiter = work(A, BLOBS[0]), work(A, BLOBS[0], BLOBS[1])
    claims, _ = claims_of(owner, waiter)
    assert waiter.present == []
    claims.blob_arrived(owner, BLOBS[0])
    assert (owner.present, waiter.present) == ([], [blob(BLOBS[0])])


def test_a_follower_uploads_when_its_leader_takes_too_long():
    clock = [100.0]
    claims = Claims(Knowledge(), lambda: clock[0])
    lead, follower = work(A, BLOBS[0]), work(B, BLOBS[0])
    claims.promote(lead)
    assert claims.promote(follower) == []
    clock[0] = 699.0
    assert claims.stop_waiting_after(600.0) == []
    clock[0] = 700.0
    assert shown(claims.stop_waiting_after(600.0)) == [(B, BLOBS[0], None)]
    assert claims.stop_waiting_after(600.0) == []
    assert shown(finish(claims, lead)) == []


def test_an_image_that_fails_with_the_first_mount_leaves_nothing_behind():
    lead, one, two = work(A, *BLOBS[:3]), work(B, *BLOBS[:3]), work(B, BLOBS[1])
    claims, _ = claims_of(lead, one, two)
    assert shown(finish(claims, lead)) == [(B, BLOBS[0], A[1])]
    steps, _ = claims.withdraw(one)
    assert [(step.claims, step.blob.digest, step.mount_from) for step in steps] == [
        (two, BLOBS[1], A[1])
    ]
