"""The trainer's side of the conversation with the coordinator, in threads, and the coordinator's process.
Start with client.py."""
