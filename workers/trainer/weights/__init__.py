"""Publishing a version: every rank's files, their announcement, or broadcasts.
Where it goes then: coordinator/weights/. Start with announcer.py."""
