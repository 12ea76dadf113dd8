"""What the learner says when it cannot go on."""

from orchestrator.ports import LearnerLost

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
LESS_MEMORY = (
    "Lower learner.max_tokens_per_micro_batch or learner.logprob_chunk_tokens, set learner.gradient_checkpointing=true, "
    "shard over more ranks with learner.zero_stage=3, or train an adapter with learner.lora.rank."
)


class LearnerError(RuntimeError):
    """The learner cannot go on; its one sentence says what, where and what to do."""


class RankLost(LearnerError, LearnerLost):
    """A rank died or no longer answers."""


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out, on a GPU or on a CPU."""
    import torch  # the driver, which reads LearnerError alone, does without

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)
