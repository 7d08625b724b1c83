"""Images in shards: a data set of tar files, and the commands that pack and verify them."""

from __future__ import annotations

from pydtnn.tools.shards.packing import Packed, pack_shards, verify_shards
from pydtnn.tools.shards.reading import load_shards

__all__ = ["Packed", "load_shards", "pack_shards", "verify_shards"]
