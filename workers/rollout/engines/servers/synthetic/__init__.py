"""The synthetic engine: the embedded engine's server and scheduler over a latency and length model, without a neural network."""
