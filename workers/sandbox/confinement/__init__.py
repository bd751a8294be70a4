"""What a process may not do any more: Landlock, seccomp, limits, and which of them this kernel has. The standard library alone.
Start with confine.py."""
