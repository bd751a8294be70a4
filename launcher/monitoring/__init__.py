"""A run that goes on: following, status, logs, stopping, and the supervisor that submits again what ended.
Supervision decides in supervisor_policy.py, which is pure, and acts in supervisor.py. Start with watch.py."""
