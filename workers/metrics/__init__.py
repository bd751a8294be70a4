"""What a run measures: one JSON line a step, TensorBoard, the summary."""
