"""Packing and logprobs without an engine: every layout says what the model alone would say."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import FalconConfig

from learner.families import prove
from learner.logprobs import TokenLogprobs, logprobs_of, score_groups
from learner.packing import build_tree, deal, plan
from orchestrator.types import Group
from tests.learner.tiny import families, llama, model_of, receipts

GROUPS: Sequence[Group] = [r.group_ref for r in receipts(5)]
ALL = {g: range(4) for g in range(5)}


def alone(model: Any, group: Group, k: int, temperature: float) -> torch.Tensor:
    """One padded-free forward of one sample."""
    prompt, response = list(group.draw.prompt.token_ids), group.samples[k].token_ids.tolist()
    log_p = torch.log_softmax(
        model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature, -1
    )
    return log_p.gather(-1, torch.tensor(response)[:, None])[:, 0]


def weighted(parts: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """A sum in which every token counts differently, so that none can be mistaken for another."""
    return torch.stack(
        [(lp * torch.arange(1, len(lp) + 1) * (g + 2 * k + 1)).sum() for (g, k), lp in parts.items()]
    ).sum()


@pytest.mark.parametrize("name", families())
def test_every_layout_agrees_with_the_model_alone(name: str) -> None:
    """Values and gradients; Gemma3's and Mistral-like windows (6 tokens) are shorter than the prompts."""
    model = model_of(families()[name])
    want = {(g, k): alone(model, group, k, 0.7) for g, group in enumerate(GROUPS) for k in range(4)}
    weighted(want).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}  # pyright: ignore
    module = TokenLogprobs(model, temperature=0.7, chunk_tokens=5)
    assert module.family.tree
    for trees, share, budget in [(True, True, 4096), (True, True, 30), (True, False, 90), (False, False, 64)]:
        module.family.tree = trees
        model.zero_grad()
        found: dict[tuple[int, int], torch.Tensor] = {}
        for batch in module.plan(dict(enumerate(GROUPS)), ALL, max_tokens=budget, share=share):
            assert batch.num_tokens <= budget or len(batch.keys) == 1
            logprobs, _ = module(batch)
            parts = dict(zip(batch.keys, logprobs.split(batch.lengths.tolist()), strict=True))
            weighted(parts).backward()
            found |= {key: part.detach() for key, part in parts.items()}
        for key, lp in want.items():
            torch.testing.assert_close(found[key], lp.detach(), atol=5e-5, rtol=1e-5)
        scale = max(float(g.abs().max()) for g in grads.values())
        gap = max(float((p.grad - grads[n]).abs().max()) for n, p in model.named_parameters())  # pyright: ignore
        assert gap <= 1e-5 * scale


def test_a_lost_window_is_found_and_padding_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    """Were Gemma3 given one mask for all layers, its window would be gone: the proof at start sees it."""
    module = TokenLogprobs(model_of(families()["gemma3"]), temperature=1.0, chunk_tokens=64)
    masks = module.family.masks

    def one_for_all(batch: Any, device: torch.device) -> Any:
        found: Any = masks(batch, device)
        return found if not module.family.tree else dict.fromkeys(found, found["full_attention"])

    module.family.masks = one_for_all  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        prove(module, 1e-3)
    assert not module.family.tree and "samples are padded" in caplog.text
    want = alone(module.model, GROUPS[4], 0, 1.0)
    found = score_groups(module, GROUPS[4:], max_tokens_per_micro_batch=64, shared_prompt=True)[0][0]
    np.testing.assert_allclose(found, want.detach().numpy(), atol=5e-5)


@pytest.mark.parametrize("alibi", [False, True])
def test_an_older_family_is_right_whichever_way_it_goes(alibi: bool) -> None:
    """Falcon has an attention of its own: what it does with our masks, the proof at start decides."""
    config = FalconConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, alibi=alibi)
    module = TokenLogprobs(model_of(config), temperature=1.0, chunk_tokens=64)
    assert not (alibi and module.family.tree)  # its distances would be wrong in a tree
    found = score_groups(module, GROUPS, max_tokens_per_micro_batch=128, shared_prompt=True)
    for g, group in enumerate(GROUPS):
        for k in range(4):
            np.testing.assert_allclose(found[g][k], alone(module.model, group, k, 1.0).detach().numpy(), atol=5e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_entropy_and_its_gradient(softcap: float | None) -> None:
    from transformers import Gemma2Config

    shape = llama().to_dict()
    keys = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    config = Gemma2Config(
        **{key: shape[key] for key in keys}, head_dim=32, attn_logit_softcapping=None, final_logit_softcapping=softcap
    )
    model = model_of(config)
    batch = plan({0: GROUPS[0]}, {0: [0]}, max_tokens=999, share=True)[0]
    prompt = list(GROUPS[0].draw.prompt.token_ids)
    ids = torch.tensor([prompt + GROUPS[0].samples[0].token_ids.tolist()])
    log_p = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
    want = -(log_p.exp() * log_p).sum(-1)
    (want * torch.arange(1, len(want) + 1)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]  # pyright: ignore
    for chunk in (3, 999):
        model.zero_grad()
        _, entropy = TokenLogprobs(model, temperature=0.7, chunk_tokens=chunk)(batch, with_entropy=True)
        (entropy * torch.arange(1, len(want) + 1)).sum().backward()
        torch.testing.assert_close(entropy, want, atol=1e-5, rtol=1e-5)
        scale = max(float(g.abs().max()) for g in grads)
        assert all(
            float((p.grad - g).abs().max()) <= 1e-5 * scale for p, g in zip(model.parameters(), grads, strict=True)
        )


def test_autocast_is_near_and_float32_parameters_stay() -> None:
    model = model_of(llama(), sharpness=1.0)
    exact, batch = (
        TokenLogprobs(model, temperature=1.0, chunk_tokens=64),
        plan(dict(enumerate(GROUPS)), ALL, max_tokens=999, share=True)[0],
    )
    close = TokenLogprobs(model, temperature=1.0, chunk_tokens=64, compute_dtype=torch.bfloat16)
    want, found = logprobs_of(exact, batch), logprobs_of(close, batch)
    gap = max(float((found[key] - want[key]).abs().max()) for key in want)
    assert 0 < gap < 0.1
    logprobs, _ = close(batch)
    logprobs.sum().backward()
    assert all(p.dtype is p.grad.dtype is torch.float32 for p in model.parameters())  # pyright: ignore


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(lambda ids: np.asarray(ids, np.int64))


@given(prompt=tokens, responses=st.lists(tokens, min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_tree_shows_each_sample_itself(prompt: np.ndarray, responses: list[np.ndarray]) -> None:
    """By property: along a sample's path lie its tokens, positions ascend by one, and exactly its ancestors are seen."""
    tree = build_tree(prompt, responses, [(0, k) for k in range(len(responses))])
    sees = tree.mask()
    assert sorted(k for _, k in tree.keys) == list(range(len(responses)))
    for (_, k), path, target in zip(tree.keys, tree.paths, tree.targets, strict=True):
        sample = np.concatenate([prompt, responses[k]])
        np.testing.assert_array_equal(tree.tokens[path], sample[:-1])
        np.testing.assert_array_equal(tree.depths[path], np.arange(len(path)))
        np.testing.assert_array_equal(target, responses[k])
        for depth, node in enumerate(path):
            np.testing.assert_array_equal(np.flatnonzero(sees[node]), np.sort(path[: depth + 1]))
    distinct = {tuple(np.concatenate([prompt, r])[: n + 1]) for r in responses for n in range(len(prompt) + len(r) - 1)}
    assert tree.size == len(distinct)  # every prefix once


@given(sizes=st.lists(st.floats(0, 100), max_size=20), num_ranks=st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_dealing_loses_nothing_and_balances(sizes: list[float], num_ranks: int) -> None:
    shares = deal(sizes, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in share) for share in shares]
    assert max(loads) <= sum(sizes) / num_ranks + max(sizes, default=0.0) + 1e-6
