"""Scores an archive in a process of its own, with small shards; a test kills it. Arguments: archive guard out cache."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_run import at_toy_size

from jaxguard.guard import Guard
from jaxguard.scoring import archive, blocks

if __name__ == "__main__":
    source, guard, out, cache = map(Path, sys.argv[1:])
    blocks.STEPS_PER_BLOCK = 60
    with at_toy_size(cache):
        loaded = Guard.load(guard)
        print("ready", flush=True)
        archive.score_archive(source, loaded, out, progress=False)
    print("done", flush=True)
