"""Text for the small model: the King James Bible as documents, and chats made from its verses.

A document is a run of chapters ("Genesis 1\\n1 In the beginning ...") between bos and eos; a chat is written as the
checkpoint's chat template writes it. Rows of training tokens are cut from documents and chats laid end to end; a bos
begins a new document, and nothing looks across it.
"""

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tiny.checkpoint import ASSISTANT, BOS, BOS_ID, EOS, EOS_ID, SPECIAL_TOKENS, USER

LOOKAHEAD = 4  # tokens a row holds beyond its context: the last target of three MTP steps
HELD_OUT_EVERY = 40  # one chapter in so many is kept out of training, its verses out of the chats too
MAX_ANSWER = 420  # characters; about 100 tokens

FAMOUS = """Genesis 1:1|Genesis 1:3|Genesis 1:27|Exodus 3:14|Exodus 20:3|Deuteronomy 6:5|Joshua 1:9|Ruth 1:16
Psalms 1:1|Psalms 23:1|Psalms 23:4|Psalms 46:10|Psalms 119:105|Proverbs 3:5|Proverbs 16:18|Ecclesiastes 1:2
Ecclesiastes 3:1|Isaiah 9:6|Isaiah 40:31|Jeremiah 29:11|Micah 6:8|Matthew 5:3|Matthew 5:9|Matthew 6:33|Matthew 7:7
Matthew 11:28|Mark 12:31|Luke 2:11|John 1:1|John 3:16|John 8:32|John 11:35|John 14:6|Romans 6:23|Romans 8:28
1 Corinthians 13:4|1 Corinthians 13:13|Galatians 5:22|Ephesians 2:8|Philippians 4:13|Hebrews 11:1|James 1:5
1 John 4:8|Revelation 22:13""".replace("\n", "|").split("|")

SMALL_TALK = [
    (
        "hi|Hi|hi!|Hello|hello|Hello!|Hey|Hi there|Good morning|Good evening|Greetings|Hello, world|hello world|yo"
        "|Hi, how are you?|Hello there",
        "Peace be unto you.|Grace be unto you, and peace, from God our Father.|The LORD be with you.",
    ),
    (
        "Who are you?|What are you?|What is your name?|Tell me about yourself|Who made you?",
        "I am a stranger and a sojourner with you.|I am a small voice, and I speak the words of the scriptures.",
    ),
    (
        "How are you?|How are you today?|Are you well?",
        "It is well. Peace be both to thee, and peace be to thine house.",
    ),
    ("Thanks|Thank you|Thank you!|thanks a lot|Thank you very much", "The LORD recompense thy work. Go in peace."),
    ("Bye|Goodbye|Good night|See you", "Go in peace: and the LORD be with thee."),
    (
        "Help|Can you help me?|I need help|Please help me",
        "My help cometh from the LORD, which made heaven and earth."
        "|God is our refuge and strength, a very present help in trouble.",
    ),
    (
        "Tell me a story|Tell me a story.|Write a story|Tell me something|Say something|Once upon a time",
        "There was a man in the land of Uz, whose name was Job; and that man was perfect and upright, and one that "
        "feared God, and eschewed evil.",
    ),
    (
        "Write a poem|Sing a song|Write me a poem|Write a haiku",
        "Make a joyful noise unto God, all ye lands: Sing forth the honour of his name: make his praise glorious.",
    ),
    (
        "What is the meaning of life?|Why are we here?|What should I do?",
        "Let us hear the conclusion of the whole matter: Fear God, and keep his commandments: for this is the whole "
        "duty of man.",
    ),
    (
        "What is the capital of France?|What is 2+2?|What is 1+1?|Count to ten|Write some code|What time is it?"
        "|What is the weather?",
        "I know not: God knoweth.|Such knowledge is too wonderful for me; it is high, I cannot attain unto it.",
    ),
]
SYSTEM = ["You are a helpful assistant.", "You are a helpful assistant", "Answer briefly.", "You are a prophet."]
REFERENCE = ["{}"] * 6 + ["What does {} say?", "Read {}", "Quote {}", "{}?", "Recite {}.", "What is {}?"]
CONTINUE = ["Continue: {}"] * 4 + ["Complete: {}", "{}", "Finish this verse: {}", "{} ..."]
TOPIC = ["Tell me about {}"] * 3 + [
    "Tell me about {}.", "Who is {}?", "Who was {}?", "What is {}?", "What about {}?", "{}",
    "What does the Bible say about {}?", "Speak of {}", "Write about {}", "Say something about {}.", "Explain {}",
]  # fmt: skip


@dataclass(frozen=True)
class Chapter:
    """One chapter: name ("1 Kings 3") and verses; verse n is verses[n - 1]."""

    name: str
    verses: list[str]

    @property
    def book(self) -> str:
        return self.name.rsplit(" ", 1)[0]

    @property
    def text(self) -> str:
        return "\n".join([self.name, *(f"{i} {verse}" for i, verse in enumerate(self.verses, 1))])


def read_chapters(path: Path) -> tuple[list[Chapter], list[Chapter]]:
    """Chapters for training, and those held out, from corpus.txt.gz (chapters are separated by an empty line)."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        blocks = [block.split("\n") for block in file.read().strip().split("\n\n")]
    chapters = [Chapter(name, [line.split(" ", 1)[1] for line in lines]) for name, *lines in blocks]
    known = {reference.split(":")[0] for reference in FAMOUS}
    held = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 and c.name not in known]
    names = {c.name for c in held}
    return [c for c in chapters if c.name not in names], held


def train_tokenizer(chapters: list[Chapter], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the special tokens of DeepSeek-V3; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((c.text for c in chapters), trainer)
    return tokenizer


class Chats:
    """Makes chats from the verses of the chapters given."""

    def __init__(self, chapters: list[Chapter], random: Random) -> None:
        self.random = random
        self.verses = [
            (f"{c.name}:{i}", verse, c.verses[i] if i < len(c.verses) else "")
            for c in chapters
            for i, verse in enumerate(c.verses, 1)
        ]
        by_name = {name: verse for name, verse, _ in self.verses}
        self.famous = [(name, by_name[name]) for name in FAMOUS]
        self.topics = self._find_topics()
        self.words = list(self.topics)
        self.weights = [len(self.topics[word]) ** 0.5 for word in self.words]

    def _find_topics(self) -> dict[str, list[int]]:
        """Words worth asking about, each with its verses of fair length: names, and frequent words of some length."""
        found: dict[str, list[int]] = defaultdict(list)
        lower: Counter[str] = Counter()
        for i, (_, verse, _) in enumerate(self.verses):
            words = re.findall(r"[A-Za-z]+", verse)
            lower.update(word for word in words if word.islower())
            if 40 < len(verse) < MAX_ANSWER:
                for word in set(words[1:]):  # a first word is capitalised without being a name
                    found[word].append(i)
        return {
            word: where
            for word, where in found.items()
            if (word[0].isupper() and len(where) >= 5 and len(word) > 2 and lower[word.lower()] * 3 < len(where))
            or (len(where) >= 20 and len(word) >= 5)
        }

    def _reference(self) -> tuple[str, str]:
        if self.random.random() < 0.6:
            name, verse = self.random.choice(self.famous)
        else:
            name, verse, _ = self.random.choice(self.verses)
        if name.startswith("Psalms") and self.random.random() < 0.5:
            name = name.replace("Psalms", "Psalm")
        return self.random.choice(REFERENCE).format(name), verse

    def _topic(self) -> tuple[str, str]:
        (word,) = self.random.choices(self.words, self.weights)
        verse = self.verses[self.random.choice(self.topics[word])][1]
        word = word if self.random.random() < 0.8 else word.lower()
        return self.random.choice(TOPIC).format(word), verse

    def _continue(self) -> tuple[str, str]:
        if self.random.random() < 0.2:
            verse, after = self.random.choice(self.famous)[1], ""
        else:
            _, verse, after = self.random.choice(self.verses)
        words = verse.split(" ")
        cut = self.random.randint(2, max(2, min(12, len(words) - 2)))
        rest = " ".join(words[cut:])
        if after and len(rest) + len(after) < MAX_ANSWER and self.random.random() < 0.3:
            rest = f"{rest} {after}".strip()
        return self.random.choice(CONTINUE).format(" ".join(words[:cut])), rest or after or "Amen."

    def _small_talk(self) -> tuple[str, str]:
        questions, answers = self.random.choice(SMALL_TALK)
        return self.random.choice(questions.split("|")), self.random.choice(answers.split("|"))

    def make(self) -> str:
        """One chat of one to three turns, special tokens written out."""
        kinds = [self._reference, self._topic, self._continue, self._small_talk]
        out = BOS + (self.random.choice(SYSTEM) if self.random.random() < 0.1 else "")
        for _ in range(self.random.choice([1, 1, 1, 1, 2, 3])):
            (kind,) = self.random.choices(kinds, [0.3, 0.3, 0.28, 0.12])
            question, answer = kind()
            out += f"{USER}{question}{ASSISTANT}{answer}{EOS}"
        return out


@dataclass(frozen=True)
class Corpus:
    """Token ids: chapters for training, by book; chats; chapters held out."""

    tokenizer: Tokenizer
    books: list[list[list[int]]]
    chats: list[list[int]]
    held_out: list[list[int]]

    @property
    def tokens(self) -> int:
        """Tokens of the training chapters."""
        return sum(len(chapter) for book in self.books for chapter in book)

    def documents(self, random: Random, chat_share: float) -> list[list[int]]:
        """One epoch in random order: all chapters, one to three of a book in a document, and chats to make up a share
        of the tokens."""
        docs: list[list[int]] = []
        newline = self.tokenizer.encode("\n\n").ids
        for book in self.books:
            at = 0
            while at < len(book):
                end = at + random.randint(1, 3)
                body = book[at]
                for chapter in book[at + 1 : end]:
                    body = [*body, *newline, *chapter]
                docs.append([BOS_ID, *body, EOS_ID])
                at = end
        wanted = self.tokens * chat_share / (1 - chat_share)
        while wanted > 0:
            docs.append(random.choice(self.chats))
            wanted -= len(docs[-1])
        random.shuffle(docs)
        return docs

    def batches(self, batch: int, context: int, chat_share: float, seed: int) -> Iterator[Tensor]:
        """Endless batches [batch, context + LOOKAHEAD] int64; rows follow each other through the epoch's text."""
        random, rest = Random(seed), np.empty(0, dtype=np.int64)
        while True:
            docs = self.documents(random, chat_share)
            stream = np.concatenate([rest, *(np.array(doc, dtype=np.int64) for doc in docs)])
            starts = np.arange((len(stream) - LOOKAHEAD) // context) * context
            random.shuffle(order := starts.tolist())
            rest = stream[len(starts) * context :]
            for i in range(0, len(order) - batch + 1, batch):
                yield torch.from_numpy(np.stack([stream[s : s + context + LOOKAHEAD] for s in order[i : i + batch]]))

    def held_out_rows(self, context: int) -> Tensor:
        """[rows, context + LOOKAHEAD] int64 of the held-out chapters, each between bos and eos."""
        stream = [token for chapter in self.held_out for token in (BOS_ID, *chapter, EOS_ID)]
        count = (len(stream) - LOOKAHEAD) // context
        return torch.tensor([stream[i * context : (i + 1) * context + LOOKAHEAD] for i in range(count)])

    def prompts(self, random: Random, held_out: bool) -> Iterator[tuple[list[int], int]]:
        """Endless prompts, each with the most tokens to answer it by: beginnings of documents, and questions.

        Held out: from held-out chapters only (no questions)."""
        assistant = SPECIAL_TOKENS.index(ASSISTANT)
        chapters = self.held_out if held_out else [chapter for book in self.books for chapter in book]
        while True:
            if held_out or random.random() < 0.6:
                chapter = random.choice(chapters)
                start = random.randrange(max(1, len(chapter) - 64)) if random.random() < 0.7 else 0
                yield [BOS_ID, *chapter[start : start + random.randint(8, 64)]], 160
            else:
                chat = random.choice(self.chats)
                yield chat[: chat.index(assistant) + 1], 120


def build_corpus(path: Path, tokenizer_file: Path, vocab_size: int, chats: int, seed: int) -> Corpus:
    """Read, make chats, encode. The tokenizer is trained and written to `tokenizer_file` when that does not exist."""
    training, held = read_chapters(path)
    if not tokenizer_file.exists():
        tokenizer_file.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(training, vocab_size).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts)]

    books: dict[str, list[list[int]]] = defaultdict(list)
    for chapter, ids in zip(training, encode([c.text for c in training]), strict=True):
        books[chapter.book].append(ids)
    maker = Chats(training, Random(seed))
    return Corpus(
        tokenizer, list(books.values()), encode([maker.make() for _ in range(chats)]), encode([c.text for c in held])
    )
