"""Where a turn ends. Owns: `with_turn_ends`, which adds what the files forgot to the end tokens.

Rules: a converted or fine-tuned model often names only its base model's end token, so a chat would run on
past the end of its turn. Therefore a token that vocabularies use for nothing but the end of a turn ends an
output if the model's chat template writes it. Without a template nothing is added. Such a token counts as a
control token.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from hotprefix.engine.text.source import TokenizerSource

log = logging.getLogger(__name__)
END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>"}
)


def with_turn_ends(source: TokenizerSource) -> TokenizerSource:
    """`source`, with every known end of turn that a chat template writes added to its eos_ids."""
    templates = "\n".join(source.templates.values())
    found = {
        token.id for token in source.added if token.content in END_OF_TURN and token.content in templates
    }
    if missing := found - source.eos_ids:
        texts = ", ".join(token.content for token in source.added if token.id in missing)
        log.info(
            "the model's files do not name %s as an end token; its chat template does: it ends a turn", texts
        )
    added = tuple(replace(token, special=True) if token.id in found else token for token in source.added)
    return replace(source, added=added, eos_ids=source.eos_ids | found)
