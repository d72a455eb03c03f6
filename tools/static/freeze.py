"""Compile the standard modules of the executable; runs in the CPython that recipes/build_python.sh makes.

    build-python freeze.py LIB MODULES

Writes `frozen.bin`, the marshalled code objects one behind the other, and `frozen.c`, the table that
PyImport_FrozenModules points at, into the current directory.

Owns: the form of frozen modules.
Invariants: the same modules give the same bytes. This needs PYTHONHASHSEED=0, which the recipe sets.
"""

import marshal
import sys
from pathlib import Path

__all__ = ["main"]

# CPython's getters of frozen modules find these without us.
BOOTSTRAP = {"importlib._bootstrap", "importlib._bootstrap_external", "zipimport"}
ALIGNMENT = 16

# In hashlib: it would complain at each import about these two, which are CPython's own (Setup.local).
UNKNOWN_HASHES = b"'blake2b', 'blake2s',"

HEAD = """\
#include <Python.h>
__asm__(".section .rodata\\n.balign 16\\n.globl regsync_code\\n.hidden regsync_code\\n"
        "regsync_code:\\n.incbin \\"frozen.bin\\"\\n.text\\n");
extern const unsigned char regsync_code[] __attribute__((visibility("hidden")));
const struct _frozen regsync_frozen[] = {
"""
ROW = '    {{"{}", regsync_code + {}, {}, {}}},\n'
END = "    {0}\n};\n"


def main(lib: Path, names: list[str]) -> None:
    """Write both files for the modules of these names."""
    code = bytearray()
    rows = []
    for name in sorted(set(names) - BOOTSTRAP):
        path = lib.joinpath(*name.split("."))
        is_package = path.is_dir()
        file = path / "__init__.py" if is_package else path.with_name(path.name + ".py")
        text = file.read_bytes().replace(UNKNOWN_HASHES, b"")
        compiled = compile(text, f"<frozen {name}>", "exec", dont_inherit=True)
        data = marshal.dumps(compiled)
        code += bytes(-len(code) % ALIGNMENT)
        rows.append(ROW.format(name, len(code), len(data), int(is_package)))
        code += data
    Path("frozen.bin").write_bytes(code)
    Path("frozen.c").write_text(HEAD + "".join(rows) + END, encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="ascii").split())
