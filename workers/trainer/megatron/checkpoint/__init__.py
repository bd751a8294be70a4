"""The trainer's state in a folder, so that any layout of ranks loads what another saved.
Start with checkpoint.py."""
