"""The same losses inside TRL and verl, and an audit of the losses that those two ship."""

from __future__ import annotations

from losses import Method


def refuse_method(name: str, method: Method):
    """ValueError, in one line, for a method that needs what no engine hands to a loss."""
    if method.needs_hidden:
        raise ValueError(
            f"method {name} reads the last hidden states, which engines do not hand on; "
            "use train.py"
        )
    if method.repair:
        raise ValueError(
            f"method {name} makes a second rollout of corrections, which engines do not; "
            "use train.py"
        )
