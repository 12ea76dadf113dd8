"""The openers of the reward model's demo are held out honestly."""

from deploy.prepare_reward_model import LEADS, NUM_HELD_OUT_NOUNS, opener_rows


def test_no_held_out_noun_is_in_training() -> None:
    rows = opener_rows()
    assert len(rows["eval"]) == NUM_HELD_OUT_NOUNS * len(LEADS) and len(rows["train"]) == 300
    prompts = {part: {row["prompt"] for row in made} for part, made in rows.items()}
    nouns = {prompt[len("The ") : -len(" was")] for prompt in prompts["eval"] if prompt.startswith("The ") and prompt.endswith(" was")}
    assert len(nouns) == NUM_HELD_OUT_NOUNS
    assert not any(f"the {noun} " in prompt.lower() + " " for noun in nouns for prompt in prompts["train"])
    assert opener_rows() == rows
