"""New weights in a rollout worker: fetching them, by whichever way, and loading them into its engines.
The sockets are transport/weights/. Start with updates.py."""
