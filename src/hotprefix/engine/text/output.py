"""One request's text. Owns: `OutputText`: tokens go in, text that may be shown comes out.

Rules: characters are never split, and text is held back as long as it could become a stop string. All that
comes out, joined, is the text of the same request without streaming. Stop strings count from the output
number `min_tokens` on: the text of earlier tokens is shown at once and is part of no match.
"""

from __future__ import annotations

from hotprefix.engine.params import SamplingParams
from hotprefix.engine.text.detokenizer import Detokenizer
from hotprefix.engine.text.stop import StopMatcher
from hotprefix.engine.text.tokenizer import Tokenizer


class OutputText:
    """Detokenizer and stop matcher of one request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._characters = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include=params.include_stop)
        self._exempt = params.min_tokens - 1
        self._outputs = 0
        self._stopped = False

    def push(self, token: int) -> tuple[str, bool, str | None]:
        """(new text, whether a stop string is complete, which one). After a stop nothing may be pushed."""
        text = self._characters.push(token)
        self._outputs += 1
        if self._outputs <= self._exempt:
            return text, False, None
        shown, stop = self._stops.push(text)
        self._stopped = stop is not None
        return shown, self._stopped, stop

    def flush(self) -> str:
        """The text that was held back, when the request ends. Empty after a stop string."""
        if self._stopped:
            return ""
        shown, stop = self._stops.push(self._characters.flush())
        self._stopped = stop is not None
        return shown if self._stopped else shown + self._stops.flush()
