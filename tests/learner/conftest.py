"""Tiny models and groups for the learner's tests."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
