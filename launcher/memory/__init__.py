"""Whether a run fits into the memory that it gets, from its config and the shapes of its model. Nothing is measured here.
Start with fit.py."""
