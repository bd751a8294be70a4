"""What the coordinator says of itself: status, the reasons for waiting, alarms and what they are made from.
Start with reporting.py."""
