"""Where `min_age` keeps its times: what cannot be kept is an error before any request (docs/design.md
section 12, "Age").
"""

from __future__ import annotations

import json

from _regsync.config import ConfigFile, load


def test_shards_keep_their_state_apart_and_these_times_together():
    text = json.dumps({"mappings": [], "global": {"cache_dir": "/var/lib/x"}})
    file = ConfigFile(text.encode(), name="x", environ={"CI": "1"}, base_dir=None, home=None)
    assert load(file).seen_dir == load(file).cache_dir == "/var/lib/x"
