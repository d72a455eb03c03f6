"""A whole sync between registries that answer some requests with anything: right, or reported, and
never hung.

Which requests those are and what is said instead is drawn; all else is a strict registry's.
Whatever happened, each tag at the target names what the source's tag names, and all of it is there;
a run after that, undisturbed, brings the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import anyio
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.content.images import Seed
from conformance.messages import Answer, Request, Response
from tests import ends
from tests.ends import held, tags, virtual
from tests.fuzzing import fuzz, in_virtual_time
from tests.test_fuzz_registry import BODIES, NAMED, STATUSES

_STRANGE = st.tuples(
    STATUSES,
    st.lists(
        st.sampled_from([*NAMED]).flatmap(lambda name: st.tuples(st.just(name), NAMED[name])),
        max_size=3,
        unique_by=lambda pair: pair[0],
    ),
    BODIES,
)
_PLACES = st.dictionaries(st.integers(0, 30), _STRANGE, max_size=6)


def disturbed(
    places: dict[int, tuple[int, list[tuple[str, str]], bytes]],
) -> Callable[[Request], Answer | None]:
    """Return an `intercept` that answers the requests of these numbers otherwise."""
    count = -1

    def answer(request: Request) -> Answer | None:
        nonlocal count
        count += 1
        if count not in places:
            return None
        status, headers, body = places[count]
        said = [
            (name, "".join(letter for letter in value if " " <= letter <= "~").strip())
            for name, value in headers
        ]
        return Response(status, said, b"" if status in (204, 304) else body)

    return answer


@fuzz(30)
@given(_PLACES, _PLACES, st.booleans())
@example({}, {0: (400, [], b"[" * 5_000)}, False)
def test_a_sync_of_strange_answers_is_right_or_says_what_failed(
    at_source: dict[int, tuple[int, list[tuple[str, str]], bytes]],
    at_target: dict[int, tuple[int, list[tuple[str, str]], bytes]],
    artifacts: bool,
) -> None:
    async def work() -> None:
        async with virtual() as world:
            source, target = world.registry("registry.test"), world.registry("target.test")
            images = {
                f"v{number}": Seed(number).image(sizes=(100, 200 + number)) for number in range(2)
            }
            for tag, image in images.items():
                image.load_into(source.app, "app", tag=tag)
            source.app.intercept, target.app.intercept = disturbed(at_source), disturbed(at_target)
            registries = {"source": source, "t": target}
            rule = {
                "defaults": {
                    "source": "source",
                    "targets": ["t"],
                    "artifacts": {"enabled": artifacts},
                }
            }
            ran = await world.sync(registries, {"from": "app", "tags": tags(*images)}, **rule)
            assert anyio.current_time() < 6 * 3600
            assert "INTERNAL_ERROR" not in ran.err + ran.out
            assert ran.status in (0, 1, 2, 4)
            source.app.intercept = target.app.intercept = None
            again = await world.sync(registries, {"from": "app", "tags": tags(*images)}, **rule)
            assert again.status == 0, again.err
            assert all(held(target, "app", image) for image in images.values())
            for place in (source, target):
                # Whoever is sent to another path goes there.
                assert all("no such path" in each for each in place.journal.violations)
                place.journal.violations.clear()

    # What a client does after such answers is no mistake of its own.
    with mock.patch.object(ends, "check_run", return_value=None):
        in_virtual_time(work)
