"""Judging a model's answers to held-out prompts: figures with intervals, and runs that do nothing else (run.kind=evaluation)."""
