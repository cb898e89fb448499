"""The engine: takes requests, decodes them in rounds (draft, score, verify, commit, emit), and returns completions.

`engine` has the class that users call, `async_engine` the one for servers. `loops` makes decode loops and keeps one
between calls for its KV cache, `scheduler` admits requests to a loop, and `decode_loop` runs one round. The parts of
a round have modules of their own: `prefill`, `draft_length`, `forced`, `verification`, `recording`, and, for rounds
without a draft, `plain`. `row` is a request while it is decoded, `membership` the rows of a round, `outputs` what
callers get.
"""
