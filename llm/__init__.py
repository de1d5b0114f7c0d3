"""Language models around train.py: where a policy comes from, credit rules, what keeps a run."""
