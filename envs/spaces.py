"""The observation and action space of text environments.

Unlike gymnasium's ``Text``, which lists its characters, it contains every ``str`` that can be encoded as UTF-8 and is
not too long, including accents, emoji, control characters and terminal escapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

# Samples mix scripts, so that a random agent finds environments that do not handle arbitrary input.
_SAMPLE_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789 \n\t.,;:!?<>()[]{}|/\\'\"é߀√中文🙂\x1b\x00"


def encodable(text: str) -> str:
    """Return ``text`` with each unpaired surrogate, which UTF-8 cannot encode, replaced by ``?``."""
    return text.encode("utf-8", "replace").decode()


class Text(gymnasium.Space[str]):
    """Any Unicode text of at most ``max_length`` characters; None sets no limit.

    Args:
        max_length: longest text, in characters.
        examples: meaningful texts, such as the four moves of a game. ``sample`` then draws one of them; they do not
            restrict the space.
        seed: seed of the generator that ``sample`` uses.
    """

    def __init__(
        self,
        max_length: int | None = None,
        *,
        examples: Sequence[str] = (),
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if max_length is not None and max_length < 0:
            raise ValueError(f"max_length={max_length} must not be negative; None sets no limit")
        self.max_length = max_length
        self.examples = tuple(examples)
        super().__init__(dtype=str, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return one of the examples or, if there are none, up to 40 characters of several scripts.

        Raises:
            ValueError: a mask or probabilities were given, which a text space does not support.
        """
        if mask is not None or probability is not None:
            raise ValueError("Text.sample supports neither mask nor probability, because the space is not a finite set")
        if self.examples:
            return self.examples[int(self.np_random.integers(len(self.examples)))]
        longest = 40 if self.max_length is None else min(40, self.max_length)
        length = int(self.np_random.integers(longest + 1))
        return "".join(
            _SAMPLE_CHARACTERS[i] for i in self.np_random.integers(len(_SAMPLE_CHARACTERS), size=length).tolist()
        )

    def contains(self, x: Any) -> bool:
        if not isinstance(x, str) or (self.max_length is not None and len(x) > self.max_length):
            return False
        try:
            x.encode("utf-8")
        except UnicodeEncodeError:  # an unpaired surrogate, which tokenizers do not accept
            return False
        return True

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and self.max_length == other.max_length and self.examples == other.examples

    def __hash__(self) -> int:
        return hash((self.max_length, self.examples))

    def __repr__(self) -> str:
        return f"Text(max_length={self.max_length})"
