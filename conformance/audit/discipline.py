"""Mistakes that are unnecessary requests: the client knew the answer, or could have known it.

Owns: docs/design.md section 6 as rules about sequences of requests.
May not know: credentials, the grammar of requests.
Invariants: most rules hold in undisturbed runs only (`Run.is_disturbed`). In the others a request may
be repeated once for each failure of it. The client is assumed to know an answer only if the answer
was complete before the next request was sent.
Follows: docs/design.md sections 6 and 7 (I4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from ..messages import digest_of
from .evidence import FALLBACK, Act, RepositoryKey, Run, Session, group_by, parameters
from .rules import rule, single

__all__: list[str] = []

# Digests of blobs whose bytes every client knows: `{}` and the empty blob.
_TRIVIAL = (digest_of(b"{}"), digest_of(b""))


def _area(act: Act) -> tuple[str, str]:
    """Return the host and the first path segment, for which facts hold (rules 11, 15)."""
    return act.place, act.entry.repository.partition("/")[0]


def _is_mount(act: Act) -> bool:
    """Whether the request mounts from another repository.

    With its own repository as source, it is a probing POST, which checks whether the blob is
    present.
    """
    source = act.query.get("from")
    return bool(act.query.get("mount")) and source not in (None, act.entry.repository)


def _request_of(act: Act) -> object:
    """Return a value that is equal for repetitions of a request."""
    return act.place, act.method, act.target


@single("discipline", "the registry is pinged")
def ping(act: Act) -> bool:
    return act.kind == "ping"


# Listings, tags and manifests.


@rule("discipline", "a page of a listing is asked for twice")
def listing_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    yield from run.repeated(group_by(run.select("GET", "tag_list"), _request_of))


@rule("discipline", "a tag is asked for that the listing showed absent")
def absent_tag_asked(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.select("GET HEAD", "manifest"):
        if act.status != 404 or not act.has_final_answer or ":" in act.reference:
            continue

        listings = [
            earlier
            for earlier in run.select("GET", "tag_list")
            if earlier.repository == act.repository
            and earlier.has_final_answer
            and run.had_read(earlier, act)
        ]
        if listings and "next" not in listings[-1].response_headers.get("link", ""):
            yield (*listings, act)


@rule("discipline", "a tag is asked for twice")
def tag_asked_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    tagged = [
        act
        for act in run.select("GET HEAD", "manifest")
        if ":" not in act.reference and not FALLBACK.match(act.reference)
    ]
    for acts in group_by(tagged, _request_of).values():
        settled = [act for act in acts if act.has_final_answer]
        for first, second in pairwise(settled):
            between = [
                act
                for act in run.acts
                if act.repository == first.repository and first.begun < act.begun < second.begun
            ]
            # The second request is justified if the tag was put in between.
            if not any((act.method, act.kind) == ("PUT", "manifest") for act in between):
                yield first, second


@rule("discipline", "a manifest is fetched again whose bytes are known", after_faults=True)
def manifest_fetched_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    # What fails at a target excuses no second reading of the source.
    targets = {act.place for act in run.acts if act.is_write and act.kind != "token"}
    fetched = [act for act in run.select("GET", "manifest") if act.is_success]
    by_content = group_by(fetched, lambda act: (*act.repository, act.said_digest))
    for acts in by_content.values():
        again = [act for act in acts[1:] if ":" in act.reference]
        others = targets - {acts[0].place}
        if again and len(again) > run.excuses(again[0].digest, again[-1], acts[0], others):
            yield acts[0], *again


@rule("discipline", "a manifest is asked for that this run has put")
def own_manifest_asked(run: Run) -> Iterator[tuple[Act, ...]]:
    puts = [act for act in run.select("PUT", "manifest") if act.is_success]
    for act in run.select("GET HEAD", "manifest"):
        earlier = [
            put
            for put in puts
            if put.repository == act.repository
            and put.reference == act.reference
            and run.had_read(put, act)
        ]
        if earlier and not _reads_back(run, earlier[-1], act):
            yield earlier[-1], act


def _reads_back(run: Run, put: Act, act: Act) -> bool:
    """Whether `act` checks if other writers have changed a list of referrers (section 1.10).

    This holds for the first read after the put. It holds for later reads if an earlier read has
    found another list.
    """
    if not FALLBACK.match(act.reference):
        return False
    earlier = [
        look
        for look in run.select(kind="manifest")
        if look.target == act.target
        and look.repository == act.repository
        and not look.is_write
        and put.before(look)
        and look.begun < act.begun
        and look.has_final_answer
    ]
    digests = {look.said_digest for look in (put, *earlier)}
    return not earlier or len(digests) > 1


@rule("discipline", "a manifest is put twice under one name")
def manifest_put_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    puts = [act for act in run.select("PUT", "manifest") if act.is_success]
    puts_by_name = group_by(puts, lambda act: (*act.repository, act.reference, act.said_digest))
    yield from run.repeated(puts_by_name)


@rule("discipline", "a referrer is put before its subject")
def subject_after_referrer(run: Run) -> Iterator[tuple[Act, ...]]:
    for (place, name, digest), act in run.commits.items():
        manifest = run.repository(place, name).manifests.get(digest)
        key = (place, name, (manifest and manifest.subject) or "")
        subject = None if key in run.earlier_commits else run.commits.get(key)
        if subject is not None and not subject.before(act):
            yield act, subject


# Referrers.


@rule("discipline", "the referrers of a digest are asked for twice")
def referrers_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    yield from run.repeated(group_by(run.select("GET", "referrers"), _request_of))


@rule("discipline", "the fallback tag is asked for, or put, where the referrers API has answered")
def fallback_after_api(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.select(kind="manifest"):
        answers = [
            question
            for question in run.select("GET", "referrers")
            if _area(question) == _area(act)
            and run.lists_referrers(question)
            and run.had_read(question, act)
        ]
        # If the API answers 404 for a digest, the tag may still have its referrers
        # (docs/specification.md section 1.1, step 2).
        digest = act.reference.replace("-", ":", 1)
        unknown = [
            question
            for question in run.acts_by_digest[digest]
            if question.kind == "referrers" and question.status == 404
        ]
        if FALLBACK.match(act.reference) and answers and not unknown:
            yield answers[0], act


@rule("discipline", "the referrers API is asked again where it is known to be missing")
def absent_api_asked(run: Run) -> Iterator[tuple[Act, ...]]:
    missing: dict[object, Act] = {}
    for act in run.select("GET", "referrers"):
        first = missing.get(_area(act))
        if first is not None and run.had_read(first, act):
            yield first, act
        if run.lacks_referrers(act):
            missing.setdefault(_area(act), act)


# Blobs.


@rule(
    "discipline", "a blob is pulled again for what one reading of it could serve", after_faults=True
)
def blob_pulled_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    pulls = [
        act for act in run.select("GET", "blob") if act.is_success and "range" not in act.headers
    ]
    for acts in group_by(pulls, lambda act: (*act.repository, act.digest)).values():
        digest = acts[0].digest
        # One reading can serve all registries. A registry that does not support mounts gets the
        # blob once for each repository.
        targets = {
            act.repository
            for act in run.acts_by_digest[digest]
            if act.is_write and act.query.get("digest")
        }
        targets_by_place = Counter(target.place for target in targets)
        readings = max(targets_by_place.values(), default=1)
        if len(acts) > readings + run.excuses(digest, acts[-1], acts[0]):
            yield tuple(acts)


@single("discipline", "a blob is fetched whose bytes are known to everybody")
def trivial_blob_fetched(act: Act) -> bool:
    return (act.method, act.kind) == ("GET", "blob") and act.reference in _TRIVIAL


@rule("discipline", "a blob is uploaded twice to one repository", after_faults=True)
def blob_uploaded_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    sent = (act for act in run.acts if act.kind in ("upload", "upload_start") and act.digest)
    ended = [act for act in sent if act.status in (201, 204) and not _is_probing_post(act)]
    yield from run.repeated(group_by(ended, lambda act: (*act.repository, act.digest)))


def _is_probing_post(act: Act) -> bool:
    """Whether an upload start is a probing POST for a blob of its own repository (rule 11)."""
    names_blob = act.kind == "upload_start" and bool(act.query.get("mount"))
    return names_blob and not _is_mount(act)


@rule("discipline", "a blob is asked for of which this run knows whether it is there")
def known_blob_asked(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.select("HEAD", "blob"):
        answers = [
            earlier
            for earlier in run.acts_by_digest[act.digest]
            if earlier.repository == act.repository
            and run.had_read(earlier, act)
            and (earlier.has_final_answer if earlier.method == "HEAD" else earlier.is_success)
            and earlier.kind in ("blob", "upload", "upload_start")
            and earlier.method != "PATCH"
            # A mount that was refused says nothing of whether the blob is in this repository.
            and not (_is_mount(earlier) and earlier.status == 202)
        ]
        if answers and not _verifies_probe(run, answers[-1], act):
            yield answers[-1], act


def _verifies_probe(run: Run, answer: Act, act: Act) -> bool:
    """Whether `act` verifies the first 201 of a registry to a probing POST (rule 11)."""
    if not _is_probing_post(answer) or answer.status != 201:
        return False
    return not any(
        _area(look) == _area(act) and look.status == 200 and look.before(answer)
        for look in run.select("HEAD", "blob")
    )


@rule("discipline", "a source's blob is opened before a target has accepted an upload")
def blob_before_session(run: Run) -> Iterator[tuple[Act, ...]]:
    starts = [act for act in run.select("POST", "upload_start") if act.is_success]
    starts.sort(key=lambda act: act.entry.ended or 0)
    # The upload start that was accepted first in each repository. Because the list is reversed, the
    # first start replaces later ones.
    first = {act.repository: act for act in reversed(starts)}
    for act in run.select("GET", "blob"):
        about = run.acts_by_digest[act.digest]
        with_its_bytes = [
            other for other in about if other.kind == "upload_start" and "digest" in other.query
        ]
        if with_its_bytes:
            continue  # sent in the POST: an earlier run had found that uploads are accepted
        targets = {other.repository for other in about if other.is_write}
        accepted = [first[target] for target in targets if target in first] or starts[:1]
        is_open = any(start.before(act) for start in accepted)
        if accepted and not run.is_redirected(act) and not is_open:
            yield act, accepted[0]


# Upload sessions and mounts.


def _sessions_by_blob(run: Run) -> Iterator[list[Session]]:
    """Yield the sessions in groups with one repository and one digest.

    The first session of an area that a probing POST for a present blob has opened is in a group of
    its own: rule 11 allows one such session.
    """
    with_digest = [session for session in run.sessions if session.digest]
    groups: dict[object, list[Session]] = {}
    probed_areas = set[tuple[str, str]]()
    for session in with_digest:
        is_first_of_area = _area(session.opener) not in probed_areas
        is_probe = is_first_of_area and _has_probed_present_blob(run, session)
        if is_probe:
            probed_areas.add(_area(session.opener))
        key = (*session.opener.repository, session.digest, is_probe)
        groups.setdefault(key, []).append(session)
    return iter(groups.values())


def _has_probed_present_blob(run: Run, session: Session) -> bool:
    """Whether a probing POST for a present blob has opened a session (rule 11).

    The session must not have been used for that blob.
    """
    opener = session.opener
    arrival = run.arrivals.get((*opener.repository, opener.digest or ""))
    is_used = any(act.query.get("digest") for act in session.acts)
    return (
        _is_probing_post(opener) and not is_used and arrival is not None and arrival.before(opener)
    )


@rule(
    "discipline",
    "a second upload session is opened for a blob that has one: the 202 of a refused mount",
)
def second_session(run: Run) -> Iterator[tuple[Act, ...]]:
    for sessions in _sessions_by_blob(run):
        if len(sessions) > 1:
            yield tuple(session.opener for session in sessions)


@rule("discipline", "an upload session is opened and never used")
def session_unused(run: Run) -> Iterator[tuple[Act, ...]]:
    single = [sessions[0] for sessions in _sessions_by_blob(run) if len(sessions) == 1]
    nameless = [session for session in run.sessions if not session.digest]
    unused = [session.opener for session in (*single, *nameless) if not session.acts]
    if unused:
        yield tuple(unused)


@rule(
    "discipline", "a blob is mounted from a repository without a committed manifest that names it"
)
def mount_uncommitted(run: Run) -> Iterator[tuple[Act, ...]]:
    for act in run.select("POST", "upload_start"):
        source = RepositoryKey(act.place, act.query.get("from", ""))
        if _is_mount(act) and not run.committed(source, act.query["mount"], act):
            yield (act,)


@rule("discipline", "a mount is tried again between repositories where it was refused")
def mount_refused_again(run: Run) -> Iterator[tuple[Act, ...]]:
    refused: dict[object, Act] = {}
    for act in run.select("POST", "upload_start"):
        if not _is_mount(act):
            continue
        pair = (*act.repository, act.query["from"])
        if pair in refused and run.had_read(refused[pair], act):
            yield refused[pair], act
        if act.status == 202 and not act.is_disturbed:
            refused.setdefault(pair, act)


@rule("discipline", "a blob is uploaded that another repository of the registry has from this run")
def upload_without_mount(run: Run) -> Iterator[tuple[Act, ...]]:
    mounts = [act for act in run.select("POST", "upload_start") if _is_mount(act)]
    refusing = {act.place for act in mounts if act.status != 201}
    for session in run.sessions:
        act = session.opener
        digest = session.digest
        if digest is None or act.place in refusing or _is_mount(act) or not session.acts:
            continue

        commits = [
            run.commits.get((act.place, name, manifest))
            for name, repository in run.repositories(act.place).items()
            if name != act.entry.repository
            for manifest in repository.naming(digest)
        ]
        earlier = [commit for commit in commits if commit and run.had_read(commit, act)]
        if earlier:
            yield earlier[0], act


# Logins.


@rule("discipline", "a token is asked for that is held")
def token_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    tokens = [act for act in run.select(kind="token") if act.is_success]
    for acts in group_by(
        tokens,
        lambda act: (
            act.place,
            act.authorization,
            *sorted(" ".join(parameters(act, "scope")).split()),
        ),
    ).values():
        for first, second in pairwise(acts):
            if not parameters(first, "scope"):
                continue  # the scopes of a form are in its body, which the journal does not keep
            refusals = [
                act
                for act in run.acts
                if act.status in (401, 403)
                and act.authorization.scheme == "bearer"
                and first.begun < (act.entry.ended or 0) < second.begun
            ]
            if not refusals:
                yield first, second


@rule("discipline", "a registry whose challenge is known is asked again without a login")
def challenge_twice(run: Run) -> Iterator[tuple[Act, ...]]:
    givers = (challenge.giver for challenge in run.challenges)
    for acts in group_by(givers, lambda act: act.origin).values():
        bare = [act for act in acts if not act.authorization.scheme and not run.is_redirected(act)]
        for act in bare[1:]:
            # Excuse a request that was about to be sent when the first request was refused. Its
            # connection has carried no login yet.
            late = [
                other
                for other in run.acts
                if other.origin == act.origin
                and other.authorization.scheme
                and (other.place, other.entry.connection) == (act.place, act.entry.connection)
                and other.before(act)
            ]
            if late and run.had_read(bare[0], act):
                yield bare[0], act


@rule("discipline", "a login that was refused is tried again")
def refused_login_again(run: Run) -> Iterator[tuple[Act, ...]]:
    refused: dict[object, Act] = {}
    for act in run.acts:
        scheme, value = act.authorization
        if scheme != "basic":
            continue
        key = (act.origin, act.method if act.kind == "token" else "", value)
        if key in refused and run.had_read(refused[key], act):
            yield refused[key], act
        if act.status == 401:
            refused.setdefault(key, act)
