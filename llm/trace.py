"""One group of a run in numbers, for reading along (--trace)."""

from __future__ import annotations

import torch

SHOWN = 12  # tokens of an answer; longer ones are cut


@torch.no_grad()
def show_group(policy, updates, config) -> bool:
    """Print a group: what was sampled, how hard each token was pushed, and where pushes cancel.

    updates: of one step, each a train.Update. Of the groups in which rewards differ, it is one in
    which the most answers begin with one token. Where there is none it returns False, so that the
    next step is tried, and says so in the last step of a run.
    """
    best, G = None, updates[0].minibatch.batch.group_size
    # best: how many answers share their first token, the number of the update, and of its group
    for number, made in enumerate(updates):
        mixed = made.minibatch.advantages.view(-1, G).any(1)
        for k in mixed.nonzero().flatten().tolist():
            starts = made.minibatch.nodes[k * G : k * G + G, 0]
            size = starts.unique(return_counts=True)[1].max().item()
            if best is None or size > best[0]:
                best = size, number, k
    if best is None:
        if updates[0].minibatch.answers.step == config.steps:
            print("\nIn every group of every step all rewards were equal, so nothing was pushed.")
        return False
    size, number, k = best
    made, place = updates[number], slice(k * G, k * G + G)
    part, answers = made.minibatch, made.minibatch.answers
    group = part.of(torch.arange(k * G, k * G + G))
    after, _ = policy.scorer(policy, group.answers, config.temperature)
    before, after, c = group.batch.logp_old.cpu(), after.cpu(), made.push[place].cpu()
    A, nodes, mask = (x[place].cpu() for x in (part.advantages, part.nodes, answers.mask))
    tokens, rewards = answers.tokens[place], answers.rewards[place]
    print(f"\nUpdate {number + 1} of step {answers.step}: a group of {G} answers to the prompt")
    print(f"    {answers.items[k * G].prompt}")
    if size < G:
        print(f"{size} of them begin alike: no group that can learn has more in this step.")
    print("push c: how hard the loss lifts a token's log pi. before, after: log pi around the")
    print("step, which learns from other groups, too.\n")
    for i in range(G):
        ids = tokens[i][mask[i].to(tokens.device)].tolist()[:SHOWN]
        end = " ..." if mask[i].sum() > SHOWN else ""
        print(f"answer {i + 1}: reward {rewards[i]:g}, A {A[i]:+.3f}")
        print("  token  " + "".join(f"{show(policy, token):>8}" for token in ids) + end)
        for name, values in (("push c", c[i]), ("before", before[i]), ("after", after[i])):
            print(f"  {name:7}" + "".join(f"{x:8.4f}" for x in values[: len(ids)].tolist()))
    print("\nTokens that answers share, with all that stands before them. With equal weights")
    print("the sums of c are in proportion to those of A: 0 where the whole group shares one.\n")
    print(f"{'sum of A':>9} {'sum of c':>9}  answers and what they share")
    shared = {}  # (answers, sums): their tokens
    for t in range(nodes.shape[1]):
        for node in nodes[:, t][mask[:, t]].unique().tolist():
            who = (nodes[:, t] == node) & mask[:, t]  # (G,)
            if who.sum() > 1:
                ones = who.nonzero().flatten().tolist()
                names = " ".join(str(i + 1) for i in ones)
                sums = round(A[who].sum().item(), 3) + 0.0, round(c[who, t].sum().item(), 4) + 0.0
                line = f"{sums[0]:9.3f} {sums[1]:9.4f}  {names}:"  # + 0.0: no -0
                token = show(policy, tokens[ones[0], t])
                shared[line] = [*shared.get(line, []), token]
    for line, pieces in shared.items():
        print(line, " ".join(pieces))
    print(flush=True)
    return True


def show(policy, token) -> str:
    return policy.tokenizer.decode([int(token)]).replace("\n", "\\n")[:8].strip() or "' '"
