"""Which stages have instances, and what requests are told that need a stage without one."""

from triptych.clock import Clock
from triptych.errors import MediaNotServed, TriptychError, Unavailable
from triptych.gateway.servers import Servers
from triptych.router.membership import Membership
from triptych.router.request_state import RequestPhase, RequestState
from triptych.topology import Stage


class Availability:
    """What the registered instances can serve together, now or soon."""

    def __init__(
        self, membership: Membership, *, expects_encoders: bool, servers: Servers | None = None, clock: Clock
    ) -> None:
        """``expects_encoders`` is False for a topology without encode instances, which serves text only. ``servers``
        answer in place of language instances."""
        self._membership = membership
        self._expects_encoders = expects_encoders
        self._servers = servers
        self._clock = clock

    @property
    def can_serve(self) -> bool:
        """Whether every stage has an instance."""
        encodes = self._membership.encode_instances() or not self._expects_encoders
        if self._servers is not None:
            return bool(encodes and not self._servers.missing)
        return bool(self._membership.serving_instances() and encodes)

    @property
    def takes_media(self) -> bool:
        """Whether requests may have media, now or as soon as every stage has an instance."""
        return self._expects_encoders or bool(self._membership.encode_instances())

    @property
    def can_encode(self) -> bool:
        """Whether items of requests in flight can be encoded, now or soon."""
        soon = self._membership.serves(Stage.ENCODE, self._clock.now())
        return soon or bool(self._membership.encode_instances(begun=True))

    def missing_stages(self) -> str:
        """Return which stages have no instance, and when one is started again."""
        needed = [stage for stage in Stage if self._expects_encoders or stage is not Stage.ENCODE]
        served = {stage for instance in self._membership if instance.takes_work for stage in instance.role.stages}
        now, launched = self._clock.now(), self._membership.launched
        if self._servers is not None:
            needed = [Stage.ENCODE]
        reasons = [launched.why_missing(stage, now) for stage in needed if stage not in served]
        if self._servers is not None and self._servers.missing:
            reasons.append(self._servers.missing)
        return "; ".join(reasons)

    def unavailable(self, *, has_media: bool, generates: bool = True) -> TriptychError | None:
        """Return why no instance can serve a request, now or soon; None if one can. One whose items are only encoded
        ``generates`` nothing."""
        if has_media and not self.takes_media:
            return MediaNotServed("this service has no encode instance: it takes text alone")
        now = self._clock.now()
        for stage in Stage:
            needed = has_media if stage is Stage.ENCODE else generates
            if needed and not self._membership.serves(stage, now):
                return self.missing(stage)
        return None

    def missing(self, stage: Stage) -> Unavailable:
        """Return the error of a request that needs a stage without an instance."""
        if stage is Stage.ENCODE:
            return Unavailable("no encode instance is ready, so only text can be served")
        has_decoder = stage is Stage.PREFILL and self._membership.decode_instances()
        return Unavailable(f"no {'prefill' if has_decoder else 'language'} instance is ready")

    def missing_for(self, state: RequestState) -> TriptychError | None:
        """Return the error of a request that waits for a stage without an instance; None if it waits for none."""
        members = self._membership
        if state.phase is RequestPhase.QUEUED and not members.serving_instances():
            return self.missing(Stage.PREFILL if members.decode_instances() else Stage.DECODE)
        if state.phase is RequestPhase.ENCODING and not members.encode_instances(begun=True):
            return self.missing(Stage.ENCODE)
        if state.waits_for_prefill and not members.prefill_instances(begun=True):
            return self.missing(Stage.PREFILL)
        return None
