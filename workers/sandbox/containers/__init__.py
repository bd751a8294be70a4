"""Containers without root, one for each shell command, with a file system in memory, no network, and limits. Start with container.py."""
