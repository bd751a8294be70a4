"""The embedded engine against transformers, one request after the other: `python -m benchmarks.engine`; child.py starts engines for others."""
