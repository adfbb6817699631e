"""Chat examples: the special tokens, the template and how conversations are built.

A conversation is ``<|bos|>`` then, for every turn, ``<|user|>question<|end|>`` or
``<|assistant|>answer<|eos|>``.  Plain documents are ``<|bos|>text<|eos|>``.
"""

from __future__ import annotations

import random

BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, END, SYSTEM, USER, ASSISTANT]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|eos|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SMALL_TALK = [
    (
        ("Hello!", "Hi!", "Hello.", "Hi there!", "Good morning!", "Hey!"),
        "Hello! Ask me what a word means, and I will try to explain it.",
    ),
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "What is your name?"),
        "I am a very small language model. I learned English from a dictionary, a few old novels and "
        "the manuals of free software.",
    ),
    (
        ("What can you do?", "How can you help me?", "Can you help me?", "Help me."),
        "I can explain words and continue a text. I am small, so I am often wrong.",
    ),
    (("How are you?", "How are you today?", "How do you do?"), "I am well, thank you. What would you like to know?"),
    (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!"), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later.", "Good night!"), "Goodbye!"),
]
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a dictionary.", "Answer briefly.")


def render(turns: list[tuple[str, str]], system: str = "") -> str:
    """Write a conversation in the template's format, without the leading BOS."""
    text = f"{SYSTEM}{system}{END}" if system else ""
    for question, answer in turns:
        text += f"{USER}{question}{END}{ASSISTANT}{answer}{EOS}"
    return text


def small_talk(rng: random.Random) -> tuple[str, str]:
    """One question of the fixed list, with its answer."""
    questions, answer = rng.choice(SMALL_TALK)
    return rng.choice(questions), answer


def conversations(pairs: list[tuple[str, str]], rng: random.Random) -> list[str]:
    """Group shuffled question/answer pairs into conversations of one to three turns."""
    pairs = pairs[:]
    rng.shuffle(pairs)
    out = []
    while pairs:
        count = rng.choice((1, 1, 1, 1, 2, 3))
        turns, pairs = pairs[:count], pairs[count:]
        if rng.random() < 0.05:
            turns.insert(0, small_talk(rng))
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else ""
        out.append(render(turns, system))
    return out
