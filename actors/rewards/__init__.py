"""Reward functions: built in, and people's own in the interface they were written for, each in a process that can be killed.

    worker.py      the Ray actor: one group -> K rewards, several functions weighted
    process.py     one function's process as its supervisor sees it: deadline, SIGKILL, restart
    child.py       what that process runs
    interfaces.py  TRL, verl, OpenRLHF, ms-swift, told apart by their parameters
    answers.py, shaping.py, remote.py   built in: answers, form and length, rewards and judges behind a URL
"""
