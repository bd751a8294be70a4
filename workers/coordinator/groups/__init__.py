"""A group of samples from its prompt to the buffer: ledger, leases, staleness, concurrency, results, held-out prompts. Pure.
Start with ledger.py."""
