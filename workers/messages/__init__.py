"""Typed messages and their encoding; knows no sockets."""
