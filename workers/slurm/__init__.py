"""An element of a job array and SLURM: its life, its signals, how its time ends, running SLURM's commands.
What the element does meanwhile is rollout/, trainer/, reward/ or evaluation/. Start with element.py."""
