"""From a plan to arrays in the queue: specifications, the text for sbatch, submission (the only importer of submitit), jobs.json, what still lives.
Who starts a run is launch/; who keeps it going is monitoring/. Start with job_specs.py."""
