"""What the archive does under a Python that is too old: a newer one of the machine, or advice.

tools/build_zipapp.py puts this file into the archive, and `__main__.py` imports it when it has to. It
runs under Python 2.7 and 3.6, so its types are comments.

Owns: where newer Pythons are looked for, what distributions call them.
May not know: the program.
"""

import os
import platform
import subprocess
import sys

__all__ = ["advice", "start_newer"]

MINORS = (14, 13, 12, 11, 10)
IS_NEWER = "import sys; sys.exit(sys.version_info < (3, 10))"

# The flags of an interpreter that the next one gets too (sys.flags).
OPTIONS = (("isolated", "-I"), ("ignore_environment", "-E"), ("no_site", "-S"))

# How a distribution brings a newer Python beside its own, by ID or ID_LIKE and the first number of
# VERSION_ID in /etc/os-release. Others whose own is too old (Debian 11, Ubuntu 20.04, Amazon Linux 2)
# have no package of one.
PACKAGES = {
    "amzn 2023": "dnf install python3.11",
    "ol 8": "dnf install python3.12",
    "ol 9": "dnf install python3.12",
    "rhel 8": "dnf install python3.12",
    "rhel 9": "dnf install python3.12",
    "suse 15": "zypper install python311",
}


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


def advice(release="/etc/os-release"):
    # type: (str) -> str
    """Return what helps on this machine, "" where nobody knows."""
    fields = {}
    try:
        with open(release) as file:
            for line in file:
                name, _, value = line.strip().partition("=")
                fields[name] = value.strip("\"'")
    except (IOError, OSError):
        pass

    major = fields.get("VERSION_ID", "").partition(".")[0]
    names = [fields.get("ID", "")] + fields.get("ID_LIKE", "").split()
    keys = ["%s %s" % (name, major) for name in names]
    commands = [PACKAGES[key] for key in keys if key in PACKAGES]
    words = []
    if commands:
        words.append("`%s` brings one beside it" % commands[0])
    elif "PRETTY_NAME" in fields:
        words.append("%s has no package of one" % fields["PRETTY_NAME"])
    if sys.platform.startswith("linux"):
        words.append("the file regsync-linux-%s needs none" % platform.machine())
    return "; ".join(words)
