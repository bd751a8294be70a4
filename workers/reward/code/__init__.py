"""Verifiers that run programs: from a completion to a program, from a reference to tests, and into the sandbox.
The sandbox itself is workers/sandbox/. Start with verifier.py."""
