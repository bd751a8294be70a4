"""The coordinator as a process: all that touches sockets, clock and files. It drives core.py, which touches none.
Start with main.py."""
