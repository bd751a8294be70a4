"""A run's metrics in the trackers that people look at, beside its own files: Weights & Biases, MLflow, Trackio, Prometheus."""
