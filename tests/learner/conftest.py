"""The learner's tests run real DeepSpeed ranks, one process each: on CPUs, or on the GPUs there are."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks inherit it
