"""Prompts: where they come from, in what order, and which are held out."""
