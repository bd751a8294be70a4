"""What people see of plans, runs, queues and evaluations, as text for a terminal. Pure but for files that are read; nothing is decided here.
The page of a run is report/. Start with run_view.py."""
