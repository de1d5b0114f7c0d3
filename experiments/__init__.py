"""What was measured, and the programs that measured it."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """As llm.fail, which would import torch: reading runs back must not take its seconds."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
