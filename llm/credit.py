"""What two neighbours need of a language model beyond log-probs, once a rollout batch.

NTHR scores every token by its hidden state. IBPO has the policy correct its wrong answers. The
rules that use this, `nthr` and `ibpo`, are in losses.py beside the other methods.
"""

from __future__ import annotations

from difflib import SequenceMatcher

import torch
from torch import Tensor

from losses import OldPolicy, group_advantages


def assign(policy, task, rollout, method, config, ask, read_answers, gen) -> dict[str, float]:
    """Put rollout.adv, (N, T), under the method's credit rule. Returns more to log.

    Under ibpo the policy first corrects its wrong answers, and a wrong one earns a part of the
    reward if its correction is right. ask and read_answers are train.py's, and gen has the random
    numbers of ask.
    """
    metrics, facts, rewards = {}, {}, rollout.rewards
    if method.repair:

        def ask_again(problems):
            return ask(policy, task, problems, config, config.temperature, gen)

        facts, sampled = correct(rollout, task, config, ask_again, policy.eos)
        earned = method.repair(rewards, facts["repaired"])
        A = group_advantages(earned, config.group_size, config.scale or method.scale)  # (N,)
        rollout.adv = A[:, None].expand_as(rollout.mask)
        wrong = (rewards != 1).sum().clamp(min=1)
        metrics["repair_rate"] = (facts["repaired"].sum() / wrong).item()
        metrics["generated"] = int(rollout.mask.sum()) + sampled  # tokens, corrections included
    old = OldPolicy(
        tokens=rollout.tokens,
        mask=rollout.mask,
        logp=rollout.logp_old,
        rewards=rewards,
        group_size=config.group_size,
        **facts,
    )
    if method.needs_scores:
        add_scores(old, policy, rollout, config, read_answers)
    rollout.adv = method.credit(rollout.adv, old)
    return metrics


# ---------------- NTHR: how much a token's push moves the correct answers


@torch.no_grad()
def nthr_scores(
    *,
    tokens: Tensor,
    mask: Tensor,
    logp: Tensor,
    rewards: Tensor,
    hidden: Tensor,
    head: Tensor,
    group_size: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The scores s = g^T M h of all tokens, and the part that an answer's own tokens have in them.

    M = sum of g h^T over the tokens of the group's correct answers (rewards == 1). h is the last
    hidden state, which predicts the token; hidden is (N, T, d). g = e_y - pi(.|h) is the prediction
    error, on the ids V* that occur in the group's answers, or with full_vocab on all ids. Its pi
    has the full denominator either way, through logp. head is (V, d), with logits = h head^T /
    temperature. One matrix M replaces the double sum of <g,g'> <h,h'> (N4, D). A correct token's
    score includes its own answer's part; a wrong one's own part is 0.

    Scores are 0 on padding, and in groups without correct or without wrong answers. At least fp32;
    needs (G, T, |V*|) numbers at a time. NTHR Eq. 7 (P). (N, T) both.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    scores = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    own_scores, correct = torch.zeros_like(scores), rewards == 1
    for group in torch.arange(len(mask), device=mask.device).split(group_size):
        right, seen, ids = correct[group], mask[group], tokens[group]
        if right.all() or not right.any() or not seen.any():
            continue
        h = hidden[group].to(dtype)  # (G, T, d)
        known = ids[seen].unique()  # V*
        place = torch.searchsorted(known, ids.contiguous()).clamp(max=len(known) - 1)[..., None]
        z = h @ head[known].to(dtype).T / temperature  # (G, T, |V*|)
        log_pi = z - z.gather(2, place) + logp[group, :, None]  # logp has the full denominator
        g = -log_pi.exp()
        g.scatter_add_(2, place, torch.ones_like(g[..., :1]))  # e_y - pi
        of_correct = seen & right[:, None]  # (G, T)
        M = g[of_correct].T @ h[of_correct]  # (|V*|, d)
        scores[group] = ((g @ M) * h).sum(2)
        g, h = (x.masked_fill(~of_correct[..., None], 0.0) for x in (g, h))
        own_scores[group] = ((g @ g.mT) * (h @ h.mT)).sum(2)  # over pairs of one answer's tokens
    return scores.masked_fill(~mask, 0.0), own_scores.masked_fill(~mask, 0.0)


@torch.no_grad()
def add_scores(old, policy, answers, config, read_answers):
    """Fill in old.scores and old.own_scores, an OldPolicy's, for the answers of a policy.

    Raises ValueError for an output layer with a bias.
    """
    head, config_of = policy.model.get_output_embeddings(), policy.model.config.get_text_config()
    cap = getattr(config_of, "final_logit_softcapping", None)
    if getattr(head, "bias", None) is not None or cap:
        raise ValueError("its scores know no bias in the output layer, and no cap behind it")
    hidden = torch.zeros(*answers.mask.shape, head.weight.shape[1], device=head.weight.device)
    for rows in torch.arange(len(hidden)).split(config.micro_rows):
        part = read_answers(policy, answers.of(rows))  # (rows, t, d)
        hidden[rows, : part.shape[1]] = part.float()
    old.scores, old.own_scores = nthr_scores(
        tokens=old.tokens,
        mask=old.mask,
        logp=old.logp,
        rewards=old.rewards,
        hidden=hidden,
        head=head.weight.detach(),
        group_size=old.group_size,
        temperature=config.temperature,
    )


# ---------------- IBPO: the policy corrects its wrong answers


def correct(answers, task, config, ask, eos: Tensor) -> tuple[dict[str, Tensor], int]:
    """The second rollout: each wrong answer is shown beside siblings, and asked for again.

    Right siblings come first. ask(problems) returns the answers of the same policy. eos: (E,) the
    ids that end an answer, all of which count as one. Returns what an OldPolicy knows of it (which
    answers are `repaired`, (N,), and which of their tokens the correction kept, `kept_mask`,
    (N, T)), and how many tokens were sampled.
    """
    rewards, G, problems = answers.rewards, config.group_size, []
    wrong = (rewards != 1).nonzero().flatten()
    for i in wrong.tolist():
        siblings = [i - i % G + (i + k) % G for k in range(1, G)]
        siblings.sort(key=lambda j: rewards[j].item() != 1)
        shown = [answers.texts[j] for j in siblings[: config.repair_references]]
        problems.append(task.repair(answers.items[i], answers.texts[i], shown))
    repaired = torch.zeros_like(rewards, dtype=torch.bool)
    kept_mask = torch.zeros_like(answers.mask)
    sampled = 0
    if problems:
        fixed = ask(problems)
        repaired[wrong] = fixed.rewards == 1
        sampled = int(fixed.mask.sum())
        before, after = (
            torch.where(torch.isin(tokens, eos), eos[0], tokens).tolist()
            for tokens in (answers.tokens[wrong], fixed.tokens)
        )
        lengths = answers.mask[wrong].sum(1).tolist(), fixed.mask.sum(1).tolist()
        for i, answer, other, n, m in zip(wrong.tolist(), before, after, *lengths, strict=True):
            kept_mask[i, :n] = torch.tensor(kept_tokens(answer[:n], other[:m]))
    return {"repaired": repaired, "kept_mask": kept_mask}, sampled


def kept_tokens(answer: list[int], other: list[int]) -> list[bool]:
    """Which tokens of an answer stay when it is edited into another one, by difflib's matches."""
    kept = [False] * len(answer)
    for a, _, n in SequenceMatcher(None, answer, other, autojunk=False).get_matching_blocks():
        kept[a : a + n] = [True] * n
    return kept
