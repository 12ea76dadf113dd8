"""Decides what happens next; owns the vocabulary (types.py) and says what it needs of the other rooms (ports.py)."""
