"""Everything that runs on compute nodes: coordinator, rollout, reward, trainer and what joins them."""
