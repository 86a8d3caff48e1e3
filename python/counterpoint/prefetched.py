"""Plans that are made ahead, in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from counterpoint._native import Cancellation
from counterpoint.errors import PlanError

if TYPE_CHECKING:
    from counterpoint.plan import Plan


class PrefetchedPlan:
    """A plan that is being made ahead. `Group.plan` takes it, by its arguments; who holds this can call it off."""

    def __init__(
        self,
        make: Callable[[Cancellation], Plan],
        planner: ThreadPoolExecutor,
        forget: Callable[[PrefetchedPlan], object] | None = None,
    ) -> None:
        # Called where somebody takes its result, who needs nobody else to keep it.
        self._forget = forget
        self._cancellation = Cancellation()
        self._future: Future[Plan] = planner.submit(make, self._cancellation)

    def cancel(self) -> None:
        """Ends the planning soon, if it has not ended. `Group.plan` with its arguments plans anew then. From any thread."""
        self._cancellation.cancel()
        self._future.cancel()

    def cancelled(self) -> bool:
        """Whether `cancel` was called, before there was a plan."""
        return self._cancellation.cancelled and (not self._future.done() or self._future.cancelled() or self._has_failed())

    def done(self) -> bool:
        """Whether there is a plan, or will be none."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Plan:
        """The plan, waited for at most so many seconds; `concurrent.futures.CancelledError` where it was called off."""
        if self._forget is not None:
            self._forget(self)
        try:
            return self._future.result(timeout)
        except PlanError:
            if self._cancellation.cancelled:
                raise CancelledError("this plan was called off") from None
            raise
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _has_failed(self) -> bool:
        return self._future.exception() is not None
