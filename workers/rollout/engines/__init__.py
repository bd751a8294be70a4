"""The engines of a rollout worker: their servers as processes, their HTTP API, routing, interruption for new weights.
What is generated for whom is leases/ and workflows/. Start with engine_pool.py."""
