"""Starting a run, from its checked config: on SLURM, on this machine, again (resume), an evaluation alone, a self-test.
Everything else of launcher/ serves these. Start with on_slurm.py."""
