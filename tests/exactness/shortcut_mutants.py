# ruff: noqa: E501  (a mutant a line)
"""Faults in the code that draws a round's outcome (`decide`, its shortcuts, `draw`), as edits of its source.

``SHORTCUT_MUTANTS`` maps a name to a `ShortcutMutant`. An edit that no longer applies to the source is an error, so
that no mutant can go stale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from inspect import getsource
from types import ModuleType
from typing import Any

from foretoken.limits import Limits
from foretoken.verify.exact import Mode

FAST, DECIDE, DRAW = "foretoken.verify.fast", "foretoken.verify.decide", "foretoken.sampling.vocabulary"


@dataclass(frozen=True)
class ShortcutMutant:
    """An edit, and a case that shows it.

    Attributes:
        module: the module that is edited.
        old: a piece of its source that occurs exactly once.
        new: its replacement.
        verifier: name of the verifier.
        mode: how siblings are made.
        shape: parents of the drafts' nodes.
        alone: rows are verified one at a time.
        padding: columns of padding.
        vocabularies: sizes, of target and drafter.
        limits: the limits in force.
        tensors: torch draws the tokens, as on a GPU, and not NumPy.
    """

    module: str
    old: str
    new: str
    verifier: str = "token"
    mode: Mode = "with replacement"
    shape: tuple[int, ...] = (0, 1)
    alone: bool = False
    padding: int = 0
    vocabularies: tuple[int, int] = (3, 3)
    limits: Limits = field(default_factory=Limits)
    tensors: bool = False

    def decide(self) -> Callable[..., Any]:
        """`foretoken.verify.decide` with the fault in it."""
        edited = _edited(self.module, (self.old, self.new), *([_TENSORS] if self.tensors else []))
        if self.module == DECIDE:
            return edited["decide"]
        whole = _namespace(import_module(DECIDE))
        exec(getsource(import_module(DECIDE)), whole)
        for name in {FAST: ("shortcut",), DRAW: ("draw", "draw_rows")}[self.module]:
            whole[name] = edited[name]
        return whole["decide"]


def _namespace(module: ModuleType) -> dict[str, Any]:
    return {"__name__": module.__name__, "__builtins__": __builtins__}


_TENSORS = ('return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)', "return False")


def draw_with_tensors() -> Callable[..., Any]:
    """`foretoken.verify.decide` without a fault, where torch draws the tokens, as on a GPU."""
    return ShortcutMutant(DRAW, *_TENSORS).decide()


def _edited(name: str, *edits: tuple[str, str]) -> dict[str, Any]:
    module = import_module(name)
    source = getsource(module)
    for old, new in edits:
        assert source.count(old) == 1, f"{name} contains it {source.count(old)} times: {old}"
        source = source.replace(old, new)
    namespace = _namespace(module)
    exec(compile(source, name, "exec"), namespace)
    return namespace


CHOSEN: Mode = "chosen"
DEEP = (0, 1, 2)
FORK, RAGGED = (0, 0), (0, 1, 0)
BLOCKS = Limits(block=2)

SHORTCUT_MUTANTS: dict[str, ShortcutMutant] = {
    # token, in a batch and alone
    "token: one uniform for each position": ShortcutMutant(FAST, "reach *= min(ratio, 1.0)", "reach = min(ratio, 1.0)"),
    "token: ratios above 1 make up for others": ShortcutMutant(FAST, "reach *= min(ratio, 1.0)", "reach *= ratio"),
    "token: accepts with the uniform squared": ShortcutMutant(FAST, "limit = 0, 1.0, 1.0 - u", "limit = 0, 1.0, 1.0 - u * u"),
    "token: stops one late": ShortcutMutant(FAST, "        nodes.append(node)\n    return nodes, _next_weights(draft, target_probs, nodes, None)", "        nodes.append(min(node + 1, len(ratios)))\n    return nodes, _next_weights(draft, target_probs, nodes, None)"),
    "token: stops one early": ShortcutMutant(FAST, "        nodes.append(node)\n    return nodes, _next_weights(draft, target_probs, nodes, None)", "        nodes.append(max(node - 1, 0))\n    return nodes, _next_weights(draft, target_probs, nodes, None)"),
    "token: next token of the position before": ShortcutMutant(FAST, "_next_weights(draft, target_probs, nodes, None)", "_next_weights(draft, target_probs, [max(n - 1, 0) for n in nodes], None)"),
    "token: the last token is never accepted": ShortcutMutant(FAST, "for ratio in ratios:\n            reach", "for ratio in ratios[:-1]:\n            reach"),
    "ratio inverted": ShortcutMutant(FAST, "(x / y if (y :=", "(y / x if (y :="),
    "ratio of a position earlier": ShortcutMutant(FAST, "p.item(row, node, token)", "p.item(row, node - 1, token)"),
    "padding counted": ShortcutMutant(FAST, "enumerate(drafted[:count])", "enumerate(drafted)", padding=1),
    "tokens beyond the vocabulary accepted": ShortcutMutant(FAST, "p.item(row, node, token) if token < size else 0.0", "p.item(row, node, min(token, size - 1))", vocabularies=(2, 3)),
    "residual skipped": ShortcutMutant(FAST, "return replacement_probs(draft, p, chosen,", "return p if True else replacement_probs(draft, p, chosen,"),
    "alone: residual skipped": ShortcutMutant(FAST, "if node == draft.listed.counts[0]:", "if True:", alone=True),
    "alone: residual swapped": ShortcutMutant(FAST, "(p if weights is None else weights[0] * p) - q", "q - (p if weights is None else weights[0] * p)", alone=True),
    "alone: rejected token may be drawn again": ShortcutMutant(FAST, "mass[:, token : token + 1] = 0", "pass", mode=CHOSEN, alone=True),
    "alone: another token removed": ShortcutMutant(FAST, "token = draft.listed.tokens[0][node]", "token = draft.listed.tokens[0][node - 1]", mode=CHOSEN, shape=DEEP, vocabularies=(2, 2), alone=True),
    # block
    "block: last weight inverted": ShortcutMutant(FAST, "none_succeeds = 1.0 - weights[row][node]", "none_succeeds = weights[row][node]", "block"),
    "block: weight forgets the prefix": ShortcutMutant(FAST, "min(1.0, weights[-1] * ratio)", "min(1.0, ratio)", "block"),
    "block: 1 - w forgotten": ShortcutMutant(FAST, "total = mass + (1.0 - weight)", "total = mass + 1.0", "block"),
    "block: a uniform for each position": ShortcutMutant(FAST, "none_succeeds *= 1.0 - (mass", "none_succeeds = 1.0 - (mass", "block"),
    "block: S of another position": ShortcutMutant(FAST, "mass = spare[row][node - 1]", "mass = spare[row][node - 2]", "block", shape=DEEP),
    "block: S of chosen tokens without weight": ShortcutMutant(FAST, "mass = weight * max(", "mass = max(", "block", CHOSEN, DEEP),
    "block: token's residual": ShortcutMutant(FAST, "[weights[row][node] for row, node in enumerate(nodes)]", "[1.0 for _ in nodes]", "block", shape=DEEP),
    "block alone: S without weight": ShortcutMutant(FAST, "target_probs[row, node], weight)", "target_probs[row, node], 1.0)", "block", shape=DEEP, vocabularies=(2, 2), alone=True),
    "block alone: residual without weight": ShortcutMutant(FAST, "(p if weights is None else weights[0] * p)", "p", "block", alone=True),
    # traversal of chosen trees
    "tree: p not normalised after a rejection": ShortcutMutant(FAST, "min(1.0, weight * value / left)", "min(1.0, weight * value)", "traversal", CHOSEN, FORK),
    "tree: weight forgets the prefix": ShortcutMutant(FAST, "min(1.0, weight * value / left)", "min(1.0, value / left)", "traversal", CHOSEN, RAGGED),
    "tree: weight stays after a rejection": ShortcutMutant(FAST, "weight = spare / total if total else 1.0", "pass", "traversal", CHOSEN, RAGGED),
    "tree: 1 - w forgotten": ShortcutMutant(FAST, "total = spare + (1.0 - weight)", "total = spare + 1.0", "traversal", CHOSEN, RAGGED),
    "tree: S without weight": ShortcutMutant(FAST, "spare = weight * rest / left", "spare = rest / left", "traversal", CHOSEN, RAGGED),
    "tree: nodes in the order of their numbers": ShortcutMutant(FAST, "for node in _post_order(children):", "for node in range(len(children)):", "traversal", CHOSEN, RAGGED),
    "tree: parents before their children": ShortcutMutant(FAST, "return order[::-1]", "return order", "traversal", CHOSEN, RAGGED),
    "tree: siblings in the wrong order": ShortcutMutant(FAST, "for node in _post_order(children):", "for node in _post_order([below[::-1] for below in children]):", "traversal", CHOSEN, FORK),
    "tree: a rejected token may be drawn again": ShortcutMutant(FAST, "mass[token : token + 1] = 0\n", "pass\n", "traversal", CHOSEN, FORK),
    "tree: tokens beyond the vocabulary accepted": ShortcutMutant(FAST, "if token < size and token not in deleted", "if token not in deleted", "traversal", CHOSEN, FORK, vocabularies=(2, 3)),
    "tree: next token at the root": ShortcutMutant(FAST, "_without_all(target_probs[row, node]", "_without_all(target_probs[row, 0]", "traversal", CHOSEN, FORK),
    # decide
    "one uniform for node and token, shortcut": ShortcutMutant(DECIDE, "draw_rows(weights, for_token)", "draw_rows(weights, for_node)"),
    "one uniform for node and token": ShortcutMutant(DECIDE, "next_probs(draft, target_probs, node), both[1])", "next_probs(draft, target_probs, node), both[0])", "tree", shape=(0, 0)),
    "next token of another row, shortcut": ShortcutMutant(DECIDE, "draw_rows(weights, for_token)", "draw_rows(weights.roll(1, 0), for_token)"),
    "next token at another node": ShortcutMutant(DECIDE, "next_probs(draft, target_probs, node)", "next_probs(draft, target_probs, (node - 1).clamp(min=0))", "traversal", shape=(0, 0)),
    # draw
    "no renormalisation": ShortcutMutant(DRAW, "index = (cumulative <= share * total)", "index = (cumulative <= share)", alone=True),
    "draw: one token too far": ShortcutMutant(DRAW, "(cumulative <= share * total).sum(-1, keepdim=True)", "(cumulative <= share * total).sum(-1, keepdim=True) + 1"),
    "draw: blocks without what came before": ShortcutMutant(DRAW, "- start\n    share", "- 0 * start\n    share", shape=(0,), vocabularies=(5, 5), limits=BLOCKS, tensors=True),
    "draw: share of the whole, not of the block": ShortcutMutant(DRAW, "share = left / (ends.gather(-1, block) - start)", "share = left / ends[..., -1:]", shape=(0,), vocabularies=(5, 5), limits=BLOCKS, tensors=True),
    "draw: last entry of a short block twice": ShortcutMutant(DRAW, ".masked_fill_(inside >= size, 0.0)", "", shape=(0,), vocabularies=(5, 5), limits=BLOCKS, tensors=True),
    "draw of one row: blocks without what came before": ShortcutMutant(DRAW, "(u * ends[-1] - before)", "(u * ends[-1])", shape=(0,), alone=True, vocabularies=(5, 5), limits=BLOCKS),
    "draw of one row: share of the whole, not of the block": ShortcutMutant(DRAW, "/ mass if mass else 0.0", "/ ends[-1]", shape=(0,), alone=True, vocabularies=(5, 5), limits=BLOCKS),
    "draw of one row: no renormalisation": ShortcutMutant(DRAW, "    left = share * total\n    return", "    left = share\n    return", shape=(0,), alone=True, vocabularies=(5, 5), limits=BLOCKS),
    "draw of one row: a short last block left out": ShortcutMutant(DRAW, "float(np.add.reduce(wide[count * width :]))", "0.0", shape=(0,), alone=True, vocabularies=(5, 5), limits=BLOCKS),
    "draw of one row: a short last block without what came before": ShortcutMutant(DRAW, "ends.append(ends[-1] + float", "ends.append(float", shape=(0,), alone=True, vocabularies=(5, 5), limits=BLOCKS),
    "draw of one row: a block too far": ShortcutMutant(DRAW, "return block * width + _invert_one", "return max(block - 1, 0) * width + _invert_one", shape=(0,), alone=True, vocabularies=(5, 5), limits=BLOCKS),
    "draw: a short last block left out": ShortcutMutant(DRAW, "rest = probs[..., whole:]", "rest = 0 * probs[..., whole:]", shape=(0,), vocabularies=(5, 5), limits=BLOCKS, tensors=True),
    "draw of many rows: a short last block left out": ShortcutMutant(DRAW, "rest = probs[:, whole * width :]", "rest = 0 * probs[:, whole * width :]", shape=(0,), vocabularies=(5, 5), limits=BLOCKS),
    "draw of many rows: blocks without what came before": ShortcutMutant(DRAW, "np.divide(left - before, mass", "np.divide(left, mass", shape=(0,), vocabularies=(5, 5), limits=BLOCKS),
    "draw of many rows: share of the whole, not of the block": ShortcutMutant(DRAW, "np.divide(left - before, mass", "np.divide(left - before, ends[:, -1]", shape=(0,), vocabularies=(5, 5), limits=BLOCKS),
    "draw of many rows: last entry of a short block twice": ShortcutMutant(DRAW, "weights[inside >= size] = 0.0", "pass", shape=(0,), vocabularies=(5, 5), limits=BLOCKS),
    "draw of many rows: no renormalisation": ShortcutMutant(DRAW, "_invert_many(weights, share * weights[:, -1])", "_invert_many(weights, share)", shape=(0,), vocabularies=(5, 5), limits=BLOCKS),
    "draw of many rows: a block too far": ShortcutMutant(DRAW, "(block * width + _invert_many", "(np.maximum(block - 1, 0) * width + _invert_many", shape=(0,), vocabularies=(5, 5), limits=BLOCKS),
}  # fmt: skip
