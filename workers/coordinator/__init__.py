"""Ledger, staleness, buffer, registry: pure state machines, and the process that drives them."""
