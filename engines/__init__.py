"""The same losses inside TRL and verl, and an audit of the losses that those two ship."""

from __future__ import annotations

from losses import Method, bind


def bind_method(name: str, hyper: dict[str, object]) -> Method:
    """losses.bind. ValueError, in one line, also for what no engine hands to a loss."""
    method = bind(name, hyper, reference=False)
    missing = {
        "reads the last hidden states": method.needs_scores,
        "makes a second rollout of corrections": method.repair,
    }
    for what, needed in missing.items():
        if needed:
            raise ValueError(f"method {name} {what}, which engines do not; use train.py")
    return method
