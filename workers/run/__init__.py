"""The run folder and what processes of a run share through it: files, incarnations, checkpoints. Processes that end with their parent;
the user's own code. No sockets, no torch. Start with folder.py."""
