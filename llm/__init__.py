"""A real language model as the policy: loading it, its task GSM8K, the files of a run.

Here is only what the command lines of this repository share: one-line errors, flags from a
dataclass, and methods with the hyperparameters that a user chose.
"""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import NoReturn

import torch

from losses import METHODS, Batch, Method, OldPolicy


def fail(message: str) -> NoReturn:
    """End the program over a user's mistake: one line, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def given_flags(cls, description: str, presets: dict[str, dict], argv: list[str]) -> dict:
    """The fields of the dataclass cls that argv sets, each a flag. A mistake is one line.

    presets: flags -> the defaults that they change, shown by --help.
    """
    from transformers import HfArgumentParser

    changed = ""
    for flags, defaults in presets.items():
        changed += f"Other defaults with {flags}: "
        changed += ", ".join(f"{name} {value}" for name, value in defaults.items()) + ". "
    about = {"usage": "%(prog)s [--FLAG VALUE ...]", "description": description, "epilog": changed}
    parser = HfArgumentParser(cls, allow_abbrev=False, **about)
    parser.error = fail
    unset = Namespace(**{f.name: None for f in fields(cls)})
    given, unknown = parser.parse_known_args(argv, unset)
    if unknown:
        flags = [option for action in parser._actions for option in action.option_strings]
        typed = unknown[0].split("=")[0]
        close = [flag for flag in flags if len(typed) > 4 and flag.startswith(typed)]
        close += difflib.get_close_matches(typed, flags, 1, 0.7)
        hint = f"did you mean {close[0]}?" if close else "--help lists what there is"
        fail(f"unknown argument {unknown[0]}; {hint}")
    return {key: value for key, value in vars(given).items() if value is not None}


def bind(name: str, chosen: dict[str, object], reference: bool = True) -> Method:
    """METHODS[name] with the chosen hyperparameters filled in, and tried on a batch of zeros.

    A value may be text, as on a command line. reference: whether a frozen reference will be there,
    whose log-probs a KL term needs. Raises ValueError for an unknown method, name or value.
    """
    if name not in METHODS:
        raise ValueError(f"method {name!r} does not exist; accepted: {', '.join(METHODS)}")
    method = METHODS[name]
    defaults = {}
    for function in filter(None, (method.credit, method.repair, *method.passes)):
        parameters = inspect.signature(function).parameters.values()
        defaults |= {p.name: p.default for p in parameters if p.default is not p.empty}
    values = {}
    for key, value in chosen.items():
        if key not in defaults:
            accepted = ", ".join(f"{k}={v}" for k, v in defaults.items()) or "none"
            raise ValueError(
                f"method {name} has no hyperparameter {key!r}; accepted, with defaults: {accepted}"
            )
        values[key] = converted(key, value, defaults[key])

    def fill(function: Callable | None) -> Callable | None:
        taken = inspect.signature(function).parameters if function else ()
        own = {key: value for key, value in values.items() if key in taken}
        return partial(function, **own) if own else function

    passes = tuple(fill(loss) for loss in method.passes)
    bound = replace(method, passes=passes, credit=fill(method.credit), repair=fill(method.repair))
    try:
        try_out(bound, reference)
    except ValueError as error:
        given = ", ".join(f"{key}={value}" for key, value in chosen.items())
        raise ValueError(f"{given or name}: {error}") from None
    return bound


def converted(key: str, value: object, default: object) -> object:
    """A chosen value as one of its default's type. Raises ValueError for what is none."""
    if isinstance(default, bool) and str(value) not in ("True", "False"):
        raise ValueError(f"{key}={value}: must be True or False")
    if isinstance(default, bool):
        return str(value) == "True"
    try:
        number = type(default)(value)
    except ValueError:
        raise ValueError(f"{key}={value}: a number is expected") from None
    if isinstance(number, float) and number != default and not 0 <= number < math.inf:
        raise ValueError(f"{key}={value}: must be a finite number, at least 0")
    return number


def try_out(method: Method, reference: bool):
    """Call a method's functions once on zeros: values that only they can judge are refused here."""
    zeros, hidden = torch.zeros(2, 1), torch.zeros(2, 1, 1)
    none = zeros != 0
    for loss in method.passes:
        loss(Batch(zeros, zeros, zeros, ~none, 2, 1, zeros if reference else None))
    if method.repair:
        method.repair(zeros[:, 0], none[:, 0])
    if method.credit:
        old = OldPolicy(none.long(), ~none, zeros, zeros[:, 0], 2, hidden=hidden, head=hidden[0])
        method.credit(zeros, replace(old, kept_mask=none, repaired=none[:, 0]))
