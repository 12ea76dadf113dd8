"""Built-in rewards: right answers in every common spelling are accepted, others refused; form and length are what they say."""

import json
import math
from pathlib import Path

import pytest

from actors.rewards.answers import final_answer, number_of, same_answer
from tests.actors.rewarding import values

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


def spellings(number: str) -> dict[str, str]:
    """Write a whole number in the ways that models and people do."""
    grouped = f"{int(number):,}"
    return {
        "plain": number, "commas": grouped, "zeros": f"{number}.00", "dollars": f"${grouped}", "dollars_zeros": f"${grouped}.00",
        "units": f"{number} miles per hour", "percent": f"{number}%", "euro": f"{grouped} €", "period": f"{number}.",
        "hash": f"First 2 + 2 = 4, then more.\n#### {grouped}", "hash_unit": f"#### ${number} dollars",
        "boxed": rf"We add 3 and 4, so \boxed{{{number}}}.", "boxed_latex": rf"\boxed{{{grouped.replace(',', '{,}')}\text{{ apples}}}}",
        "boxed_dollars": rf"$\boxed{{\$ {grouped}.00}}$", "inline": f"so the total is ${number}$.", "display": rf"\[ {number} \]",
        "sentence": f"After 3 days she has 12 of 40. The answer is {grouped} apples.", "bold": f"The final answer is: **{grouped}**.",
        "answer_colon": f"Answer: {number}", "equation": f"So he pays 3 * 7 - 2 = ${grouped} in all.",
        "last": f"There are 5 boxes of 7. In the end Tom has {grouped} marbles.", "variable": f"x = {number}",
        "thinking": f"<think>maybe 99 or 98?</think>It is {number}.",
    }  # fmt: skip


ADVERSARIAL = {  # for the answer 18
    "hedge": "The answer is 17 or 18.", "hedge_boxed": r"\boxed{17 \text{ or } 18}", "list": r"\boxed{17, 18}", "set": "#### 18, 19",
    "all": "#### " + " ".join(str(i) for i in range(30)), "negative": "#### -18", "minus": "The answer is - 18", "longer": "#### 180",
    "comma": "#### 1,8", "decimal": "#### 18.5", "exponent": "#### 18e1", "thousand": "The answer is 18 thousand.", "k": "#### 18k",
    "not": "The answer is not 18.", "less": "The answer is less than 18.", "range": "The answer is 17-19, probably 18",
    "changed": "#### 18\nNo, wait.\n#### 19", "boxed_over": r"First 18, so \boxed{19}", "empty": r"The answer 18 is \boxed{}",
    "root": r"\boxed{\sqrt{18}}", "nothing": "", "quoted": "<think>#### 18</think>I do not know.", "variable": r"\boxed{18x}",
    "percent_of": r"\boxed{\frac{18}{100}}", "power": "#### 18^2", "product": "The answer is 18 * 2",
}  # fmt: skip


@pytest.mark.parametrize("number", ["18", "2125", "-10", "0", "1450000", "7"])
def test_every_spelling_of_a_number_is_accepted(number):
    wrong = [name for name, text in spellings(number).items() if not same_answer(number, text)]
    assert wrong == []


def test_adversarial_answers_are_refused():
    assert [name for name, text in ADVERSARIAL.items() if same_answer("18", text)] == []
    assert len(ADVERSARIAL) >= 20


@pytest.mark.skipif(not GSM8K.is_file(), reason="the folder ../shared with GSM8K is absent")
def test_gsm8k_gold_answers_in_every_spelling_and_agreement_with_math_verify_alone(capsys):
    from math_verify import parse, verify

    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    assert len(rows) == 1319
    refused, alone, asked = [], 0, 0
    for index, row in enumerate(rows):
        gold = row["answer"]
        number = gold.rpartition("####")[2].strip().replace(",", "")
        texts = {"solution": gold} | spellings(number)
        refused += [(index, name) for name, text in texts.items() if not same_answer(gold, text)]
        refused += [(index, f"other {off}") for off in (1, -1, 10) if same_answer(gold, f"#### {int(number) + off}")]
        if index % 20 == 0:  # math-verify takes 10 ms a parse
            wanted = parse(f"${number}$")
            alone += sum(verify(wanted, parse(text)) for text in texts.values())
            asked += len(texts)
    assert refused == []
    fooled = [name for name, text in ADVERSARIAL.items() if verify(parse("$18$"), parse(text))]
    with capsys.disabled():
        print(f"\nmath-verify alone accepts {alone} of {asked} spellings ({alone / asked:.1%}) that the built-in verifier accepts,")
        print(f"and {len(fooled)} of {len(ADVERSARIAL)} adversarial answers that it refuses: {', '.join(fooled)}")


@pytest.mark.parametrize(
    ("gold", "given", "same"),
    [(r"\frac{1}{2}", r"\boxed{0.5}", True), (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", True), ("18", r"\boxed{\frac{36}{2}}", True),
     ("2x+1", r"\boxed{1+2x}", True), ("2x+1", r"\boxed{2x-1}", False),
     ("(1,2)", r"\boxed{(1,2)}", True), ("(1,2)", r"\boxed{(2,1)}", False),
     (r"\sqrt{2}", r"The answer is $\sqrt{2}$.", True), ("0.5", "1/2", True), ("3", "1/3", False)],
)  # fmt: skip
def test_mathematics_beyond_plain_numbers_goes_to_math_verify(gold, given, same):
    assert same_answer(gold, given) is same


def test_the_parts_of_a_number_are_read_exactly():
    assert number_of("1,234.50") == number_of("1234.5") and number_of("0.1") * 3 == number_of("0.3")
    assert final_answer("no number at all") == "no number at all" and number_of("5 thousand") == 5000


@pytest.mark.parametrize(
    ("function", "arguments", "answer", "texts", "wanted"),
    [
        ("exact_match", {}, 2, [" 2\n", "3"], [1, 0]),
        ("exact_match", {"ignore_case": True}, "Yes", ["yes", "no"], [1, 0]),
        ("numeric_match", {"tolerance": 0.01}, "200", ["about 5, so 201", "203", "none"], [1, 0, 0]),
        ("math", {}, "so 2\n#### 1,200", [r"\boxed{1200}", "1201"], [1, 0]),
        ("gsm8k", {"format_score": 0.1}, "2 + 2 = 4 #### 4", ["#### 4", "#### 5", "4", "#### four"], [1, 0.1, 0, 0]),
        ("choice", {}, "B", ["B", "(B) because A is wrong", "The answer is (B).", r"\boxed{\text{B}}"], [1, 1, 1, 1]),
        ("choice", {}, "B", ["A", "A or B", "The answer is A, not B", "none"], [0, 0, 0, 0]),
        ("regex", {"pattern": r"\{.*\}"}, None, ['x {"a":\n1}', "x"], [1, 0]),
        ("regex", {"pattern": r"\d+", "full": True}, None, ["12", "a12"], [1, 0]),
        ("tags", {}, None, ["<think>a</think>\n<answer>b</answer>", "<think>a</think>", "x<think>a</think><answer>b</answer>",
                            "<think><think>a</think></think><answer>b</answer>"], [1, 0, 0, 0]),
        ("overlong", {"max_tokens": 10, "buffer_tokens": 4}, None, ["x" * 6, "x" * 8, "x" * 10, "x" * 12], [0, -0.5, -1, -1]),
        ("length", {"target_tokens": 4}, None, ["xxxx", "xx", "xxxxxx", "x" * 9, ""], [1, 0.5, 0.5, 0, 0]),
    ],
)  # fmt: skip
def test_built_in_functions(function, arguments, answer, texts, wanted):
    given = values(function, texts, arguments=arguments, **({} if answer is None else {"answer": answer}))
    assert given == pytest.approx(wanted)


def test_a_row_without_an_answer_has_no_reward_rather_than_zero():
    assert ["no answer" in str(value) for value in values("math", ["4", "5"])] == [True, True]


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "gsm_symbolic", "word_sorting", "sudoku", "spell_backward"])
def test_reasoning_gym_verifiers_score_as_the_library_does(task):
    import reasoning_gym

    data = reasoning_gym.create_dataset(task, size=4, seed=5)
    for entry in data:
        texts = [f"<answer>{entry['answer']}</answer>", str(entry["answer"]), "<answer>nonsense</answer>", ""]
        given = values("reasoning_gym", texts, **json.loads(json.dumps(entry)))
        assert given[0] == data.score_answer(str(entry["answer"]), entry) == 1.0 and given[1] == 1.0
        assert given[2] == pytest.approx(data.score_answer("nonsense", entry)) and not math.isnan(given[3]) and given[3] < 1
