"""Ranks and their groups: process groups, collectives, what ranks tell each other, giving up a step together, running without CUDA.
Start with process_group.py."""
