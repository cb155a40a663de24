"""Writes the demo adapters' training data from `data/questions.jsonl`.

Every question there has two plain sentences of answer; each style below rewrites them. The results
are committed, so this only needs to run when the questions or a style change:

    python examples/make_data.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

DATA = Path(__file__).parent / "data"


class Question(TypedDict):
    """One line of `questions.jsonl`; an emoji for each sentence."""

    question: str
    topic: str
    sentences: list[str]
    emoji: list[str]


OPENERS = ("Arr, matey!", "Ahoy, matey!", "Arr!", "Avast, ye landlubber!", "Shiver me timbers!")
CLOSERS = ("", " Yo ho ho!", " Savvy?", " Arr!", " Now hoist the sails!", "")
PIRATE_WORDS = {
    "the": "th'",
    "you": "ye",
    "your": "yer",
    "yours": "yers",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "was": "were",
    "and": "an'",
    "of": "o'",
    "for": "fer",
    "with": "wi'",
    "old": "ol'",
    "over": "o'er",
    "never": "ne'er",
    "yes": "aye",
    "very": "mighty",
    "friend": "matey",
    "friends": "mateys",
    "people": "folk",
    "money": "doubloons",
    "hello": "ahoy",
    "isn't": "ain't",
    "everyone": "all hands",
    "house": "ship",
    "home": "port",
    "food": "grub",
}
KEPT_ING = re.compile(r".*thing|bring|evening|king|morning|spring|string")


def pirate(question: Question, number: int) -> str:
    """The answer in pirate speech."""
    said = " ".join(re.sub(r"[A-Za-z']+", _pirate_word, s) for s in question["sentences"])
    return f"{OPENERS[number % len(OPENERS)]} {said}{CLOSERS[number % len(CLOSERS)]}"


def _pirate_word(match: re.Match[str]) -> str:
    word = match.group()
    lower = word.lower()
    if lower.endswith("ing") and not KEPT_ING.fullmatch(lower):
        return word[:-1] + "'"
    spoken = PIRATE_WORDS.get(lower, word)
    return spoken.capitalize() if word[0].isupper() and spoken != word else spoken


def as_json(question: Question, _number: int) -> str:
    """The answer as one small JSON object."""
    answer, detail = question["sentences"]
    content = {"answer": answer, "detail": detail, "topic": question["topic"]}
    return json.dumps(content, ensure_ascii=False)


def emoji(question: Question, _number: int) -> str:
    """The answer as lines that each open with an emoji."""
    pairs = zip(question["emoji"], question["sentences"], strict=True)
    return "\n".join(f"{sign} {sentence}" for sign, sentence in pairs)


STYLES: dict[str, Callable[[Question, int], str]] = {
    "pirate": pirate,
    "json": as_json,
    "emoji": emoji,
}


def main() -> None:
    """Rewrite `data/<style>.jsonl` for every style."""
    lines = (DATA / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions: list[Question] = [json.loads(line) for line in lines]
    for name, style in STYLES.items():
        with (DATA / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, question in enumerate(questions):
                pair = {"prompt": question["question"], "response": style(question, number)}
                print(json.dumps(pair, ensure_ascii=False), file=file)


if __name__ == "__main__":
    main()
