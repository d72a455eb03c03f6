#!/usr/bin/env python3
"""Measure what the FIPS gate costs at a start, and TLS through the provider beside TLS without it.

    python3 tools/bench_fips.py [-n ROUNDS] [-s STARTS] [--python EXE] [--work DIR] [--modules DIR]

Both builds run in turn, another one first each time; figures are medians of whole runs of the
client. Of a start, what the provider's own tests take (a FIPS module runs them whenever it is
loaded, in any program) is told apart: a Python that imports its digests only, with a configuration
that names the provider and with none. Their difference is the module's; the rest is the gate's. CPU
seconds change little on a busy machine, wall times much.

Owns: these two comparisons. May not know: anything of the program but its command line. Needs what
tools/bench.py needs, except skopeo, and a provider: that of tools/fips_provider.py, or of
--modules.
"""

from __future__ import annotations

import argparse
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.copies import push_http  # noqa: E402
from conformance.images import Seed  # noqa: E402
from conformance.registries import Missing  # noqa: E402
from tools import fips_provider  # noqa: E402
from tools.bench import (  # noqa: E402
    MIB,
    Bench,
    BenchError,
    Spent,
    built,
    found,
    interpreter,
    median,
    spread,
    write_config,
)

__all__ = ["main"]

LAYERS = [64 * MIB] * 8
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0; 1 when something needed is missing or failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-n", dest="rounds", type=int, default=5, help="rounds of copies (%(default)s)"
    )
    parser.add_argument(
        "-s", dest="starts", type=int, default=30, help="rounds of starts (%(default)s)"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="EXE", help="interpreter of the .pyz"
    )
    parser.add_argument(
        "--work", default="/dev/shm", metavar="DIR", help="where storage is (/dev/shm)"
    )
    parser.add_argument("--modules", metavar="DIR", help="where fips.so and fipsmodule.cnf are")
    options = parser.parse_args(argv)
    try:
        modules = os.path.abspath(options.modules) if options.modules else fips_provider.ready()
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.work) as directory:
            work = Path(directory)
            python = interpreter(options.python)
            bench = Bench(work, python, built(work, python), options.starts)
            both = Both(bench, modules)
            print(both.client(True, "version")[1].strip(), flush=True)
            for line in (*starts(both), *copies(both, options.rounds)):
                print(line, flush=True)
    except (BenchError, Missing, fips_provider.ProviderError) as error:
        sys.stderr.write(f"bench_fips: {error}\n")
        return 1
    return 0


class Both:
    """The two builds and the provider for one of them."""

    def __init__(self, bench: Bench, modules: str) -> None:
        self.bench = bench
        self.modules = modules

    def client(self, gated: bool, *arguments: str, trust: str | None = None) -> tuple[Spent, str]:
        """Run one of the builds."""
        build = self.bench.pyz.replace("-nofips", "") if gated else self.bench.pyz
        return self.python(build, *arguments, trust=trust)

    def python(
        self, *arguments: str, setup: str = "", trust: str | None = None
    ) -> tuple[Spent, str]:
        """Run the interpreter where OpenSSL would find the module."""
        set_up = [f"OPENSSL_MODULES={self.modules}", f"OPENSSL_CONF={setup}"]
        return self.bench.spend([found("env"), *set_up, self.bench.python, *arguments], trust=trust)


def starts(both: Both) -> Iterator[str]:
    """Compare starts of both builds, and of a Python with and without the module."""
    config = both.bench.work / "one.yaml"
    setup = both.bench.work / "openssl.cnf"
    write_config(
        config, [("localhost:1", "localhost:2")], [{"from": "a", "source": "a0", "targets": ["b0"]}]
    )
    setup.write_text(SETUP.format(modules=both.modules))
    digests = ["-I", "-S", "-c", "import _hashlib; _hashlib.openssl_sha256(b'')"]
    runs: list[Callable[[], Spent]] = [
        lambda: both.client(True, "validate", str(config))[0],
        lambda: both.client(False, "validate", str(config))[0],
        lambda: both.python(*digests, setup=str(setup))[0],
        lambda: both.python(*digests)[0],
        lambda: both.client(False, "version")[0],
        lambda: both.python("-c", "pass")[0],
    ]
    gated, plain, module, none, version, nothing = both.bench.rotate(*runs)
    for what in ("wall", "cpu"):
        whole, own = (
            (median(a, what) - median(b, what)) * 1000 for a, b in ((gated, plain), (module, none))
        )
        yield f"start, {what} s: with the gate {spread(gated, what)}, without {spread(plain, what)}"
        yield f"  the gate {whole:.0f} ms: {own:.0f} ms the module's own tests, {whole - own:.0f} ms the program's"
        ratio = median(version, what) / median(nothing, what)
        yield f"  version of the other build {ratio:.2f} times an empty Python ({spread(nothing, what)})"


def copies(both: Both, rounds: int) -> Iterator[str]:
    """Compare one image of 512 MiB copied over TLS on both sides."""
    bench = both.bench
    bench.rounds = rounds
    certificate = str(bench.work / "cert.pem")
    key = str(bench.work / "key.pem")
    command = [
        found("openssl"),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    command += [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=bench",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run([*command, "-keyout", key, "-out", certificate], capture_output=True, check=True)
    image = Seed(1).image(sizes=LAYERS)
    with bench.registry((certificate, key)) as source:
        push_http(
            image, source, "bench/one", "v1", context=ssl.create_default_context(cafile=certificate)
        )

        def copy(gated: bool) -> Spent:
            with bench.registry((certificate, key)) as target:
                config = bench.work / "tls.yaml"
                registries = "".join(
                    f"  r{host[-5:]}: {{url: 'https://{host}'}}\n" for host in (source, target)
                )
                config.write_text(f"registries:\n{registries}mappings: []\n")
                names = [f"{host}/bench/one:v1" for host in (source, target)]
                options = ["--no-artifacts", "--no-progress", "-c", str(config)]
                return both.client(gated, "copy", *names, *options, trust=certificate)[0]

        gated, plain = bench.rotate(lambda: copy(True), lambda: copy(False))
    for what in ("wall", "cpu"):
        ratio = median(gated, what) / median(plain, what)
        yield (
            f"copy of {image.size / 1e6:.0f} MB over TLS, {what} s: through the provider {spread(gated, what)}, "
            f"without {spread(plain, what)}, ratio {ratio:.2f}"
        )
    through, without = (image.size / 1e6 / median(side, "wall") for side in (gated, plain))
    yield f"  {through:.0f} MB/s against {without:.0f}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends too
    sys.exit(main())
