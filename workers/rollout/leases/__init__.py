"""What a rollout worker does with a lease: running its samples, handing in results, giving back what it cannot finish.
Start with lease_runner.py."""
