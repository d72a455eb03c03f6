"""The harness's caps: exactly so many pass in any stretch of their length, and one more does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.images import Seed
from conformance.messages import Request, Response, digest_of
from conformance.rates import ACTIONS, READS, WRITES, Cap, Metered, Rates, actions_of
from conformance.registry import App

DIGEST = digest_of(b"")
SESSION = "/v2/app/blobs/uploads/00000000?_state=1"
BODY = [("Content-Length", "5")]
NONE = [("Content-Length", "0")]


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def asked(
    method: str = "HEAD", path: str = "/v2/app/manifests/v1", headers: object = ()
) -> Request:
    return Request(method, path, headers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "headers", "actions"),
    [
        ("GET", "/v2/", (), ()),
        ("GET", "/v2/app/tags/list?n=5", (), ("tag_list",)),
        ("HEAD", "/v2/app/manifests/v1", (), ("manifest_head",)),
        ("GET", "/v2/app/manifests/v1", (), ("manifest_get",)),
        ("GET", f"/v2/app/referrers/{DIGEST}", (), ("manifest_get",)),
        ("PUT", "/v2/app/manifests/v1", BODY, ("manifest_put",)),
        ("HEAD", f"/v2/app/blobs/{DIGEST}", (), ("blob_head",)),
        ("GET", f"/v2/app/blobs/{DIGEST}", (), ("blob_get",)),
        ("POST", "/v2/app/blobs/uploads/", NONE, ("upload_start",)),
        ("POST", f"/v2/app/blobs/uploads/?mount={DIGEST}&from=b", NONE, ("upload_start",)),
        (
            "POST",
            f"/v2/app/blobs/uploads/?digest={DIGEST}",
            BODY,
            ("upload_start", "upload_body", "upload_finish"),
        ),
        ("PATCH", SESSION, BODY, ("upload_body",)),
        ("PUT", f"{SESSION}&digest={DIGEST}", NONE, ("upload_finish",)),
        ("PUT", f"{SESSION}&digest={DIGEST}", BODY, ("upload_body", "upload_finish")),
        (
            "PUT",
            f"{SESSION}&digest={DIGEST}",
            [("Transfer-Encoding", "chunked")],
            ("upload_body", "upload_finish"),
        ),
        ("GET", SESSION, (), ()),
        ("DELETE", SESSION, (), ()),
    ],
)
def test_each_request_counts_as_what_it_does(
    method: str, path: str, headers: object, actions: tuple[str, ...]
) -> None:
    assert actions_of(asked(method, path, headers)) == actions
    assert set(actions) <= ACTIONS
    assert not READS & WRITES


def test_exactly_the_cap_passes_in_any_second_and_one_more_does_not(clock: Clock) -> None:
    rates = Rates(Cap(5), now=clock)
    assert [rates.refuse(asked()) for _ in range(5)] == [None] * 5
    refused = rates.refuse(asked())
    assert isinstance(refused, Response)
    assert (refused.status, refused.codes) == (429, ["TOOMANYREQUESTS"])
    clock.now += 0.999
    assert rates.refuse(asked()) is not None, "a second that began anywhere is a second"
    clock.now = 101.0
    assert [rates.refuse(asked()) for _ in range(5)] == [None] * 5, "refusals counted for nothing"
    assert rates.refuse(asked()) is not None
    assert rates.refused == {"manifest_head": 3}


def test_the_second_slides_it_does_not_begin_anew(clock: Clock) -> None:
    """Five at the end of one second of the calendar and five at the begin of the next are ten in
    one.
    """
    rates = Rates(Cap(5), now=clock)
    clock.now = 100.9
    assert [rates.refuse(asked()) for _ in range(5)] == [None] * 5
    clock.now = 101.0
    assert rates.refuse(asked()) is not None
    clock.now = 101.9
    assert rates.refuse(asked()) is None


@given(
    st.lists(st.floats(0, 0.7), max_size=60), st.integers(1, 6), st.sampled_from([0.5, 1.0, 3.0])
)
def test_never_more_than_the_cap_and_never_fewer_than_fit(
    gaps: list[float], most: int, seconds: float
) -> None:
    clock = Clock()
    rates = Rates(Cap(most, seconds), now=clock)
    admitted: list[float] = []
    for gap in gaps:
        clock.now += gap
        within = [at for at in admitted if at > clock.now - seconds]
        assert (rates.refuse(asked()) is None) == (len(within) < most)
        if len(within) < most:
            admitted.append(clock.now)
    for at in admitted:
        assert sum(at - seconds < other <= at for other in admitted) <= most


def test_a_cap_counts_a_request_of_two_actions_once(clock: Clock) -> None:
    put = asked("PUT", f"{SESSION}&digest={DIGEST}", BODY)
    together = Rates(Cap(2, actions=WRITES), now=clock)
    assert together.refuse(put) is None, "one request, though it is two actions"
    assert together.refuse(asked("POST", "/v2/app/blobs/uploads/", NONE)) is None
    assert together.refuse(put) is not None
    assert together.refuse(asked()) is None, "reads are not writes"
    caps = [Cap(1, actions=frozenset({action})) for action in sorted(WRITES)]
    apart = Rates(*caps, now=clock)
    assert apart.refuse(put) is None
    assert apart.refuse(asked("POST", "/v2/app/blobs/uploads/", NONE)) is None
    assert apart.refuse(asked("PATCH", SESSION, BODY)) is not None, "the PUT was a body too"


def test_a_refusal_by_one_cap_takes_nothing_from_the_others(clock: Clock) -> None:
    rates = Rates(Cap(1, 1.0), Cap(2, 60.0), now=clock)
    assert rates.refuse(asked()) is None
    assert rates.refuse(asked()) is not None
    clock.now += 1
    assert rates.refuse(asked()) is None
    clock.now += 1
    refused = rates.refuse(asked())
    assert refused is not None
    assert refused.header("Retry-After") == "58", (
        "until the longest of the caps that are full has room"
    )


def test_each_repository_may_have_its_own_count(clock: Clock) -> None:
    cap = Cap(1, per=lambda request: request.repository)
    rates = Rates(cap, now=clock)
    first = asked()
    other = asked(path="/v2/other/manifests/v1")
    assert (rates.remaining(cap, first), rates.refuse(first), rates.remaining(cap, first)) == (
        1,
        None,
        0,
    )
    assert rates.refuse(other) is None
    assert rates.refuse(first) is not None


def test_when_to_come_back_is_said_in_seconds_or_not_at_all(clock: Clock) -> None:
    def told(has_retry_after: bool) -> str:
        rates = Rates(Cap(1, 10.0), now=clock, has_retry_after=has_retry_after)
        assert rates.refuse(asked()) is None
        clock.now += 2.5
        refused = rates.refuse(asked())
        assert refused is not None
        return refused.header("Retry-After")

    assert told(True) == "8"
    assert told(False) == ""


def test_who_comes_back_when_told_is_taken(clock: Clock) -> None:
    rates = Rates(Cap(1, 0.3), now=clock)
    assert rates.refuse(asked()) is None
    clock.now += 0.1
    refused = rates.refuse(asked())
    assert refused is not None
    clock.now += float(refused.header("Retry-After"))
    assert rates.refuse(asked()) is None


def test_in_front_of_a_registry_nothing_of_a_refused_request_happens(clock: Clock) -> None:
    app = App(auth=Metered(Rates(Cap(1, actions=WRITES), now=clock)))
    image = Seed(1).image().load_into(app, "app", tag="v1")
    blob = next(iter(image.blobs))
    assert app.request("POST", "/v2/b/blobs/uploads/").status == 202
    mount = app.request("POST", f"/v2/b/blobs/uploads/?mount={blob}&from=app")
    assert (mount.status, mount.codes) == (429, ["TOOMANYREQUESTS"])
    assert app.blob("b", blob) is None
    assert app.request("GET", f"/v2/app/blobs/{blob}").status == 200
