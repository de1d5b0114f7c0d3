"""The same losses inside TRL and verl, for when one GPU is not enough; and an audit of the losses
that those ship.

engines/trl.py, engines/verl.py: any method of METHODS that the engine can honour. engines/audit.py: which of an
engine's own losses cancel on a token that the whole group shares.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial

import torch

from config import pick
from losses import METHODS, Batch, Method, OldPolicy


def bind(name: str, hyper: dict, reference: bool = False) -> Method:
    """METHODS[name] with its hyperparameters filled in and tried; ValueError in one line for what
    no engine honours.

    reference: whether the engine brings the log-probs of a frozen reference, which a KL term needs.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r} does not exist; accepted: {', '.join(METHODS)}")
    method = METHODS[name]
    if method.needs_hidden:
        raise ValueError(
            f"method {name} reads the last hidden states, which engines do not hand on; use train.py"
        )
    if method.repair:
        raise ValueError(
            f"method {name} makes a second rollout of corrections, which engines do not; use train.py"
        )

    functions = [*filter(None, (method.credit, *method.passes))]
    parameters = [
        p
        for f in functions
        for p in inspect.signature(f).parameters.values()
        if p.default is not p.empty
    ]
    if unknown := set(hyper) - {p.name for p in parameters}:
        names = ", ".join(dict.fromkeys(f"{p.name}={p.default}" for p in parameters)) or "none"
        raise ValueError(
            f"method {name} has no hyperparameter {min(unknown)!r}; accepted, with defaults: {names}"
        )
    passes = tuple(partial(f, **pick(hyper, f)) for f in method.passes)
    credit = method.credit and partial(method.credit, **pick(hyper, method.credit))
    zeros = torch.zeros(2, 1)
    for loss in passes:
        loss(Batch(zeros, zeros, zeros, zeros == 0, 2, 1, zeros if reference else None))
    if credit:
        credit(zeros, OldPolicy(zeros, zeros == 0, zeros, zeros[:, 0], 2))
    return replace(method, passes=passes, credit=credit)
