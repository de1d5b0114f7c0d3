"""To whoever changes a credit rule of llm/neighbours.py: its edit distance, as plainly."""

from functools import cache


def kept(a, b):
    """Which tokens of a stay when it becomes b, by the fewest edits and then with the most kept."""

    @cache
    def best(t, u):  # of the first t tokens into the first u: edits, minus how many stay, which
        if not (t and u):
            return t + u, 0, (False,) * t
        same = a[t - 1] == b[u - 1]
        ways = [(best(t - 1, u - 1), (same,))]
        if not same:  # then it is substituted, deleted, or the other one inserted
            ways += [(best(t - 1, u), (False,)), (best(t, u - 1), ())]
        (edits, minus, stays), last = min(ways, key=lambda way: way[0][:2])
        return edits + 1 - same, minus - same, stays + last

    return best(len(a), len(b))[2]
