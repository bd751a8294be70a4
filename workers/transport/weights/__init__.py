"""Weights between nodes: servers, fetchers, their messages, and the pure plan of a fetch.
Start with fetcher.py."""
