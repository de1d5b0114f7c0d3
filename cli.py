"""Command line from a dataclass: a field is a flag with a line of meaning; a mistake is one line
and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from dataclasses import field, fields


def knob(default, help: str, low: float | None = None, choices: tuple | None = None):
    """A dataclass field that knows its meaning, its smallest value and its accepted values."""
    return field(default=default, metadata={"help": help, "low": low, "choices": choices})


def fail(message: str):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def given_flags(cls, description: str, presets: dict[str, dict], argv: list[str]) -> dict:
    """The fields of dataclass `cls` that argv sets. `presets` are shown in --help beside the
    defaults."""
    parser = Parser(description=description, allow_abbrev=False)
    for f in fields(cls):
        shown = ["none" if f.default in ("", ()) else str(f.default)] + [
            f"{name}: {p[f.name]}" for name, p in presets.items() if f.name in p
        ]
        help = f"{f.metadata['help']} (default {', '.join(shown)})".replace("%", "%%")
        kwargs = dict(default=argparse.SUPPRESS, help=help)
        if isinstance(f.default, bool):
            parser.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, **kwargs)
        elif isinstance(f.default, tuple):
            parser.add_argument(flag(f.name), nargs="+", metavar="NAME=VALUE", **kwargs)
        else:
            choices = f.metadata["choices"]
            kwargs["metavar"] = None if choices else type(f.default).__name__.upper()
            parser.add_argument(flag(f.name), type=type(f.default), choices=choices, **kwargs)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        close = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        fail(
            f"unknown argument {unknown[0]}; "
            + (f"did you mean {close[0]}?" if close else "--help lists what there is")
        )
    return vars(given)


def check_ranges(config):
    for f in fields(config):
        value, low, choices = getattr(config, f.name), f.metadata["low"], f.metadata["choices"]
        if choices and value not in choices:
            fail(f"{flag(f.name)} {value}: must be one of {', '.join(choices)}")
        if low is not None and not low <= value < math.inf:
            fail(f"{flag(f.name)} {value}: must be a finite number, at least {low}")
