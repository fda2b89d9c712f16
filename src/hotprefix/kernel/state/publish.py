"""When computed pages become visible. Owns: the rules that publication and flight give together.

Rule (docs/terms.md, *publication* and *flight*): a flight can hand over only pages that can be found. So
`exact-prefill` publishes a prompt when its prefill is done, and `coalesced` publishes prompt pages after
every step, whatever the publication setting is. That setting then governs generated pages only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.kernel.config import Capabilities, Flight, KernelConfig, Publication
from hotprefix.kernel.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Rules:
    """What publication and flight come to.

    share_flight: prefilling requests look for further pages before each chunk.
    plan_ahead: pages are indexed, as planned, when the step that computes them is planned.
    read_planned: other requests may read planned pages in that same step.
    prompt_each_step: prompt pages are published after each step.
    outputs_each_step: generated pages are published after each step.
    at_prefill: prompt pages are published when the prompt is done.
    at_end: what a request has computed is published when it ends.
    """

    share_flight: bool
    plan_ahead: bool
    read_planned: bool
    prompt_each_step: bool
    outputs_each_step: bool
    at_prefill: bool
    at_end: bool


def rules_for(config: KernelConfig, capabilities: Capabilities) -> Rules:
    """The rules of a configuration. `schedule` becomes `step` if pages cannot be read in the very step that
    computes them: if the executor cannot do it, or if a layer group keeps a recurrent state."""
    if not config.prefix_cache:
        return Rules(False, False, False, False, False, False, False)
    publication = config.publication
    same_step = capabilities.same_step_reads and all(group.window for group in config.groups)
    if publication is Publication.SCHEDULE and not same_step:
        publication = Publication.STEP
    scheduled = publication is Publication.SCHEDULE
    stepwise = scheduled or publication is Publication.STEP
    coalesced = config.flight is Flight.COALESCED
    return Rules(
        share_flight=coalesced,
        plan_ahead=scheduled or coalesced,
        read_planned=scheduled,
        prompt_each_step=stepwise or coalesced,
        outputs_each_step=stepwise,
        at_prefill=publication is Publication.PREFILL or config.flight is Flight.EXACT_PREFILL,
        at_end=True,
    )


def publishable(rules: Rules, seq: Sequence, ended: bool) -> int:
    """How many leading computed tokens of a sequence other requests may find after this commit."""
    if ended:
        return seq.computed if rules.at_end else 0
    if rules.outputs_each_step:
        return seq.computed
    in_prompt = min(seq.computed, seq.target)
    if rules.prompt_each_step or (rules.at_prefill and not seq.prefilling):
        return in_prompt
    return 0
