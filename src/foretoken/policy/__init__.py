"""The speculation policy: which drafter drafts how many tokens in each row of each round.

`policy` is what the drafters' `Cascade` calls, and states the objective and the bound on what speculation may lose.
`acceptance` estimates accepted tokens, `costs` seconds (`lines` has those by size, `calls` those of drafters,
`together` those of plain passes), `decision` compares the `options`, and `copies` values drafts that are known before
the choice. `lessons` learns from rounds, `account` bounds the loss, `copying` says when free drafters are asked,
`widths` how wide passes are. Rounds that are not decided one by one are in `steady` (like the round before) and `rests`
(plain); `lead` and `following` say when a single row that rests is to draft. `request` has the input and output,
`store` keeps costs and acceptance rates between processes, `report` shows both.

Words of this package.

| word | meaning |
| --- | --- |
| plain round | a round without drafts: one target pass and one token a row; the unit of costs, gains and losses |
| free drafter, copy | a drafter that runs no model and drafts before the choice, and its draft; others are "models" |
| pace; ρ | emitted tokens in the time of a plain round (the speedup); the same for each second |
| account | a regret budget (`Guard`): plain rounds that speculation may still lose against plain decoding |
| look | exploration: a row drafts with a model that is not expected to pay, to see whether it does by now |
| hope | optimism: a decision by an upper confidence bound of a model's acceptance |
| rest | rounds that are decided in advance to be plain; a row that does not rest is awake |
| followed | of a single row that decodes plainly: its tokens are compared with what a free drafter would have drafted |
| call | ends the rest of such a row, since a copy is expected to pay with a change to wider passes and back |
| foreseen | of an emitted token: a free drafter would have drafted it |
| apart | what a plain round of one pass takes longer than one pass of a plain round of several (`time_apart`) |
| alone | of a row: the only row of its round |
| given | of costs: set by the caller, neither measured nor refined |

Tuned constants. `benchmarks/replay.py --constants` halves and doubles them in simulated time. "Flat" means that this
changes the geometric mean of default over best fixed choice by 0.006 at most; halving `CREDIT` costs 0.006 and a third
of it 0.014. "By hand" means that nothing in the repository gives the value.

| name | meaning | where it comes from |
| --- | --- | --- |
| `account.SHARE` | share of a round that each account gains a round: the long-run loss | a promise: 1% by two |
| `account.OWED` | plain rounds that rounds that ask for copies may owe, in batches too | replays: flat from 1 to 4 |
| `copying._NEARLY` | share of the cost of asking that copies gain where intervals stay short | by the clock |
| `rests._UNSEEN`, `_PLAIN_ROUNDS`, `_DOUBTFUL` | when plain passes are measured, how many, at which pace | by hand |
| `account.LOOKS` | plain rounds of the credit that looks may lose at first | replays |
| `account.HOPES` | the same of hopes | replays |
| `acceptance.HOPE` | standard deviations by which models are hoped to be better | replays; by the clock |
| `account.CREDIT`, `HELD` | plain rounds that an account begins with, and holds at most | replays |
| `account.GRANT` | plain rounds that models may lose more with each request | replays; by the clock |
| `acceptance._REHEARSED` | chains that a rehearsal counts as | replays: flat |
| `lead.SIZES`, `_MEMORY` | draft lengths that are followed; rounds over which gains are averaged | replays: flat |
| `lead._LEAST_TRUST` | least share of its expected gain that a call is trusted to have | by hand |
| `request._CHANCE` | plain rounds that a row of a batch may be behind by chance | replays: flat from 3 to 6 |
| `account.PACE` | rounds over which pace and runs are averaged; the engine's over four times that | replays: flat |
| `account.FORESEEN` | how foreseen tokens follow each other, before any was seen | by hand |
| `rests._REST`, `lessons._HEARD` | plain rounds decided at once; their share that is measured | replays; by hand |
| `account._FIRST_LOOK` | rounds from the first unsuccessful look at a drafter to the next | replays: flat |
| `acceptance.LOOKUP` | acceptance rates of copies before anything was drafted | outputs of the shipped target |
| `acceptance.MODEL`, `TREES` | those of models, and of trees | by hand; beginnings: the shipped pair's outputs |
| `acceptance.BEGINNING` | tokens of an output of which models are wrong more often | the shipped pair's outputs |
| `acceptance._RIGHT`, `_HARD`, `_SURE` | what tells a useless model from a hard passage | by hand; replays of outputs |
| `acceptance.KIND_WEIGHT`, `LEVEL_WEIGHT`, `REQUEST_WEIGHT` | what a prior weighs beside drafts | replays |
| `acceptance.ENGINE_MEMORY`, `REQUEST_MEMORY` | drafts over which evidence fades | replays: flat |
| `lines._KNOWN`, `_TOGETHER` | measurements of a size before further ones are taken by threes | replays: flat |
| `lines._OUTLIER`, `_STEADY` | how far one measurement moves a correction or the drift | replays: flat |
| `lines._FLATTEST`, `costs.BYTES_PER_POSITION` | least cost of a position; that without a clock | by hand |
| `costs.ASKED_SECONDS`, `CALLED_SECONDS` | times without a clock besides passes | by the clock, once |
| `costs.ROUND_SECONDS` | the same of a round with a draft | by the clock, on two machines |
| `costs.PLAIN_SECONDS` | time of plain passes that go together | by hand: how often a screen changes |
| `request.LENGTHS`, `NODES` | draft lengths and numbers of nodes that are compared | a grid, by hand |
"""
