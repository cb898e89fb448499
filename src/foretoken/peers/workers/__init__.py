"""Programs that run one engine each, in an environment of its own, and speak JSON lines: see `protocol`.

Apart from Foretoken's own they import nothing of Foretoken, so that they run wherever the engine is installed.
"""
