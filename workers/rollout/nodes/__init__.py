"""A replica over several nodes: the rollout worker's view of its other nodes (other_nodes.py), and what runs there (node.py)."""
