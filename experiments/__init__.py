"""Comparisons of methods, and benches. README.md has the results, each with its command."""
