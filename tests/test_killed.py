"""A sync, as a process, that is killed at any byte of its traffic, and the run after it (I11).

Kills at a request are in test_discipline_runs.py, kills at a write of a layout in test_layout_crash.py.
"""

from __future__ import annotations

import select
import signal
import socket

import pytest

from conformance.content.images import Seed
from tests.ends import document, held, run_regsync, started, tags
from tests.layouts import check_layout, names_of

pytestmark = [pytest.mark.slow, pytest.mark.process]

SIGNATURE = "application/vnd.example.signature"
MOMENTS = [number / 6 for number in range(1, 6)]  # parts of an undisturbed run's bytes
MOST = 1.5  # times those bytes, for the killed and the next run together


class Line:
    """Connections to a registry that are cut, and whose client is killed, at a byte."""

    def __init__(self, address):
        self.registry = address.split(":")
        self.bytes, self.limit, self.client = 0, None, None

    def __call__(self, client):
        with socket.create_connection(self.registry) as registry:
            other = {client: registry, registry: client}
            while True:
                for ready in select.select([client, registry], [], [])[0]:
                    data = ready.recv(16384)
                    self.bytes += len(data)
                    if self.limit is not None and self.bytes >= self.limit:
                        return self.client.kill()
                    if not data:
                        return None
                    other[ready].sendall(data)


class Scene:
    """A sync that has run once; since then the source has new images, and v0 has moved."""

    def __init__(self, directory, serve, speaker, kind):
        directory.mkdir()
        self.source, self.target = serve(), serve()
        self.disk = directory / "disk" if kind == "layout" else None
        # What a layout gets passes the source's line alone.
        self.line = Line((self.source if self.disk else self.target).address)
        line = f"http://{speaker(self.line)}"
        registries = {"source": self.source, "target": line}
        if self.disk:
            registries = {"source": line, "target": f"oci-layout:{self.disk}"}
        seed = Seed(41)
        self.old = seed.image().load_into(self.source.app, "app", tag="v0")
        self.file = directory / "mirror.yaml"
        mapping = {"from": "app", "tags": tags("v*"), "artifacts": {"enabled": True}}
        few = {"max_concurrent_transfers": 2}
        self.file.write_text(document(registries, mapping, **{"global": few}))
        assert run_regsync("sync", "-q", "-c", str(self.file)).status == 0

        base = seed.layer(100_000)
        self.new = [seed.image(layers=[base, seed.layer(50_000)]) for _ in range(7)]
        self.new.append(seed.index([seed.image(layers=[base]), seed.image(layers=[base])]))
        self.signatures = [seed.artifact(image, SIGNATURE) for image in self.new]
        for number, image in enumerate(self.new):
            image.load_into(self.source.app, "app", tag=f"v{number}")
            self.signatures[number].load_into(self.source.app, "app")

    def run(self, limit=None):
        """Run up to a byte; return the exit status, and what each tag then names.

        Whatever a tag names has to be whole.
        """
        self.line.bytes, self.line.limit = 0, limit
        with started("sync", "-q", "-c", str(self.file)) as self.line.client:
            self.line.client.communicate()
        self.source.wait_until_idle()
        self.target.wait_until_idle()
        if self.disk:
            check_layout(self.disk)
            tagged = {name.partition(":")[2]: top for name, top in names_of(self.disk).items()}
        else:
            known = {image.top: image for image in (self.old, *self.new)}
            tagged = dict(self.target.app.tags("app"))
            assert all(held(self.target, "app", known[top]) for top in tagged.values())
        return self.line.client.returncode, tagged

    def has(self, image):
        if self.disk:
            return image.contents().keys() <= check_layout(self.disk)
        return held(self.target, "app", image)


@pytest.mark.parametrize("kind", ["registry", "layout"])
def test_whatever_the_byte_tags_are_old_or_new_and_the_next_run_brings_the_rest(
    tmp_path, serve, speaker, kind
):
    undisturbed = Scene(tmp_path / "undisturbed", serve, speaker, kind)
    wanted = {f"v{number}": image.top for number, image in enumerate(undisturbed.new)}
    assert undisturbed.run() == (0, wanted)
    whole = undisturbed.line.bytes
    counts = set()
    for moment in MOMENTS:
        scene = Scene(tmp_path / str(moment), serve, speaker, kind)
        status, tagged = scene.run(int(moment * whole))
        assert status == -signal.SIGKILL
        assert all(tagged[tag] in (wanted[tag], scene.old.top) for tag in tagged)
        assert [tag for tag in tagged if tagged[tag] == scene.old.top] in ([], ["v0"])
        counts.add(len(tagged))

        assert scene.run() == (0, wanted)
        assert all(scene.has(image) for image in (*scene.new, *scene.signatures))
        assert moment + scene.line.bytes / whole < MOST
    # A layout is given its tags at the end of a short run.
    assert kind == "layout" or len(counts) > 1
