"""Checkpoints of the run, exports of the model, and conversion between them.
Start with run_saver.py."""
