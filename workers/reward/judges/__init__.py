"""Judges: a chat endpoint that scores answers. What is asked and read (question.py) and when it may be asked (call_policy.py) are pure;
judge_client.py has the sockets. Start there."""
