"""Measure what the FIPS gate costs at a start, and TLS through the provider beside TLS without it.

Both builds run in turn, another one first each time; figures are medians of whole runs of the
client. A FIPS module tests itself whenever it is loaded, in any program. That part of a start is
measured apart: a Python that imports its digests only, with a configuration that names the provider
and with none. Their difference is the module's; the rest is the gate's. CPU seconds change little
on a busy machine, wall times much.

Needs what the subject `skopeo` needs, except skopeo, and the provider of tools/fips_provider.py.

Owns: these two comparisons.
May not know: anything of the program but its command line.
"""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Iterator

from conformance.client.copies import push_http
from conformance.content.images import Seed
from tools import fips_provider
from tools.benches.runner import (
    CPU,
    MB,
    MIB,
    WALL,
    Figure,
    Ran,
    Spent,
    folder_in_memory,
    median,
    print_figures,
    spread,
    write_mirror,
)
from tools.benches.skopeo import Machine, build_program, make_certificate, write_tls_config

__all__ = ["add_options", "run"]

LAYERS = [64 * MIB] * 8
# A configuration of OpenSSL that loads the provider into any program.
SETUP = """\
openssl_conf = init
.include {modules}/fipsmodule.cnf
[init]
providers = providers
alg_section = algorithms
[providers]
fips = fips_sect
base = base_sect
[base_sect]
activate = 1
[algorithms]
default_properties = fips=yes
"""
DIGESTS = ("-I", "-S", "-c", "import _hashlib; _hashlib.openssl_sha256(b'')")


class Builds:
    """Both builds, and the provider for the one with the gate."""

    def __init__(self, machine: Machine, modules: str) -> None:
        self.machine = machine
        self.modules = modules
        self._open = machine.program.file
        self._gated = self._open.replace("-nofips", "")

    def regsync(self, *arguments: str, gated: bool, **environ: str) -> Ran:
        """Run the build with the gate or the one without."""
        return self.python(self._gated if gated else self._open, *arguments, **environ)

    def python(self, *arguments: str, setup: str = "", **environ: str) -> Ran:
        """Run the interpreter where OpenSSL would find the module."""
        command = [self.machine.program.python, *arguments]
        variables = {"OPENSSL_MODULES": self.modules, "OPENSSL_CONF": setup, **environ}
        return self.machine.measure(command, **variables)


def starts(builds: Builds) -> Iterator[Figure]:
    """Compare starts of both builds, and of a Python with and without the module.

    There are six times as many rounds as of copies.
    """
    machine = builds.machine
    file = machine.work / "one.yaml"
    config = str(write_mirror(file, "http://localhost:1", ["http://localhost:2"], ["a"]))
    setup = machine.work / "openssl.cnf"
    setup.write_text(SETUP.format(modules=builds.modules), encoding="utf-8")

    gated, ungated, module, no_module, version, nothing = machine.rotate(
        lambda: builds.regsync("validate", config, gated=True).spent,
        lambda: builds.regsync("validate", config, gated=False).spent,
        lambda: builds.python(*DIGESTS, setup=str(setup)).spent,
        lambda: builds.python(*DIGESTS).spent,
        lambda: builds.regsync("version", gated=False).spent,
        lambda: builds.python("-c", "pass").spent,
        rounds=6 * machine.rounds,
    )
    for quantity in (WALL, CPU):
        gate = 1000 * (median(gated, quantity) - median(ungated, quantity))
        tests = 1000 * (median(module, quantity) - median(no_module, quantity))
        detail = f"{tests:.0f} ms the module's own tests, {gate - tests:.0f} ms the program's; "
        detail += f"with the gate {spread(gated, quantity)} s, without {spread(ungated, quantity)}"
        yield Figure(f"gate at start, {quantity.name}", gate, "ms", detail=detail)

        ratio = median(version, quantity) / median(nothing, quantity)
        detail = f"the build without the gate; an empty Python takes {spread(nothing, quantity)} s"
        yield Figure(f"version, {quantity.name}", ratio, "x empty Python", detail=detail)


def copies(builds: Builds) -> Iterator[Figure]:
    """Compare one image of 512 MiB copied over TLS on both sides."""
    machine = builds.machine
    tls = make_certificate(machine.work)
    context = ssl.create_default_context(cafile=tls.certificate)
    image = Seed(1).image(sizes=LAYERS)
    with machine.registry(tls) as source:
        push_http(image, source, "bench/one", "v1", context=context)

        def copy(*, gated: bool) -> Spent:
            with machine.registry(tls) as target:
                config = write_tls_config(machine.work, source, target)
                names = [f"{host}/bench/one:v1" for host in (source, target)]
                options = ["--no-artifacts", "--no-progress", "-c", config]
                trust = {"SSL_CERT_FILE": tls.certificate}
                return builds.regsync("copy", *names, *options, gated=gated, **trust).spent

        gated, ungated = machine.rotate(lambda: copy(gated=True), lambda: copy(gated=False))
    size = image.size / MB
    for quantity in (WALL, CPU):
        ratio = median(gated, quantity) / median(ungated, quantity)
        detail = f"{size:.0f} MB; through the provider {spread(gated, quantity)} s, "
        detail += f"without {spread(ungated, quantity)}"
        yield Figure(f"copy over TLS, {quantity.name}", ratio, "x without", detail=detail)
    speed = size / median(gated, WALL)
    detail = f"without the provider {size / median(ungated, WALL):.0f}"
    yield Figure("copy over TLS, speed", speed, "MB/s", detail=detail)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Say which options there are."""
    parser.add_argument(
        "-n", dest="rounds", type=int, default=5, help="rounds of copies (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure starts, then copies."""
    modules = fips_provider.ready()
    with folder_in_memory() as work:
        builds = Builds(Machine(work, build_program(work), options.rounds), modules)
        print(builds.regsync("version", gated=True).out.strip(), flush=True)
        print_figures(starts(builds))
        print_figures(copies(builds))
    return 0
