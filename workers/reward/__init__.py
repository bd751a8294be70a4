"""Rewards: the verifiers, and the pool of killable processes that runs them beside generation."""
