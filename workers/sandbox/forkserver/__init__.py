"""The server that starts untrusted programs, and what is said between it, them and their owner. The standard library alone on its side.
Start with client.py."""
