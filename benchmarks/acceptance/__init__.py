"""What a machine with GPUs must show (`make gpu`, `make gpu8`): each check is a program of its own, and tells one figure with its reference.
Start with checks.py."""
