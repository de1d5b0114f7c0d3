"""train.py a second time: one answer at a time, without cache, padding, minibatch tricks or pushes.

`train` makes a whole run and returns what its metrics.jsonl must be; the policy has the weights.
"""

import copy
from statistics import fmean
from types import SimpleNamespace

import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

import losses
from llm import credit as rules
from llm.runs import rng


def logp_of(policy, prompt, answer, temperature):
    """(T, V): at every token of the answer, the log-prob of each token of the vocabulary."""
    logits = policy.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def log_probs(policy, rows, temperature):
    """(n, T), 0 on padding."""
    each = [logp_of(policy, x.prompt, x.answer, temperature) for x in rows]
    taken = [logp[range(len(x.answer)), x.answer] for logp, x in zip(each, rows, strict=True)]
    return pad_sequence(taken, batch_first=True)


@torch.no_grad()
def ask(policy, task, items, config, temperature, gen):
    """An answer to each item; a temperature of 0 is greedy."""
    uniform = torch.rand(len(items), config.max_tokens, generator=gen, dtype=torch.float64)
    rows = []
    for item, prompt, numbers in zip(
        items, task.encode(policy.tokenizer, items), uniform, strict=True
    ):
        answer, entropy = [], 0.0
        while len(answer) < config.max_tokens and not (answer and answer[-1] in policy.eos):
            logp = logp_of(policy, prompt, [*answer, 0], temperature or 1.0)[-1].double()
            cumulative = logp.exp().cumsum(-1)
            token = int((cumulative <= numbers[len(answer)] * cumulative[-1]).sum())
            answer.append(token if temperature else int(logp.argmax()))
            entropy -= float(logp.exp() @ logp)
        text = policy.tokenizer.decode([x for x in answer if x not in policy.eos])
        row = SimpleNamespace(item=item, prompt=prompt, answer=answer, text=text, entropy=entropy)
        row.reward = float(task.reward(text, item))
        rows.append(row)
    return rows


def evaluate(policy, task, config):
    items, k = task.test[: config.eval_items], config.eval_samples
    greedy = [x.reward for x in ask(policy, task, items, config, 0.0, rng())]
    copies = [item for item in items for _ in range(k)]
    sampled = ask(policy, task, copies, config, config.temperature, rng(config.seed, "evaluate"))
    rewards = [x.reward for x in sampled]
    return {
        "greedy": fmean(greedy),
        "sampled": fmean(rewards),
        f"pass@{k}": fmean(1 in rewards[i : i + k] for i in range(0, len(rewards), k)),
        "unfinished": 0.0,
        "greedy_by_item": greedy,
        "sampled_by_item": [fmean(rewards[i : i + k]) for i in range(0, len(rewards), k)],
        "examples": [f"{x.item.prompt} -> {x.text}  [{x.reward:g}]" for x in sampled[: 3 * k : k]],
    }


def warm_start(policy, task, method, config):
    optimizer = torch.optim.Adam(policy.model.parameters(), betas=(0.9, 0.95))
    shown = [item for item in task.train if item.demo]
    for step in range(config.warm_steps):
        picks = torch.randint(
            len(shown), (config.warm_rows,), generator=rng(config.seed, "warm", step)
        )
        items = [shown[i] for i in picks]
        if method.repair:
            n = round(0.3 * config.warm_rows)
            items[:n] = [task.correction(x, config.repair_references) for x in items[:n]]
        prompts, end = task.encode(policy.tokenizer, items), [policy.tokenizer.eos_token_id]
        demos = [
            policy.tokenizer(x.demo, add_special_tokens=False)["input_ids"] + end for x in items
        ]
        pairs = zip(prompts, demos, strict=True)
        logps = [logp_of(policy, x, y, 1.0)[range(len(y)), y] for x, y in pairs]
        lr = config.warm_lr * min((step + 1) / 20, 1 - step / config.warm_steps)
        update(policy, optimizer, -torch.cat(logps).mean(), lr, 1.0)


def update(policy, optimizer, loss, lr, longest) -> float:
    optimizer.zero_grad()
    loss.backward()
    norm = clip_grad_norm_(policy.model.parameters(), longest).item()
    optimizer.param_groups[0]["lr"] = lr
    if norm:  # at a gradient of 0, momentum alone must not move the weights
        optimizer.step()
    return norm


def credit(policy, task, rows, R, old, mask, method, step, config):
    """The advantages under a rule of NTHR, AR or IBPO, and what is logged of it."""
    G, facts, more, earned = config.group_size, {}, {}, R

    def padded(values):
        return pad_sequence([torch.as_tensor(x) for x in values], batch_first=True)

    tokens = padded([x.answer for x in rows])
    if method.repair:
        wrong, problems = [i for i, x in enumerate(rows) if x.reward != 1], []
        for i in wrong:
            group = [rows[i - i % G + (i + k) % G] for k in range(1, G)]
            group.sort(key=lambda x: x.reward != 1)  # right ones come first
            texts = [x.text for x in group[: config.repair_references]]
            problems.append(task.repair(rows[i].item, rows[i].text, texts))
        fixed = ask(
            policy, task, problems, config, config.temperature, rng(config.seed, "repair", step)
        )
        facts["repaired"], kept = torch.zeros(len(rows), dtype=torch.bool), [[False]] * len(rows)
        for i, x in zip(wrong, fixed, strict=True):
            facts["repaired"][i] = x.reward == 1
            ids = ([-1 if t in policy.eos else t for t in y.answer] for y in (rows[i], x))
            kept[i] = rules.kept_tokens(*ids)
        facts["kept_mask"] = padded(
            [k + [False] * (len(x.answer) - len(k)) for k, x in zip(kept, rows, strict=True)]
        )
        earned = method.repair(R, facts["repaired"])
        more["repair_rate"] = facts["repaired"].sum().item() / len(wrong)
        more["generated"] = int(mask.sum()) + sum(len(x.answer) for x in fixed)
    known = dict(tokens=tokens, mask=mask, logp=old, rewards=R, group_size=G)
    if method.needs_scores:
        states = [policy.model.base_model(torch.tensor([x.prompt + x.answer])) for x in rows]
        ends = zip(states, rows, strict=True)
        hidden = padded([y.last_hidden_state[0, len(x.prompt) - 1 : -1].detach() for y, x in ends])
        head = policy.model.get_output_embeddings().weight.detach()
        own = dict(hidden=hidden, head=head, temperature=config.temperature)
        facts["scores"], facts["own_scores"] = rules.nthr_scores(**known, **own)
    adv = losses.group_advantages(earned, G, config.scale or method.scale)[:, None] * mask
    return method.credit(adv, losses.OldPolicy(**known, **facts)) * mask, more


def train(policy, task, method, config):
    """A whole run, which changes the policy. Returns the lines of metrics.jsonl."""
    G, tau = config.group_size, config.temperature
    if config.warm_steps:
        warm_start(policy, task, method, config)
    reference, lines = copy.deepcopy(policy), [{"step": 0} | evaluate(policy, task, config)]
    optimizer = torch.optim.Adam(policy.model.parameters(), betas=(0.9, 0.95))
    order = []
    for k in range(config.steps):  # more than enough passes over the split
        gen = rng(config.seed, "order", k)
        order += torch.randperm(len(task.train), generator=gen).tolist()
    for step in range(1, config.steps + 1):
        items = [task.train[i] for i in order[(step - 1) * config.prompts :][: config.prompts]]
        copies = [item for item in items for _ in range(G)]
        rows = ask(policy, task, copies, config, tau, rng(config.seed, "sample", step))
        R = torch.tensor([x.reward for x in rows])
        with torch.no_grad():
            old, ref = (log_probs(x, rows, tau) for x in (policy, reference))
        mask = pad_sequence([torch.ones(len(x.answer)) for x in rows], batch_first=True) > 0
        adv = losses.group_advantages(R, G, config.scale or method.scale)[:, None] * mask
        more = {}
        if method.credit:
            adv, more = credit(policy, task, rows, R, old, mask, method, step, config)
        equal = (adv == 0).view(len(items), -1).all(1)
        norms, far, values = [], [], []
        gen = rng(config.seed, "learn", step)
        for _ in range(config.epochs):
            parts = torch.randperm(len(items), generator=gen).view(config.minibatches, -1)
            for loss_fn in method.passes:
                for chosen in parts:
                    at = torch.cat([torch.arange(g * G, g * G + G) for g in chosen.tolist()])
                    logp = log_probs(policy, [rows[i] for i in at], tau)
                    width = logp.shape[1]
                    now = [x[at, :width] for x in (old, adv, mask, ref)]
                    batch = losses.Batch(logp, *now[:3], G, config.max_tokens, now[3])
                    loss = loss_fn(batch)
                    if config.prefix_baseline:
                        answers = [torch.tensor(rows[i].answer) for i in at]
                        tokens = pad_sequence(answers, batch_first=True)
                        nodes = losses.prefix_nodes(tokens, batch.mask, G)
                        loss = losses.prefix_baseline(loss, batch, nodes)
                    lr = config.lr * (1 - (step - 1) / config.steps)
                    ratio = (logp - now[0]).exp()[now[2]]
                    far.append(((ratio - 1).abs() > 0.2).double().mean().item())
                    values.append(loss.item())
                    norms.append(update(policy, optimizer, loss, lr, config.grad_clip))
        tokens = sum(len(x.answer) for x in rows)
        line = {
            "step": step,
            "lr": lr,
            "reward": R.mean().item(),
            "equal_groups": equal.double().mean().item(),
            "length": tokens / len(rows),
            "truncated": fmean(x.answer[-1] not in policy.eos for x in rows),
            "generated": tokens,
            "entropy": sum(x.entropy for x in rows) / tokens,
            "loss": fmean(values),
            "grad_norm": fmean(norms),
            "clip_share": fmean(far),
        }
        line |= more
        if method.hyper.get("kl"):
            log_q = (ref - old)[mask]
            line["kl"] = (log_q.exp() - log_q - 1).sum().item() / tokens
        if step % config.eval_every == 0 or step == config.steps:
            line |= evaluate(policy, task, config)
        lines.append(line)
    return lines
