"""The names of `conformance.walks` under their old path, until all imports are renamed."""

from ..walks import ACCEPT as ACCEPT
from ..walks import Client as Client
from ..walks import fetch_http as fetch_http
from ..walks import identical as identical
from ..walks import push_http as push_http
