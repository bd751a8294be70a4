"""Attacks on a run: what strangers, holders of the key and broken workers can send to every server that it opens, for as long as is wanted."""
