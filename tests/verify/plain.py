"""The verifiers' plain definitions: one row, Python numbers, the algorithms as their papers walk them.

Each returns the probability of stopping at each node, and the law of the next token there. Slow, and written without
a look at the tensors of the library: what the two agree on is right, or wrong in the same way twice.
"""

from __future__ import annotations

Laws = list[list[float]]


def residual(p, q):
    mass = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    total = sum(mass)
    return [m / total for m in mass] if total > 0 else list(p)


def one_hot(token, size):
    return [float(x == token) for x in range(size)]


def children_of(parents):
    children = [[] for _ in range(len(parents) + 1)]
    for i, parent in enumerate(parents):
        children[parent].append(i + 1)
    return children


def ratio(p, q):
    return p / q if q > 0 else (0.0 if p == 0 else float("inf"))


def coin(left, weight):
    return left / (left + (1 - weight)) if left + (1 - weight) > 0 else 1.0


def without(q, token):
    kept = [0.0 if x == token else value for x, value in enumerate(q)]
    total = sum(kept)
    return [value / total for value in kept] if total > 0 else kept


def token(tokens, parents, p: Laws, q: Laws | None, replacement):
    n, stop, laws, reach = len(tokens), [], [], 1.0
    for i in range(n):
        law = q[i] if q is not None else one_hot(tokens[i], len(p[i]))
        accept = min(1.0, ratio(p[i][tokens[i]], law[tokens[i]]))
        stop.append(reach * (1 - accept))
        laws.append(residual(p[i], law))
        reach *= accept
    return [*stop, reach], [*laws, p[n]]


def block(tokens, parents, p: Laws, q: Laws | None, replacement):
    n, weight, coins, laws = len(tokens), 1.0, [], []
    for i in range(n + 1):
        if i == n:
            coins.append(weight if n else 1.0)
            laws.append(p[n])
            break
        law = q[i] if q is not None else one_hot(tokens[i], len(p[i]))
        mass = [max(0.0, weight * a - b) for a, b in zip(p[i], law, strict=True)]
        coins.append(coin(sum(mass), weight) if i else 1.0)
        laws.append([m / sum(mass) for m in mass] if sum(mass) > 0 else p[i])
        weight = min(1.0, weight * ratio(p[i][tokens[i]], law[tokens[i]]))
    stop, fails = [0.0] * (n + 1), 1.0
    for i in reversed(range(n + 1)):
        stop[i] = fails * coins[i]
        fails *= 1 - coins[i]
    return stop, laws


def tree(tokens, parents, p: Laws, q: Laws | None, replacement):
    children, n = children_of(parents), len(tokens)
    stop, laws = [0.0] * (n + 1), [None] * (n + 1)

    def visit(node, reach):
        law, drawn = p[node], None if q is None or not children[node] else q[node]
        for child in children[node]:
            x = tokens[child - 1]
            from_ = one_hot(x, len(law)) if drawn is None else drawn
            accept = min(1.0, ratio(law[x], from_[x]))
            visit(child, reach * accept)
            reach *= 1 - accept
            law = residual(law, from_)
            if drawn is not None and not replacement:
                drawn = without(drawn, x)
        stop[node], laws[node] = reach, law

    visit(0, 1.0)
    return stop, laws


def kseq(tokens, parents, p: Laws, q: Laws | None, replacement):
    children, n = children_of(parents), len(tokens)
    stop, laws = [0.0] * (n + 1), [None] * (n + 1)

    def beta(law, drawn, rho):
        return sum(min(b, a / rho) for a, b in zip(law, drawn, strict=True))

    def tries(share, k):
        return sum((1 - share) ** j for j in range(k))

    def visit(node, reach):
        law, k = p[node], len(children[node])
        if k == 0:
            stop[node], laws[node] = reach, law
            return
        drawn = one_hot(tokens[children[node][0] - 1], len(law)) if q is None else q[node]
        low, high, grant = 1.0, float(k), 1 + 2e-15
        if tries(beta(law, drawn, 1.0), k) <= grant:
            high = 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if tries(beta(law, drawn, middle), k) <= middle * grant:
                high = middle
            else:
                low = middle
        for child in children[node]:
            x = tokens[child - 1]
            accept = min(1.0, ratio(law[x] / high, drawn[x]))
            visit(child, reach * accept)
            reach *= 1 - accept
        g = tries(beta(law, drawn, high), k)
        mass = [max(0.0, a - g * min(b, a / high)) for a, b in zip(law, drawn, strict=True)]
        stop[node] = reach
        laws[node] = [m / sum(mass) for m in mass] if sum(mass) > 0 else law

    visit(0, 1.0)
    return stop, laws


def traversal(tokens, parents, p: Laws, q: Laws | None, replacement):
    children, n = children_of(parents), len(tokens)
    stop, laws = [0.0] * (n + 1), [None] * (n + 1)
    fails = 1.0

    def visit(node, weight):
        nonlocal fails
        law, drawn = p[node], None if q is None or not children[node] else q[node]
        for child in children[node]:
            x = tokens[child - 1]
            from_ = one_hot(x, len(law)) if drawn is None else drawn
            visit(child, min(1.0, weight * ratio(law[x], from_[x])))
            mass = [max(0.0, weight * a - b) for a, b in zip(law, from_, strict=True)]
            law = [m / sum(mass) for m in mass] if sum(mass) > 0 else law
            weight = coin(sum(mass), weight)
            if drawn is not None and not replacement:
                drawn = without(drawn, x)
        if node == 0:
            weight = 1.0
        stop[node], laws[node] = fails * weight, law
        fails *= 1 - weight

    visit(0, 1.0)
    return stop, laws


RULES = {"token": token, "block": block, "tree": tree, "kseq": kseq, "traversal": traversal}
