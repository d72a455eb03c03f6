"""What a redirect holds while it is followed (whom it may lead to is in test_hostile_peers.py)."""

from __future__ import annotations

import pytest

from _regsync.addresses import Origin
from _regsync.errors import ProtocolBroken
from _regsync.registry.client import Call
from tests.inside.wires import End, Wire, answer, plain_registry, transport_of

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

REGISTRY, STORAGE = Origin("http", "registry.test", 80), Origin("http", "storage.test", 80)
GET = Call("blob_get", "GET", "/v2/app/blobs/x", "app")


def where(wire: Wire) -> tuple[Origin, bool]:
    """Return to whom a connection was opened, and whether as to one that another has named."""
    assert wire.dialled is not None
    origin, is_foreign = wire.dialled
    return Origin(*origin[:3]), is_foreign


MOVED = b"HTTP/1.1 307 Moved\r\nLocation: http://storage.test/x?sig=1\r\nContent-Length: "


async def test_registrys_connection_serves_others_while_storage_sends_the_blob():
    first = Wire(answers=((MOVED + b"5\r\n\r\nmoved",), (answer(b"other"),)))
    storage = Wire(answers=((answer(b"blob"),),))
    transport = transport_of({REGISTRY: [first], STORAGE: [storage]})
    host = transport.client(plain_registry())
    async with await host.exchange(GET, (200,)) as response:
        assert transport.limits[host.key].used == 1
        async with await host.exchange(GET, (200,)) as other:
            assert await other.read(10) == b"other"
        assert await response.read(10) == b"blob"
    assert (where(first), where(storage)) == ((REGISTRY, False), (STORAGE, True))
    assert transport.limits[host.key].used == 0


@pytest.mark.parametrize(
    "rest",
    [
        (b"9\r\n\r\nmov", End.EOF),
        (b"9\r\n\r\nmov", End.RESET),
        (b"100000\r\n\r\n" + bytes(100_000),),
    ],
    ids=["cut", "reset", "long"],
)
async def test_body_of_a_redirect_says_nothing(rest):
    head, *others = rest
    assert isinstance(head, bytes)
    wire = Wire(answers=((MOVED + head, *others),))
    transport = transport_of({REGISTRY: [wire], STORAGE: [Wire(answers=((answer(b"blob"),),))]})
    async with await transport.client(plain_registry()).exchange(GET, (200,)) as response:
        assert await response.read(10) == b"blob"
    assert wire.is_closed


@pytest.mark.rule("R4")
async def test_chain_of_redirects_is_bounded_and_leaves_nothing_open():
    here = b"HTTP/1.1 302 Round\r\nLocation: /v2/again\r\nContent-Length: 0\r\n\r\n"
    wire = Wire(answers=((here,),) * 20)
    transport = transport_of({REGISTRY: [wire]})
    with pytest.raises(ProtocolBroken, match="10 redirects"):
        async with await transport.client(plain_registry()).exchange(GET, (200,)):
            pass
    assert (len(wire.requests), where(wire)) == (11, (REGISTRY, False))


@pytest.mark.rule("R4")
@pytest.mark.parametrize(
    ("host", "end", "words"),
    [
        ("registry.test", "http://other.test/x", "https to"),
        ("10.0.0.1", "https://10.0.0.2/x", "private address"),
    ],
)
async def test_each_hop_is_judged_by_the_one_before_it(host, end, words):
    """What the registry itself might name, http or a neighbour of its own, a storage on the way may
    not.
    """

    def moved(place: str) -> Wire:
        return Wire(
            answers=(
                (f"HTTP/1.1 307 Moved\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode(),),
            )
        )

    first, storage = moved("https://storage.test/x"), moved(end)
    transport = transport_of(
        {Origin("http", host, 80): [first], Origin("https", "storage.test", 443): [storage]}
    )
    with pytest.raises(ProtocolBroken, match=words):
        async with await transport.client(plain_registry(host)).exchange(GET, (200,)):
            pass
    assert (len(first.requests), len(storage.requests)) == (1, 1)


async def test_permits_are_no_more_than_the_files_that_may_be_open():
    transport = transport_of({})
    transport.machine = transport.machine._replace(open_files=64)
    generous = plain_registry()._replace(max_concurrent=50)
    transport.client(generous)
    assert transport.limits["registry.test"].cap == 10


async def test_of_two_aliases_of_a_registry_the_smaller_bound_holds():
    transport = transport_of({})
    for alias, most in (("one", 7), ("two", 3), ("three", 5)):
        transport.client(plain_registry()._replace(alias=alias, max_concurrent=most))
    assert transport.limits["registry.test"].cap == 3
