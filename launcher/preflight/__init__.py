"""What is looked at before anything is queued: the cluster, a node of each partition, the dtypes of this machine. Nothing is submitted but probes.
Start with check.py."""
