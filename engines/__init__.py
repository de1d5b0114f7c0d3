"""The losses of losses.py inside TRL, a script of one's own, and other trainers' defaults."""
