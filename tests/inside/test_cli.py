"""The command line as a shell sees it: exit statuses, the two streams, signals, pipes.

Exit statuses and error forms are those of docs/design.md section 2. No output ever holds a
traceback; every run here is looked at for one.
"""

from __future__ import annotations

import pytest

# Wrong command lines.


@pytest.mark.parametrize("arguments", [["--help"], ["copy", "--help"], ["sync", "-h"]])
def test_help_goes_to_standard_output(arguments, capsys):
    from _regsync.app.cli import main

    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert "regsync" in said.out
    assert said.err == ""
