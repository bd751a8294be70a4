"""Verifiers: from a completion and a reference to a score. Names and shapes of verifiers stand in registry.py; each is a plain function.
Programs are judged in code/. Start with registry.py."""
