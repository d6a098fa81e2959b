"""Grammars compiled beside the steps: xgrammar (Dong et al. 2024, arXiv 2411.15100) for one checkpoint's vocabulary."""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as FastTokenizer

from workers.vocabulary import bytes_of_token, is_byte_level, read_tokenizer, special_tokens

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

_CACHE_BYTES = 512 * 2**20
_THREADS = 2  # grammars compiled at a time


class GrammarCompiler:
    """Compiles structural tags. Library and vocabulary are read in a thread, beside whatever the caller does."""

    def __init__(self, folder: Path, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._lock = threading.Lock()
        self._compilers: dict[frozenset[str], xgrammar.GrammarCompiler] = {}  # by the special tokens it may match
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shoal-grammar")
        self._pool.submit(self._warm_up)

    def prepare(self, grammar: str, done: Callable[[str | None], None]) -> None:
        """Compiles in a thread, then calls `done` there: with what is wrong, or None."""
        self._pool.submit(self._prepare, grammar, done)

    def compile(self, grammar: str) -> "xgrammar.CompiledGrammar":
        """Fast for what was prepared lately. Raises RuntimeError for a grammar that is not valid."""
        found = [text for text in self._specials.values() if text in grammar]
        return self._compiler(frozenset(found)).compile_structural_tag(grammar)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def _tokenizer(self) -> FastTokenizer:
        return read_tokenizer(self._folder)

    @functools.cached_property
    def _specials(self) -> dict[int, str]:
        return special_tokens(self._tokenizer)

    def _warm_up(self) -> None:
        if (self._folder / "tokenizer.json").is_file():
            begin = time.perf_counter()
            self._compiler(frozenset())
            logger.info("grammars can be compiled after %.1f s", time.perf_counter() - begin)

    def _prepare(self, grammar: str, done: Callable[[str | None], None]) -> None:
        problem = None
        try:
            self.compile(grammar)
        except Exception as error:
            logger.warning("a grammar cannot be compiled", exc_info=True)
            problem = f"the request's grammar cannot be compiled: {str(error).strip()[:300]}"
        done(problem)

    def _compiler(self, specials: frozenset[str]) -> "xgrammar.GrammarCompiler":
        """Of a vocabulary whose special tokens are none of the text, but for those given."""
        import xgrammar

        with self._lock:
            if specials not in self._compilers:
                info = self._vocabulary(specials)
                threads = max(1, (os.cpu_count() or 1) // 4)
                self._compilers[specials] = xgrammar.GrammarCompiler(
                    info, max_threads=threads, cache_limit_bytes=_CACHE_BYTES
                )
            return self._compilers[specials]

    def _vocabulary(self, specials: frozenset[str]) -> "xgrammar.TokenizerInfo":
        import xgrammar

        tokenizer, hidden = self._tokenizer, self._specials
        ids = range(min(self._vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)))
        shown = [i for i in ids if i not in hidden or hidden[i] in specials]
        texts: list[bytes] | list[str]
        if is_byte_level(tokenizer):
            kind, texts = xgrammar.VocabType.RAW, [b""] * len(ids)
            for i in shown:
                texts[i] = bytes_of_token(tokenizer, i)
        else:
            kind, texts = xgrammar.VocabType.BYTE_FALLBACK, [""] * len(ids)
            for i in shown:
                texts[i] = tokenizer.id_to_token(i) or ""
        return xgrammar.TokenizerInfo(
            texts, vocab_type=kind, vocab_size=self._vocab_size, stop_token_ids=list(self._stop_ids)
        )
