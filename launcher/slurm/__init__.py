"""What SLURM says, as typed records: queue, accounting, states, the site. Questions, never decisions, and nothing is changed by them.
What is submitted stands in jobs/. Start with queries.py."""
