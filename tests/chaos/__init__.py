"""`make chaos`: a run on a local SLURM cluster where something breaks every 20 seconds.

    schedule.py  what breaks when, by a seed     faults.py  how it is broken and mended     campaign.py  the run, and what is judged after it
"""
