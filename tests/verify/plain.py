"""The verifiers' plain definitions: one row, Python numbers, the algorithms as written in their papers.

Each returns the probability of stopping at each node, and the distribution of the next token there. They are slow and
share no code with the library.
"""

from __future__ import annotations

Table = list[list[float]]
"""One distribution for each node."""


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


def success(spare, weight):
    """``S / (S + 1 - w)``; 0/0 counts as 1."""
    return spare / (spare + (1 - weight)) if spare + (1 - weight) > 0 else 1.0


def without(q, token):
    kept = [0.0 if x == token else value for x, value in enumerate(q)]
    total = sum(kept)
    return [value / total for value in kept] if total > 0 else kept


def token(tokens, parents, p: Table, q: Table | None, replacement):
    n, stop, following, reach = len(tokens), [], [], 1.0
    for i in range(n):
        q_i = q[i] if q is not None else one_hot(tokens[i], len(p[i]))
        accept = min(1.0, ratio(p[i][tokens[i]], q_i[tokens[i]]))
        stop.append(reach * (1 - accept))
        following.append(residual(p[i], q_i))
        reach *= accept
    return [*stop, reach], [*following, p[n]]


def block(tokens, parents, p: Table, q: Table | None, replacement):
    n, weight, h, following = len(tokens), 1.0, [], []
    for i in range(n + 1):
        if i == n:
            h.append(weight if n else 1.0)
            following.append(p[n])
            break
        q_i = q[i] if q is not None else one_hot(tokens[i], len(p[i]))
        mass = [max(0.0, weight * a - b) for a, b in zip(p[i], q_i, strict=True)]
        h.append(success(sum(mass), weight) if i else 1.0)
        following.append([m / sum(mass) for m in mass] if sum(mass) > 0 else p[i])
        weight = min(1.0, weight * ratio(p[i][tokens[i]], q_i[tokens[i]]))
    stop, fails = [0.0] * (n + 1), 1.0
    for i in reversed(range(n + 1)):
        stop[i] = fails * h[i]
        fails *= 1 - h[i]
    return stop, following


def tree(tokens, parents, p: Table, q: Table | None, replacement):
    children, n = children_of(parents), len(tokens)
    stop, following = [0.0] * (n + 1), [None] * (n + 1)

    def visit(node, reach):
        p_j, drawn_from = p[node], None if q is None or not children[node] else q[node]
        for child in children[node]:
            x = tokens[child - 1]
            q_j = one_hot(x, len(p_j)) if drawn_from is None else drawn_from
            accept = min(1.0, ratio(p_j[x], q_j[x]))
            visit(child, reach * accept)
            reach *= 1 - accept
            p_j = residual(p_j, q_j)
            if drawn_from is not None and not replacement:
                drawn_from = without(drawn_from, x)
        stop[node], following[node] = reach, p_j

    visit(0, 1.0)
    return stop, following


def kseq(tokens, parents, p: Table, q: Table | None, replacement):
    children, n = children_of(parents), len(tokens)
    stop, following = [0.0] * (n + 1), [None] * (n + 1)

    def beta(p, q, rho):
        return sum(min(b, a / rho) for a, b in zip(p, q, strict=True))

    def tries(accepted, k):
        return sum((1 - accepted) ** j for j in range(k))

    def visit(node, reach):
        p_n, k = p[node], len(children[node])
        if k == 0:
            stop[node], following[node] = reach, p_n
            return
        q_n = one_hot(tokens[children[node][0] - 1], len(p_n)) if q is None else q[node]
        low, high, tolerance = 1.0, float(k), 1 + 2e-15
        if tries(beta(p_n, q_n, 1.0), k) <= tolerance:
            high = 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if tries(beta(p_n, q_n, middle), k) <= middle * tolerance:
                high = middle
            else:
                low = middle
        for child in children[node]:
            x = tokens[child - 1]
            accept = min(1.0, ratio(p_n[x] / high, q_n[x]))
            visit(child, reach * accept)
            reach *= 1 - accept
        g = tries(beta(p_n, q_n, high), k)
        mass = [max(0.0, a - g * min(b, a / high)) for a, b in zip(p_n, q_n, strict=True)]
        stop[node] = reach
        following[node] = [m / sum(mass) for m in mass] if sum(mass) > 0 else p_n

    visit(0, 1.0)
    return stop, following


def traversal(tokens, parents, p: Table, q: Table | None, replacement):
    children, n = children_of(parents), len(tokens)
    stop, following = [0.0] * (n + 1), [None] * (n + 1)
    fails = 1.0

    def visit(node, weight):
        nonlocal fails
        p_j, drawn_from = p[node], None if q is None or not children[node] else q[node]
        for child in children[node]:
            x = tokens[child - 1]
            q_j = one_hot(x, len(p_j)) if drawn_from is None else drawn_from
            visit(child, min(1.0, weight * ratio(p_j[x], q_j[x])))
            mass = [max(0.0, weight * a - b) for a, b in zip(p_j, q_j, strict=True)]
            p_j = [m / sum(mass) for m in mass] if sum(mass) > 0 else p_j
            weight = success(sum(mass), weight)
            if drawn_from is not None and not replacement:
                drawn_from = without(drawn_from, x)
        if node == 0:
            weight = 1.0
        stop[node], following[node] = fails * weight, p_j
        fails *= 1 - weight

    visit(0, 1.0)
    return stop, following


DEFINITIONS = {"token": token, "block": block, "tree": tree, "kseq": kseq, "traversal": traversal}
