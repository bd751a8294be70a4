"""`make soak`: thousands of steps of one run, and whether anything grows.

    growth.py  is a series flat?      campaign.py  the run, what is measured, and the table
"""
