"""Inference servers that a rollout worker can start; all speak the same subset of SGLang's HTTP API."""
