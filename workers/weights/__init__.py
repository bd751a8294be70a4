"""Versions of the weights as files: how they are laid out, published and fetched."""
