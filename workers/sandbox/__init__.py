"""The sandbox for programs that the model wrote. What others use is in sandbox.py; what the server imports is the standard library alone."""
