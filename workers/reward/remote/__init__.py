"""Verifiers on nodes of their own (reward.placement=array): the element that serves them, the client and its balance in rollout workers.
Start with service.py."""
