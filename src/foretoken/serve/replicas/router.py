"""The choice of a replica, as a request router of Ray Serve; the rule itself is in `affinity`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from foretoken.serve.replicas.affinity import PrefixIndex, ranked
from foretoken.serve.replicas.messages import Question

DEFAULT_SLACK = 4


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Sends a request to the replica that has most of its prefix, unless that is too busy: see `affinity.ranked`.

    The request's first argument has the blocks of its prompt, the second is the `Question`: the replica that it names
    comes first, however busy it is.
    """

    def initialize_state(self, slack: int = DEFAULT_SLACK, affine: bool = True) -> None:
        """Called once.

        Args:
            slack: requests that a replica may have more than the least busy one, and still be chosen for what it has.
            affine: whether prefixes count at all.
        """
        self._slack = slack
        self._affine = affine
        self._index = PrefixIndex()
        self._sent: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, the best one first, each a rank of its own."""
        blocks: list[int] = []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where none can take it, wait before the next try
            if self._affine and pending_request.args and isinstance(pending_request.args[0], list):
                blocks = pending_request.args[0]
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        loads = {name: self._load(one.replica_id) for name, one in by_name.items()}
        order = ranked(self._index.shared(blocks, by_name), loads, self._slack)
        if pending_request is not None and len(pending_request.args) > 1:
            question: Question = pending_request.args[1]
            order.sort(key=lambda name: name != question.replica)
        return [[by_name[name]] for name in order]

    def _load(self, replica: ReplicaID) -> int:
        """Requests with a replica: this gateway's, or all gateways', as far as they are known."""
        return max(self._sent[replica], self.replica_queue_len_cache.get(replica) or 0)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """A request was sent."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request that was sent has ended, however it did."""
        super().on_request_completed(replica_id, internal_request_id)
        if self._sent[replica_id]:  # none is known of a replica that is gone
            self._sent[replica_id] -= 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken a request: it has its prefix from now on."""
        super().on_request_routed(pending_request, replica_id, result)
        if self._affine and pending_request.args and isinstance(pending_request.args[0], list):
            self._index.add(pending_request.args[0], replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come, or gone."""
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        for gone in before - set(self.curr_replicas):
            self._index.forget(gone.unique_id)
            del self._sent[gone]
