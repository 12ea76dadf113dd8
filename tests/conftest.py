"""What every test runs under: no hub, one thread per process, no one else's cluster; and a tiny model for all rooms."""

import os
from pathlib import Path

import pytest

# At import, before any room is imported; processes that a test starts inherit it.
for name in [name for name in os.environ if name.startswith("RAY_")]:
    del os.environ[name]  # RAY_ADDRESS above all: a test starts its own cluster or none
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random 2-layer Llama with a tokenizer of its own (tests/tiny.py makes other ones)."""
    from tests.tiny import make_tiny_model  # torch and transformers load only where a test asks for the model

    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), tied=True, seed=0)
