"""Sockets, keys, rendezvous: the only package that imports zmq."""
