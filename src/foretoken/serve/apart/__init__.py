"""The engine in a process of its own, so that the server's work falls between its passes and not into its rounds.

In one process they take turns at Python's lock: a round waits while an answer is written, and nothing is written while
a round's tokens are drawn, when one of the processor's cores has nothing to do. `host` is the engine's side, `remote`
the server's, `wire` what goes between them, and `process` starts the one for the other.
"""
