"""The one typed config, as Hydra composes it, and what can be told from it alone: the split of devices, the legal options of sbatch.
No question to SLURM and no file of a run: these are slurm/ and jobs/. Start with schema.py."""
