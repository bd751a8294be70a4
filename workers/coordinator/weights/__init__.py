"""Which version goes where, by which way and in which order: the fan-out tree, permits to load, broadcasts. Pure.
The bytes travel in transport/weights/. Start with delivery.py."""
