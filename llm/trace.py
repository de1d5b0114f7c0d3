"""One group of the first step in numbers, for reading along (--trace)."""

from __future__ import annotations

from torch import Tensor

SHOWN = 12  # tokens of an answer; longer ones are cut


def show_group(policy, scored, made, after: Tensor):
    """Print a group: what was sampled, how hard each token is pushed, and where pushes cancel.

    made: the first update of a step, a train.Update, in which every ratio is 1. It is a group of
    that update in which rewards differ. after: (N, T) log pi when all updates of the step are done,
    those on other groups included.
    """
    answers, batch, G = scored.answers, scored.batch, scored.batch.group_size
    advantages = scored.advantages[made.rows].view(-1, G)
    mixed = advantages.any(1).nonzero().flatten().tolist()
    print(f"\nThe first update of step {answers.step}: {len(advantages)} groups of {G} answers")
    print(f"loss {made.loss:.4f}, gradient norm {made.grad_norm:.4f}")
    if not mixed:
        print("In each of them all answers have one reward, so all advantages are 0.")
        return
    # The one in which most answers begin alike.
    starts = scored.nodes[made.rows, 0].view(-1, G)
    first = G * max(mixed, key=lambda k: starts[k].unique(return_counts=True)[1].max().item())
    rows = made.rows[first : first + G].tolist()
    c, A = made.coefficients[first : first + G].cpu(), scored.advantages[rows].cpu()
    print(f"\nOne of these groups: {answers.items[rows[0]].prompt}")
    print("push c: how hard the loss lifts a token's log pi. after: log pi after the step.\n")
    for number, row in enumerate(rows, start=1):
        ids = answers.tokens[row][answers.mask[row]].tolist()[:SHOWN]
        end = " ..." if answers.mask[row].sum() > SHOWN else ""
        print(f"answer {number}: reward {answers.rewards[row]:g}, A {A[number - 1]:+.3f}")
        print("  token  " + "".join(f"{show(policy, i):>8}" for i in ids) + end)
        for name, values in (
            ("push c", c[number - 1]),
            ("log pi", batch.logp_old[row]),
            ("after", after[row]),
        ):
            print(f"  {name:7}" + "".join(f"{x:8.4f}" for x in values[: len(ids)].tolist()))
    print("\nTokens that answers share, with all that stands before them. With equal weights")
    print("the sums of c are in proportion to those of A: 0 where the whole group shares one.\n")
    print(f"{'sum of A':>9} {'sum of c':>9}  answers and what they share")
    nodes, mask = scored.nodes[rows].cpu(), answers.mask[rows].cpu()
    shared = {}  # (answers, sums): their tokens
    for place in range(nodes.shape[1]):
        for node in nodes[:, place][mask[:, place]].unique().tolist():
            who = (nodes[:, place] == node) & mask[:, place]  # (G,)
            if who.sum() > 1:
                ones = who.nonzero().flatten()
                token = show(policy, answers.tokens[rows[ones[0]], place])
                sums = A[who].sum(), c[who, place].sum()
                names = " ".join(str(i + 1) for i in ones.tolist())
                line = f"{sums[0]:9.3f} {sums[1]:9.4f}  {names}:"
                shared[line] = [*shared.get(line, []), token]
    for line, pieces in shared.items():
        print(line, " ".join(pieces))
    print(flush=True)


def show(policy, token) -> str:
    return policy.tokenizer.decode([int(token)]).replace("\n", "\\n")[:8].strip() or "' '"
