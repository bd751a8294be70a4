"""What a journal of the coordinator holds, how it is replayed, and what is audited on the way. Pure: files are read and written in process/.
Start with inputs.py."""
