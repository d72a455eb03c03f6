"""What the archive does under a Python that is too old: it looks for a newer one of the machine.

tools/build_zipapp.py puts this file into the archive, and `__main__.py` imports it when it has to. It
runs under Python 2.7 and 3.6, so its types are comments.

Owns: where newer Pythons are looked for.
May not know: the program.
"""

import os
import subprocess
import sys

__all__ = ["start_newer"]

MINORS = (14, 13, 12, 11, 10)
IS_NEWER = "import sys; sys.exit(sys.version_info < (3, 10))"

# The flags of an interpreter that the next one gets too (sys.flags).
OPTIONS = (("isolated", "-I"), ("ignore_environment", "-E"), ("no_site", "-S"))


def start_newer():
    # type: () -> None
    """Go on in the newest Python on the PATH that can run the program; return when there is none."""
    options = [option for flag, option in OPTIONS if getattr(sys.flags, flag, 0)]
    for minor in MINORS:
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            path = os.path.join(folder, "python3.%d" % minor)
            if os.path.isabs(path) and os.access(path, os.X_OK) and is_newer(path):
                os.execv(path, [path] + options + sys.argv)


def is_newer(path):
    # type: (str) -> bool
    """Ask an interpreter: what has its name may be a version manager's, which says there is none."""
    with open(os.devnull, "w") as nowhere:
        try:
            return subprocess.call([path, "-c", IS_NEWER], stdout=nowhere, stderr=nowhere) == 0
        except OSError:  # a folder
            return False
