"""Built-in rewards that compare with a known answer. Each gives 1 or 0 per response, but for what a reasoning-gym verifier gives.

A mathematical answer is found, most explicit place first: the last `\\boxed{}`, what follows the last `####`, what follows the last
"answer is", else the last number of the last sentence that has one. Plain numbers are compared exactly here, with their commas, units
and currencies; what is not a plain number goes to math-verify. An answer that hedges ("18 or 19", "not 18") is none.
"""

import re
from fractions import Fraction
from typing import Any

from actors.rewards.interfaces import Batch

NUMBER = re.compile(r"(?<![\w.,])[-+]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.\d*|\.\d+)?(?<=[\d.])(?:\s?/\s?\d+)?(?![\w]|,\d)", re.ASCII)
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
HEDGES = re.compile(
    r"\b(?:not|or|either|neither|between|less than|more than|at least|at most|fewer than|isn't|maybe)\b|[<>≤≥≠≈]", re.IGNORECASE
)
ANSWER_IS = re.compile(r"\banswer\b[*_]*\s*(?:is|:|=)+[*_]*\s*:?", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<!\d)[.!?](?=\s|$)|(?<=\d)[.!?](?=\s|$)|\n")
MAX_VOTE = 200  # characters of an answer that is a text
DECORATION = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def exact_match(batch: Batch, *, ignore_case: bool = False) -> list[Any]:
    """Give 1 where the stripped response equals the stripped answer."""
    def same(text: str) -> float:
        given, answer = text.strip(), str(batch.label).strip()
        return float(given.lower() == answer.lower() if ignore_case else given == answer)

    return _each(batch, same)


def numeric_match(batch: Batch, *, tolerance: float = 0.0) -> list[Any]:
    """Give 1 where the last number of the response is within `tolerance` (relative) of the answer."""
    answer = number_of(str(batch.label))
    if answer is None and batch.label is not None:
        return [ValueError(f"numeric_match needs a number as the answer, got {batch.label!r:.80}")] * len(batch)

    def near(text: str) -> float:
        numbers = [_fraction(found) for found in NUMBER.findall(_plain(text))]
        if not numbers or numbers[-1] is None or answer is None:
            return 0.0
        return float(abs(numbers[-1] - answer) <= Fraction(tolerance) * abs(answer))

    return _each(batch, near)


def math(batch: Batch) -> list[Any]:
    """Give 1 where the response's final answer is mathematically the row's."""
    return _each(batch, lambda text: float(same_answer(str(batch.label), text)))


def gsm8k(batch: Batch, *, format_score: float = 0.0) -> list[Any]:
    """Give 1 where a number after the last `####` is the answer, `format_score` where it is another number, else 0."""
    answer = number_of(_marked(str(batch.label)) or str(batch.label))

    def strict(text: str) -> float:
        _, mark, rest = text.rpartition("####")
        given = number_of(rest.strip().split("\n")[0]) if mark else None
        return 0.0 if given is None else 1.0 if given == answer else format_score

    return _each(batch, strict)


def choice(batch: Batch, *, letters: str = "ABCDE") -> list[Any]:
    """Give 1 where the response chooses the answer's letter."""
    return _each(batch, lambda text: float(chosen_letter(text, letters) == str(batch.label).strip(" ().").upper()))


def reasoning_gym(batch: Batch, *, task: str | None = None, answer_tag: str = "answer") -> list[Any]:
    """Give what the verifier of a reasoning-gym task gives, between 0 and 1.

    Args:
        batch: responses to an entry of that task (columns question, answer, metadata).
        task: its name; None: metadata.source_dataset of the row.
        answer_tag: the answer is what <answer_tag> encloses, or else the whole response.
    """
    from reasoning_gym import get_score_answer_fn

    columns = batch.columns
    metadata = columns.get("metadata") or {}
    name = task or metadata.get("source_dataset")
    if not name:
        raise ValueError("reasoning_gym needs a task, got a row without metadata.source_dataset")
    score: Any = get_score_answer_fn(name)
    entry = {"question": columns.get("question", batch.prompt), "answer": batch.label, "metadata": metadata}
    enclosed = re.compile(rf"<{answer_tag}>\s*(.*?)\s*</{answer_tag}>", re.DOTALL)

    def verify(text: str) -> float:
        found = enclosed.findall(_after_thinking(text))
        return float(score(found[-1] if found else _after_thinking(text).strip(), entry))

    return _each(batch, verify)


def same_answer(gold: str, response: str) -> bool:
    """Whether a response's final answer is mathematically the gold answer (which may be a whole solution with its mark)."""
    gold = _marked(gold) or gold
    given = final_answer(response)
    if given is None:
        return False
    wanted, found = number_of(gold), number_of(given)
    if wanted is not None and found is not None:
        return wanted == found
    return _same_expression(gold, given)


def final_answer(response: str) -> str | None:
    """Find the final answer of a response as text; None where it has none."""
    text = _after_thinking(response)
    marked = _marked(text)
    if marked is not None:
        return marked
    told = list(ANSWER_IS.finditer(text))
    if told:
        return _first_sentence(text[told[-1].end() :])
    sentences = [part for part in SENTENCE_END.split(text) if NUMBER.search(_plain(part))]
    if not sentences:
        return text.strip() or None
    last = sentences[-1].rpartition("=")[2]
    if HEDGES.search(last):
        return None
    return [found.group() for found in NUMBER.finditer(_plain(last))][-1] if NUMBER.search(_plain(last)) else None


def vote(response: str) -> str:
    """Write a response's final answer so that equal ones are equal texts, plain numbers as fractions; empty where it has none."""
    found = final_answer(response) or ""
    number = number_of(found)
    return found.strip().casefold()[:MAX_VOTE] if number is None else str(number)


def number_of(answer: str) -> Fraction | None:
    """Read a short answer as one plain number with its unit; None where it is anything else, or hedges."""
    text = _plain(answer).rpartition("=")[2]
    found = list(NUMBER.finditer(text))
    if len(found) != 1 or HEDGES.search(text):
        return None
    words = text[: found[0].start()] + " " + text[found[0].end() :]
    if re.search(r"[\^*/+_\\{}()\[\]|~]|\d", words) or re.search(r"[-]\s*$", text[: found[0].start()]):
        return None
    value = _fraction(found[0].group())
    scale = [SCALES[word] for word in re.findall(r"[a-z]+", text[found[0].end() :].lower()[:12]) if word in SCALES]
    return value if value is None or not scale else value * scale[0]


def chosen_letter(response: str, letters: str) -> str | None:
    """Find the letter that a response chooses; None where it names none, or several."""
    text = _after_thinking(response).strip()
    marked = _marked(text)
    told = list(ANSWER_IS.finditer(text))
    place = marked if marked is not None else _first_sentence(text[told[-1].end() :]) if told else text
    one = rf"(?<![\w'])\(?([{re.escape(letters)}])\)?(?![\w'])"
    found = re.findall(one, DECORATION.sub(r"\1", place or ""))
    if marked is None and not told:  # nothing says which: at its start, or alone
        start = re.match(rf"\W*([{re.escape(letters)}])(?:[).:,]|\s*$)", text)
        return start.group(1) if start else found[0] if len(set(found)) == 1 else None
    return found[0] if len(set(found)) == 1 else None


def _each(batch: Batch, score: Any) -> list[Any]:
    if batch.label is None:
        return [ValueError("the row has no answer; set reward.answer_column")] * len(batch)
    return [score(text) for text in batch.completions]


def _after_thinking(text: str) -> str:
    return text.rpartition("</think>")[2]


def _marked(text: str) -> str | None:
    """Take what the last \\boxed{} or #### holds."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for place in range(start + 6, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + 7 : place]
        return None
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0] if mark and rest.strip() else None


def _first_sentence(text: str) -> str:
    return SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def _plain(text: str) -> str:
    """Take decoration off: LaTeX text and spaces, currencies, percent, Markdown."""
    text = DECORATION.sub(r" \1", text.replace("{,}", ",").replace("\\$", "$").replace("−", "-"))
    text = re.sub(r"\\[!,;: ]|\\[()\[\]]|\\%|[$€£¥%`]|\*\*|°", " ", text)
    text = re.sub(r"(?<=\d),\s+(?=\d{3}\b)", ",", text) if re.fullmatch(r"\s*\d{1,3}(?:,\s+\d{3})+\s*", text) else text
    return re.sub(r"(?<=\d)[.,;:!?]+(?=\s|$)", " ", text).strip()


def _fraction(number: str) -> Fraction | None:
    top, _, bottom = number.replace(",", "").replace(" ", "").partition("/")
    try:
        return Fraction(top.rstrip(".")) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None


def _same_expression(gold: str, given: str) -> bool:
    from math_verify import parse, verify

    if HEDGES.search(given) or not given.strip():
        return False
    wanted, found = (parse(f"${text.strip().strip('$')}$") for text in (gold, given))
    return bool(verify(wanted, found))
