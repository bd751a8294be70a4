"""Agents as they are, trained through an OpenAI-compatible endpoint."""
