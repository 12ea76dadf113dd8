"""Every knob of rlooper, once, with its default and its unit.

One frozen dataclass per room. A comment beside a key says what it does; `None` means "decided by the estimator" or "off",
as the comment says. Values are checked in `load.py`; nothing writes to a configuration after that.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

# keys of learner.deepspeed that rlooper sets itself (a dot reaches into a section); load.py refuses them
DEEPSPEED_OWNED_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "torch_autocast",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)

# built-in reward functions, and those among them that compare with the row's answer
REWARD_FUNCTIONS = (
    "exact_match", "numeric_match", "math", "gsm8k", "choice", "reasoning_gym", "regex", "tags", "overlong", "length", "judge",
)  # fmt: skip
REWARDS_WITH_ANSWER = ("exact_match", "numeric_match", "math", "gsm8k", "choice", "reasoning_gym")

# what debug.chaos can do to a worker at work: kill -9, stop without dying, answer late, miss a part of a weight sync
FAULTS = (
    "kill_rollout",
    "kill_reward",
    "kill_reference",
    "hang_rollout",
    "hang_reward",
    "hang_reference",
    "slow_reward",
    "drop_sync",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str = MISSING  # Hugging Face folder or hub name of the policy; also the frozen reference
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # engines, reference and published weights; masters stay float32
    trust_remote_code: bool = False  # run Python shipped with the model


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    train: Any = MISSING  # source of training rows (docs/data.md), or several with their shares of the draws: {SOURCE: WEIGHT, ...}
    prompt_column: str | None = None  # a string, or {role, content} messages for the chat template; None: as the known layouts have it
    text_as_chat: bool = False  # a string is the message of a user
    system_prompt: str | None = None  # put before chats without one
    chat_template: str | None = None  # Jinja text, or a file of it; None: the tokenizer's
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of the template: {enable_thinking: false}
    max_prompt_tokens: int = 1024  # after the template
    overlong: Literal["refuse", "filter"] = "refuse"  # what happens to longer prompts; filter: they are left out and counted
    shuffle: bool = True  # a new permutation each epoch, from `seed`
    seed: int = 0  # of the permutation alone


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    advantage_estimator: str = "rloo"  # rloo | reinforce_plus_plus | grpo | reinforce | reinforce_plus_plus_token | path.py:function
    scale_rewards: Literal["group", "batch", "none"] | None = (
        None  # None: group for grpo, batch for reinforce_plus_plus, none otherwise
    )
    whiten_over: Literal["sequence", "token"] = "sequence"  # reinforce_plus_plus: population of its standard deviation
    discount: float = 1.0  # reinforce_plus_plus_token: gamma per response token
    beta: float = 0.04  # KL coefficient; 0 starts no reference worker
    kl_in_reward: bool | None = None  # None: false for grpo, true otherwise. True: k1 summed over the response, before the baseline
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] | None = (
        None  # None: k1 in reward; in the loss k2 for reinforce_plus_plus, k3 otherwise
    )
    kl_target: float | None = None  # nats per sequence; set: beta adapts towards it
    kl_horizon: int = 10000  # samples over which an adaptive beta moves
    reward_clip: float | None = None  # raw rewards are clipped to [-reward_clip, reward_clip] before KL; None: off
    overlong_buffer_tokens: int = 0  # soft overlong penalty over the last so many tokens; 0: off
    overlong_penalty: float = 1.0  # its greatest value
    mask_truncated: bool = False  # samples cut at max_new_tokens leave the loss and the KL
    policy_loss: Literal["ppo_clip", "gspo", "rloo_sequence", "cispo", "reinforce"] = "ppo_clip"  # docs/algorithms.md, "Policy loss"
    clip_low: float = 0.2  # ratio clipped at 1 - clip_low
    clip_high: float = 0.2  # ratio clipped at 1 + clip_high
    dual_clip: float | None = None  # bound c > 1 on the surrogate of negative advantages; None: off
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
    ] = "token_mean"  # how token losses become one number; denominators count the whole step
    entropy_coef: float = 0.0  # entropy bonus; 0: entropy is a metric only
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        None  # importance weight exp(old - rollout); None: none at staleness 0, above it the choice is yours
    )
    correction_ratio: Literal["product", "geometric"] = "product"  # sequence ratio: unbiased product or stable geometric mean
    correction_min: float = 0.0  # masks: smallest ratio kept
    correction_max: float = 2.0  # masks: greatest ratio kept; truncation: cap
    off_policy_mask_delta: float | None = None  # drop A < 0 samples whose mean(rollout - new) exceeds it; None: off
    old_logprobs: Literal["recompute", "rollout"] = "recompute"  # pi_old of ratio and KL: the learner's, or the engine's (saves a forward)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    backend: Literal["vllm", "hf"] = "vllm"  # hf: transformers, for machines where vLLM cannot run
    num_workers: int = 1  # engines
    num_cpus: float = 1.0  # Ray CPUs a worker holds
    num_gpus: float = 0.0  # Ray GPUs a worker holds
    threads: int = 1  # OpenMP threads of a worker
    num_generations: int = 8  # K samples per prompt
    max_new_tokens: int = 256  # response tokens at most
    max_model_len: int = 2048  # context of the engine: prompt and response tokens
    max_concurrent_samples: int = 128  # samples an engine decodes at once
    temperature: float = 1.0  # of training samples; the learner's logprobs are of the same distribution
    top_p: float = 1.0  # nucleus; 1: the full distribution
    top_k: int = 0  # 0: off
    stop_token_ids: list[int] = field(default_factory=list)  # beside every EOS of the model; the token is kept in the sample
    kv_cache_mib: int | None = None  # KV cache of an engine; None: 512 on a CPU, vLLM's choice on a GPU
    environment: str | None = None  # what answers between turns (docs/environments.md): calculator, guessing_game, path.py:Class; None: one turn
    environment_arguments: dict[str, Any] = field(default_factory=dict)  # its keyword arguments
    max_turn_tokens: int | None = None  # of one turn; None: what max_new_tokens leaves, which bounds turns and observations together
    on_sync: Literal["switch", "wait"] = "switch"  # samples in flight at a weight sync go on under the new weights, or finish first
    timeout_s: float = 600.0  # deadline of one group
    engine_args: dict[str, Any] = field(default_factory=dict)  # vLLM's own arguments; keys that rlooper owns are refused


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    num_workers: int = 1  # copies of the frozen model
    num_cpus: float = 1.0  # Ray CPUs a worker holds
    num_gpus: float = 0.0  # Ray GPUs a worker holds
    threads: int = 1  # OpenMP threads of a worker
    timeout_s: float = 600.0  # deadline of one group


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    function: str = "exact_match"  # built in (docs/rewards.md), path.py:function, a /get_reward URL (replicas joined by |); a,b: several; none
    reward_weights: list[float] = field(default_factory=list)  # of the functions, in order; empty: 1 each
    arguments: dict[str, Any] = field(default_factory=dict)  # further keyword arguments, by function: {regex: {pattern: ...}}
    answer_column: str = "answer"  # of the row's right answer: `answer`, `ground_truth`, `label` of the interfaces
    environment: list[str] = field(default_factory=list)  # environment variables that the functions' processes get beside the harmless ones
    num_workers: int = 1  # reward workers, each with one process per function
    num_cpus: float = 1.0  # Ray CPUs a worker holds
    timeout_s: float = 60.0  # after which a call is killed: a group's first; if that fails, each of its samples alone


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    path: str | None = None  # sequence classifier: Hugging Face folder or hub name; None: no reward model
    weight: float = 1.0  # of its score beside the reward functions
    label: str | None = None  # name or number of the output that is the reward, where there are several
    output: Literal["logit", "probability"] = "logit"  # of that output
    template: str | None = None  # with {prompt} and {response}; None: its tokenizer's chat template, else the one after the other
    dtype: Literal["float32", "bfloat16"] = "float32"  # of its weights
    max_tokens_per_batch: int = 8192  # tokens of one forward, padding included
    num_workers: int = 1  # replicas
    num_cpus: float = 1.0  # Ray CPUs a worker holds
    num_gpus: float = 0.0  # Ray GPUs a worker holds
    threads: int = 1  # OpenMP threads of a worker
    timeout_s: float = 600.0  # deadline of one group


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    rank: int = 0  # 0: train all parameters
    alpha: float = 16.0  # the adapter's output is scaled by alpha / rank
    targets: str = "all-linear"  # peft's target_modules, comma separated
    dora: bool = False  # weight-decomposed LoRA
    rslora: bool = False  # scale by alpha / sqrt(rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    num_ranks: int = 1  # data-parallel ranks, one process each
    num_cpus: float = 1.0  # Ray CPUs a rank holds
    num_gpus: float = 0.0  # Ray GPUs a rank holds
    threads: int = 1  # OpenMP threads of a rank
    zero_stage: Literal[0, 1, 2, 3] = 0  # what DeepSpeed shards over ranks: nothing, optimizer, + gradients, + parameters
    lr: float = 1e-6  # peak learning rate
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up, down to 0 at the last update
    warmup_steps: int = 0  # optimizer updates with rising lr
    optimizer: Literal["adamw", "sgd"] = "adamw"  # torch's, fused
    adam_betas: tuple[float, float] = (0.9, 0.999)  # decay of the first and second moment
    weight_decay: float = 0.0  # decoupled, per unit of lr
    grad_clip: float = 1.0  # greatest gradient norm; 0: off
    num_mini_batches: int = 1  # optimizer updates per pass over a step's groups
    num_epochs: int = 1  # passes over a step's groups
    max_tokens_per_micro_batch: int = 4096  # tokens of one forward, after packing
    shared_prompt: bool = True  # compute the prompt of a group once for its K samples, where it pays
    logprob_chunk_tokens: int = 512  # positions of which logits exist at one time
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    offload_optimizer: bool = False  # optimizer state in CPU memory (ZeRO 1 to 3)
    offload_parameters: bool = False  # parameters in CPU memory (ZeRO 3)
    max_skipped_updates: int = 3  # consecutive non-finite updates after which the run ends
    timeout_s: float = 1800.0  # deadline of one phase
    lora: LoraConfig = field(default_factory=LoraConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's own keys; keys that rlooper owns are refused


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    num_steps: int = 100  # passes of the loop
    prompts_per_step: int = 16  # P groups per step
    max_staleness: int = 0  # a group was started at most so many versions before it is trained; 0: strictly on-policy
    max_refill: int = 0  # dynamic sampling: groups a step may start in the place of those whose rewards are all equal; 0: off
    seed: int = 0  # of sampling
    output_dir: str = "runs/default"  # run folder
    resume: str = "never"  # never; auto: the newest complete checkpoint of the run folder, if any; or a checkpoint's folder
    resume_allow: list[str] = field(default_factory=list)  # keys that may differ from the checkpoint's configuration
    max_restarts: int = 3  # times that a learner whose rank died is started again from the newest checkpoint; 0: the run ends
    sample_table_every: int = 5  # steps between tables of samples; 0: off


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    data: Any = None  # held-out rows: a source (docs/data.md), or several by name ({NAME: SOURCE, ...}); None: no evaluation
    every: int = 0  # steps between evaluations; 0: before and after only
    max_prompts: int = 512  # rows of each dataset, from its start
    sampled: bool = True  # with the training temperature
    num_samples: int = 1  # n, samples per prompt with the training temperature; above 1 also pass@k for k = 1, 2, 4, ..., n and maj@n
    solved_at: float = 1.0  # reward from which a response counts as right in pass@k and maj@n
    greedy: bool = True  # temperature 0, one sample per prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 0  # steps between checkpoints, and one after the last step; 0: none
    keep_last: int = 2  # older ones are removed
    mirror: str | None = None  # fsspec URL to which each is copied, and from which train.resume=auto fetches what is newer; None: off
    keep_best: str | None = None  # metric (eval/greedy/reward_mean) whose best step is saved and kept beside them; None: off


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    address: str = "local"  # local: a private Ray; auto: the running one; HOST:PORT
    num_cpus: int | None = None  # CPUs of a private Ray; None: all
    describe: str | None = None  # YAML file of a cluster (`nodes: [{count: 4, cpus: 96, gpus: 8}]`) that the run must fit; None: any
    placement: Literal["disaggregated", "colocated"] = "disaggregated"  # colocated: engine i shares node and devices with rank i
    wait_for_nodes_s: float = 0.0  # how long a cluster that scales by itself may take to grow to what the run asks
    network_interface: str | None = None  # of NCCL and gloo between the learner's ranks, such as eth0; None: their choice
    start_timeout_s: float = 600.0  # until every worker is ready
    heartbeat_timeout_s: float = 120.0  # a worker that gives no sign of life, or makes no progress, for so long is replaced


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugConfig:
    chaos: list[str] = field(default_factory=list)  # faults on purpose, each `fault@step`: FAULTS lists them


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
