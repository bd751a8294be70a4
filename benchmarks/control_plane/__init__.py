"""The coordinator on the wire: groups, leases and heartbeats of many workers over CURVE."""
