"""Containers without root, for shell commands: one for each command, with a file system in memory, no network, and limits. Start with container.py."""
