"""What SLURM says, as typed records: queue, accounting, states, the site. Questions and single commands, never decisions. What is
submitted stands in jobs/. Start with queries.py."""
