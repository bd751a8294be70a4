"""What a run will give, from its config, the shapes of its model and assumptions: tokens/s, ages, what limits it. Start with forecast.py."""
