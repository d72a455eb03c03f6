"""Import from the tree that this module was imported from, reading each module once.

zipimport reads and unmarshals a whole module to name its file, throws it away, and does both again
to run it: a twentieth of a start. Here the name alone is made. It can be, because each module of a
tree is bytecode. Its source stands at the root of the archive, once for all trees.

tools/build_zipapp.py puts this file into each tree, and `__main__.py` imports it.

Owns: the finder of one tree's modules, those of sub-packages too.
May not know: which modules there are.
Invariants: names, contents and errors are zipimport's.
"""

from __future__ import annotations

import os
import sys
import zipimport

__all__ = ["TreeImporter"]

HERE = os.path.dirname(__file__)


class TreeImporter(zipimport.zipimporter):
    """Finds and loads as its parent does."""

    def get_filename(self, fullname: str) -> str:
        """Return the path of a module's bytecode."""
        path = self.archive + os.sep + self.prefix + fullname.rpartition(".")[2]
        if self.is_package(fullname):
            return f"{path}{os.sep}__init__.pyc"
        return f"{path}.pyc"

    def get_source(self, fullname: str) -> str | None:
        """Return a module's source: from the tree, else from the root of the archive."""
        source = super().get_source(fullname)
        if source is None:
            _, _, folder = self.prefix.partition(os.sep)
            at_root = os.path.join(self.archive, folder).rstrip(os.sep)
            source = zipimport.zipimporter(at_root).get_source(fullname)
        return source


def importer(path: str) -> TreeImporter:
    """Take the paths of this tree, as a path hook does."""
    if path != HERE and not path.startswith(HERE + os.sep):
        raise ImportError(path)
    return TreeImporter(path)


sys.path_hooks.insert(0, importer)
sys.path_importer_cache.pop(HERE, None)
