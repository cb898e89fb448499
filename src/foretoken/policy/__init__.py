"""The speculation policy: which drafter drafts how many tokens in each row of each round.

`acceptance` estimates accepted tokens, `costs` seconds, `decision` compares the options, `account` bounds the loss, and
`store` keeps costs and acceptance rates between processes.

Tuned constants. "By hand" means that no measurement in the repository gives the value: the simulations of tests/policy
(replay.py) check that the policy is near the best fixed draft length and within its bound with it.

| name | meaning | where it comes from |
| --- | --- | --- |
| `account.SHARE` | share of a round that each account gains a round: the long-run loss | a promise: 1% |
| `account.GRANT` | plain rounds that each account gains a request | a promise: a quarter of a round |
| `account.CREDIT` | plain rounds that an account begins with, and holds at most | by hand |
| `account.PACE` | rounds over which a request's pace is averaged; four times that for the engine's | by hand |
| `account._PACE_PRIOR` | rounds that the engine's pace counts as in a request's | by hand |
| `account._FIRST_LOOK` | rounds from the first unsuccessful look at a drafter to the next | by hand |
| `acceptance.LOOKUP`, `MODEL`, `TREES` | acceptance rates before anything was drafted, and their weights | by hand |
| `acceptance._SAVED_WEIGHT` | draft tokens of a level that an earlier process counts as | by hand |
| `acceptance._REQUEST_WEIGHT` | expected rejections that the engine's rates count as in a request | by hand |
| `acceptance._ENGINE_MEMORY`, `_REQUEST_MEMORY` | how long evidence lasts: draft tokens of a level; rounds | by hand |
| `acceptance._LEAST`, `_MOST` | limits of estimated acceptance rates | `_MOST` lets 16 tokens count as 14 at most |
| `costs._OUTLIER`, the gains after it | how far one measurement moves a correction or the drift | by hand |
| `costs._UNSTEADY` | weight of a pass of another size than the last | by hand; see benchmarks/widths.py |
| `costs._FLATTEST` | least share by which a further position or token raises a cost | by hand |
| `costs.BYTES_PER_POSITION` | the same share where costs must not depend on the clock | by hand |
| `request.LONGEST`, `LENGTHS`, `NODES` | draft lengths and numbers of nodes that are compared | a grid, by hand |
| `decision._ROUNDS` | rounds for which looked-up costs are reused | by hand |
"""
