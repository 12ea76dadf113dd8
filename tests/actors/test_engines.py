"""The contract of a generation engine, on vLLM and on transformers alike."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engine import Engine, EngineError, SampleRequest
from actors.rollout import EngineThread, build_engine, sample_seed
from configs.load import load
from orchestrator.types import TensorMeta, WeightBucket, WeightVersion
from tests.tiny import make_tiny_model, overrides

PROMPT = (3, 12, 4, 14)
CASES = [("hf", True), ("hf", False), ("vllm", True), ("vllm", False)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}")
def made(request, tmp_path_factory):
    """An engine, and the Hugging Face model that it must agree with."""
    backend, tied = request.param
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), tied=tied)
    config = load([*overrides(folder, folder, folder), f"rollout.backend={backend}"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return build_engine(config, stop_token_ids=(0, 5)), model


def sample(engine: Engine, count: int = 8, temperature: float = 0.7, prompt=PROMPT, step_hook=lambda n: None):
    for i in range(count):
        engine.add(SampleRequest(key=str(i), prompt_token_ids=prompt, temperature=temperature, max_tokens=8, seed=sample_seed(0, 1, i)))
    finished, steps = [], 0
    while engine.busy():
        assert (steps := steps + 1) < 100
        step_hook(steps)
        finished += engine.step()
    return sorted(finished, key=lambda s: int(s.key))


def logprobs_of(model, prompt, tokens, temperature):
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def bucket_of(model, leave_out: str = "") -> WeightBucket:
    metas, parts, offset = [], [], 0
    for name, parameter in model.named_parameters():
        if name == leave_out:
            continue
        data = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()
        gap = np.zeros(-offset % 64, dtype=np.uint8)
        offset += len(gap)
        metas.append(TensorMeta(name=name, dtype="float32", shape=tuple(parameter.shape), offset=offset))
        parts += [gap, data]
        offset += len(data)
    flat = np.concatenate(parts)
    flat.flags.writeable = False  # as it comes out of the object store
    return WeightBucket(tensors=tuple(metas), data=flat)


def change(model, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def load_into(engine: Engine, model, steps: int) -> None:
    engine.begin_load()
    engine.load_bucket(bucket_of(model))
    engine.finish_load(WeightVersion(steps=steps, digest=""))


def test_logprobs_are_of_the_sampling_distribution(made):
    engine, model = made
    for finished in sample(engine):
        expected = logprobs_of(model, PROMPT, finished.token_ids, 0.7)
        assert np.abs(finished.logprobs - expected).max() < 1e-4


def test_a_seed_decides_a_sample_whatever_else_runs(made):
    engine, _ = made
    eight, three = sample(engine, 8), sample(engine, 3)
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(eight, three, strict=False))
    assert len({tuple(s.token_ids) for s in eight}) > 1


def test_samples_end_by_stop_token_or_length(made):
    engine, _ = made
    samples = sample(engine, 32, temperature=2.0)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    for finished in samples:
        stopped = finished.token_ids[-1] in (0, 5)
        assert finished.finish_reason == ("stop" if stopped else "length")
        assert len(finished.token_ids) == 8 or stopped
        assert not np.isin(finished.token_ids[:-1], (0, 5)).any()


def test_greedy_takes_the_likeliest_token(made):
    engine, model = made
    (finished,) = sample(engine, 1, temperature=0)
    with torch.no_grad():
        assert finished.token_ids[0] == model(torch.tensor([PROMPT])).logits[0, -1].argmax()


def test_new_weights_are_applied_exactly_also_the_tied_head(made):
    engine, model = made
    for steps in (1, 2):
        change(model, steps)
        load_into(engine, model, steps)
        scores = engine.score(PROMPT)
        assert np.abs(scores - logprobs_of(model, PROMPT[:1], PROMPT[1:], 1.0)).max() < 1e-4
        finished = sample(engine)
        assert all((s.versions == steps).all() for s in finished)
        assert max(np.abs(s.logprobs - logprobs_of(model, PROMPT, s.token_ids, 0.7)).max() for s in finished) < 1e-4


def test_samples_in_flight_switch_cleanly_and_say_which_version_sampled_each_token(made):
    engine, model = made
    before = [p.detach().clone() for p in model.parameters()]
    old = logprobs_of

    def swap(step: int) -> None:
        if step == 4:
            change(model, 9)
            load_into(engine, model, 7)

    finished = sample(engine, 16, step_hook=swap)
    mixed = [s for s in finished if len(set(s.versions)) == 2]
    assert mixed
    for s in mixed:
        new = s.versions == 7
        assert np.abs(s.logprobs - old(model, PROMPT, s.token_ids, 0.7))[new].max() < 1e-4
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    for s in mixed:
        assert np.abs(s.logprobs - old(model, PROMPT, s.token_ids, 0.7))[s.versions != 7].max() < 1e-4
    load_into(engine, model, 8)


def test_zz_a_tensor_that_does_not_arrive_is_an_error_that_names_it(made):
    engine, model = made  # last: the engine is spoilt afterwards
    engine.begin_load()
    engine.load_bucket(bucket_of(model, leave_out="model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(RuntimeError, match=r"model.layers.1.self_attn.*_proj"):
        engine.finish_load(WeightVersion(steps=9, digest=""))


class Idle:
    """An engine that has nothing to do and takes any weights."""

    def begin_load(self) -> None:
        pass

    def busy(self) -> bool:
        return False


def test_a_weight_update_that_was_cut_off_costs_the_engine():
    """The learner died in the middle of a sync: half of the weights are new, so a fresh engine must load the next version."""

    async def twice() -> None:
        loop = EngineThread(Idle())  # pyright: ignore (as much of an engine as is used)
        await loop.begin_load()
        with pytest.raises(EngineError, match="must be finished before the next begins"):
            await loop.begin_load()
        (never,) = loop.sample([SampleRequest(key="1", prompt_token_ids=(1,), temperature=1.0, seed=0, max_tokens=1)])
        assert "must be finished" in str(never.exception(timeout=10))  # it serves nobody any more

    asyncio.run(twice())
