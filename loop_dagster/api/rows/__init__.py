"""Answers in the public client's field names, made from the stores' records; fields without a source are in gaps.py."""
