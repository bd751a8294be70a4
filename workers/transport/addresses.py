"""Which address a node is reached at by the others."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket

import psutil

from workers.config import ConfigError


def address_of(interface: str) -> str:
    """The IPv4 address meant by `transport.interface`: 'auto' (what this node's name stands for), an interface's name, or an address.

    Raises `ConfigError` where the others could not reach it.
    """
    if interface == "auto":
        return _own_address()
    try:
        return str(ipaddress.IPv4Address(interface))
    except ipaddress.AddressValueError:
        pass
    found = [entry.address for entry in psutil.net_if_addrs().get(interface, []) if entry.family == socket.AF_INET]
    if not found:
        raise ConfigError(f"transport.interface={interface!r}: this node has no such interface with an IPv4 address. Use 'auto', an address, "
                          f"or one of {', '.join(sorted(psutil.net_if_addrs()))}")
    return found[0]


def interface_of(address: str) -> str:
    """The name of the interface with this IPv4 address. Raises `ConfigError` if there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise ConfigError(f"transport.interface: no interface of this node has the address {address}. Name one in transport.interface")


async def reach(address: str, port: int, timeout_s: float) -> str:
    """Why nobody takes connections at address:port within `timeout_s` seconds; '' where somebody does."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address, port)
        writer.close()
    except OSError as error:
        return f"{address}:{port} cannot be reached ({str(error) or type(error).__name__})"
    return ""


def _own_address() -> str:
    # SLURM's name for the node first: it is what the cluster's other nodes know it by.
    for name in filter(None, (os.environ.get("SLURMD_NODENAME"), socket.gethostname())):
        try:
            address = socket.gethostbyname(name)
        except OSError:
            continue
        if not ipaddress.IPv4Address(address).is_loopback:
            return address
    raise ConfigError("transport.interface='auto': this node's name stands for no address that other nodes can reach. Name the interface "
                      f"(one of {', '.join(sorted(psutil.net_if_addrs()))}) in transport.interface")
