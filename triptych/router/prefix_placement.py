"""Places requests on the language instances of one stage, by what these may have in their prefix caches."""

from collections.abc import Sequence

from triptych.router.caches import PrefixIndex
from triptych.router.instance import Instance
from triptych.router.placement import PlacementPolicy, Work
from triptych.router.request_state import RequestState


class PrefixPlacement:
    """Chooses instances for prefill or for decode, and remembers which prompts each was given."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self._policy = policy
        self._index: PrefixIndex[Instance] = PrefixIndex()

    def place(self, state: RequestState, instances: Sequence[Instance], cost: int) -> Instance | None:
        """Return the instance that gets a request, None if there are no instances. ``cost`` is in tokens."""
        if not self._policy.uses_caches:
            return self._policy.choose(instances, Work(cost))
        found = self._index.find(state.prefix_hashes)
        instance = self._policy.choose(instances, Work(cost, found.key, found.holder))
        if instance is not None:
            self._index.add(state.prefix_hashes, instance)
        return instance
