"""The losses of losses.py inside TRL, a script of one's own, and an audit of what engines ship."""
