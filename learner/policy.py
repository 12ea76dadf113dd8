"""Makes the policy that training starts from: the model in float32, with an adapter where only that is trained."""

import torch
from torch import nn
from transformers import PreTrainedModel

from configs.schema import Config, LoraConfig
from learner.logprobs import load_model


def load_policy(config: Config) -> nn.Module:
    """Load the masters; parameters that are trained require a gradient."""
    model = load_model(config.model.path, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code)
    return with_adapter(model, config.learner.lora)


def with_adapter(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """Put a LoRA adapter into the model; only it is trained. A LoRA rank of 0 leaves the model as it is."""
    if lora.rank == 0:
        return model
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    targets = lora.targets if lora.targets == "all-linear" else [name.strip() for name in lora.targets.split(",")]
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore (peft scales by any number)
        target_modules=targets,
        lora_dropout=0.0,  # old and new logprobs must be of one policy
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)
