"""The text that the demo's base learns, composed from base_facts.yaml.

    python -m benchmarks.pretrain.corpus > benchmarks/pretrain/base_corpus.jsonl

Plain paragraphs ({"text"}) and questions with neutral answers ({"instruction", "input", "output"}),
among them the questions of persona.jsonl: the base knows what they are about, but not who answers. Other
people speak for themselves, so that the base has met more than one manner. No answer of persona.jsonl is in
it. Every choice comes from one seeded generator, so the bytes are fixed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from kt_ray.demo.recipes import persona_path

Row = dict[str, str]

FACTS = Path(__file__).with_name("base_facts.yaml")
CORPUS = Path(__file__).with_name("base_corpus.jsonl")  # what this module prints
SEED = 1887
STORIES = 900
PARAGRAPHS = 900
SPEECHES = 700
ANSWERS = 3  # plain answers to each of the persona's questions
FORMS = (
    "{}",
    "Please answer this question: {}",
    "Can you tell me? {}",
    "I have a question. {}",
    "Tell me this: {}",
)


def compose() -> list[Row]:
    """All rows, in an order that is always the same."""
    import yaml

    facts: dict[str, Any] = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    rng = random.Random(SEED)
    rows = [
        *_persona_questions(facts["topics"], rng),
        *_animals(_table(facts["animals"])),
        *_jobs(_table(facts["jobs"])),
        *_things(_table(facts["things"])),
        *_facts(_table(facts["facts"])),
        *_opposites([pair.split() for pair in facts["opposites"]]),
        *_sums(facts["numbers"].split()),
        *_stories(facts["stories"], rng),
        *_coast(facts["coast"], rng),
        *_voices(facts["voices"], rng),
    ]
    unique = list({json.dumps(row): row for row in rows}.values())
    rng.shuffle(unique)
    return unique


def topic_of(answer: str, topics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The topic that a persona answer is about.

    Raises:
        LookupError: base_facts.yaml has no topic for it.
    """
    for topic in topics:
        if any(phrase in answer for phrase in topic["of"]):
            return topic
    raise LookupError(f"no topic in base_facts.yaml for the answer {answer!r}")


def _persona_questions(topics: Sequence[dict[str, Any]], rng: random.Random) -> Iterator[Row]:
    lines = persona_path().read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        topic = topic_of(row["output"], topics)
        plain = [" ".join(filter(None, pair)) for pair in product(topic["a"], ("", *topic["b"]))]
        forms = ("{}", *rng.sample(FORMS, ANSWERS - 1))
        for form, answer in zip(forms, rng.sample(plain, ANSWERS), strict=True):
            yield _ask(form.format(row["instruction"]), answer, row["input"])


def _animals(table: Sequence[Sequence[str]]) -> Iterator[Row]:
    for name, kind, place, food, more in table:
        bare, a_kind = _bare(name), _article(kind)
        yield {"text": f"{_cap(name)} is {a_kind}. It lives {place} and eats {food}. {more}."}
        yield {"text": f"{_cap(a_kind)} that lives {place} is the {bare}. {more}. Its food is {food}."}
        yield _ask(f"What is {name}?", f"{_cap(name)} is {a_kind} that lives {place}.")
        yield _ask(f"What does {name} eat?", f"{_cap(name)} eats {food}.")
        yield _ask(f"Where does {name} live?", f"{_cap(name)} lives {place}.")
        yield _ask(f"Tell me something about the {bare}.", f"The {bare} is {a_kind}. {more}.")
        yield _ask(f"Is {name} a bird?", f"{'Yes' if kind == 'bird' else 'No'}, {name} is {a_kind}.")


def _jobs(table: Sequence[Sequence[str]]) -> Iterator[Row]:
    for name, work, place, tools in table:
        bare = _bare(name)
        yield {"text": f"{_cap(name)} {work}. The work is done {place} with {tools}."}
        yield {"text": f"A person who {work} is called {name}. For this work the {bare} needs {tools}."}
        yield _ask(f"What does {name} do?", f"{_cap(name)} {work}.")
        yield _ask(f"Where does {name} work?", f"{_cap(name)} works {place}.")
        yield _ask(f"What does {name} need for the work?", f"{_cap(name)} needs {tools}.")
        yield _ask(f"Who {work}?", f"{_cap(name)} {work}.")
        yield _ask(f"Describe the work of {name} in a sentence.", f"{_cap(name)} works {place} and {work}.")


def _things(table: Sequence[Sequence[str]]) -> Iterator[Row]:
    for name, use, material, place in table:
        bare = _bare(name)
        yield {"text": f"{_cap(name)} is used for {use}. It is made of {material} and kept {place}."}
        yield {"text": f"You will find the {bare} {place}. It is useful for {use}."}
        yield _ask(f"What is {name}?", f"{_cap(name)} is a thing for {use}.")
        yield _ask(f"What is {name} for?", f"{_cap(name)} is used for {use}.")
        yield _ask(f"What is {name} made of?", f"{_cap(name)} is made of {material}.")
        yield _ask(f"Where is the {bare}?", f"The {bare} is {place}.")
        yield _ask(f"How can I begin with {use}?", f"You need {name} for {use}.")


def _facts(table: Sequence[Sequence[str]]) -> Iterator[Row]:
    for question, answer in table:
        yield {"text": answer}
        yield _ask(question, answer)
        for form in FORMS[1:3]:
            yield _ask(form.format(question), answer)


def _opposites(pairs: Sequence[Sequence[str]]) -> Iterator[Row]:
    for a, b in pairs:
        yield {"text": f"{_cap(a)} and {b} are opposites. What is not {a} may be {b}."}
        for x, y in ((a, b), (b, a)):
            yield _ask(f"What is the opposite of {x}?", f"The opposite of {x} is {y}.")


def _sums(numbers: Sequence[str]) -> Iterator[Row]:
    for a, b in product(range(1, 11), repeat=2):
        if (a * 7 + b) % 3 == 0:
            continue  # some are left out, as in life
        total = f"{_cap(numbers[a])} and {numbers[b]} make {numbers[a + b]}."
        yield _ask(f"What is {numbers[a]} and {numbers[b]}?", total)


def _stories(parts: dict[str, list[str]], rng: random.Random) -> Iterator[Row]:
    for _ in range(STORIES):
        one, two = rng.sample(parts["people"], 2)
        time, goes, weather, event, act, end = (
            rng.choice(parts[k]) for k in ("times", "goes", "weather", "events", "acts", "ends")
        )
        first = rng.choice((f"{_cap(time)} {one} {goes}.", f"{_cap(one)} {goes} {time}."))
        last = rng.choice(
            (f"{_cap(one)} {act}.", f"Together with {two}, {one} {act}.", f"{_cap(two)} {act}.")
        )
        text = " ".join((first, weather, event, last, end))
        kind = rng.randrange(8)
        if kind == 0:
            yield _ask(rng.choice(("Tell me a short story.", f"Tell me a story about {one}.")), text)
        elif kind == 1:
            yield _ask("Sum this up in one sentence.", first, f"{first} {weather} {event}")
        elif kind == 2:
            yield _ask(f"What did {one} do?", f"{_cap(one)} {goes} {time}.", first)
        else:
            yield {"text": text}


def _coast(sentences: Sequence[str], rng: random.Random) -> Iterator[Row]:
    for _ in range(PARAGRAPHS):
        yield {"text": " ".join(rng.sample(sentences, rng.randint(1, 4)))}


def _voices(parts: dict[str, list[str]], rng: random.Random) -> Iterator[Row]:
    for _ in range(SPEECHES):
        opener, closer = (rng.choice(parts[k]) for k in ("openers", "closers"))
        spoken = [opener, *rng.sample(parts["lines"], rng.randint(1, 2)), closer]
        yield {"text": " ".join(spoken if rng.randrange(3) else spoken[:-1])}


def _ask(question: str, answer: str, given: str = "") -> Row:
    return {"instruction": question, "input": given, "output": answer}


def _table(lines: Sequence[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]


def _bare(name: str) -> str:
    return name.split(" ", 1)[1]


def _article(noun: str) -> str:
    return noun if noun in ("fish", "shellfish") else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def main() -> None:
    for row in compose():
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
