"""The Locust side of a worker: one user, whose one task replays the worker's shard."""

from argparse import Namespace

from locust import User
from locust.env import Environment
from locust.exception import StopUser
from locust.stats import RequestStats

from harness.load.replay import Replay
from harness.load.spool import Row
from harness.load.statistics import tell_locust


class ReplayEnvironment(Environment):  # type: ignore[misc]  # locust is not checked here
    """Locust's environment with the replay that its user runs."""

    def __init__(self, replay: Replay | None) -> None:
        # An exception in the dispatcher must end it; Locust would log it and start over. Options
        # of its command line are none of ours: without any here it would look for its own files.
        super().__init__(
            user_classes=[ScheduleUser],
            catch_exceptions=False,
            parsed_options=Namespace(web_base_path="", enable_rebalancing=False, headless=False),
        )
        self.stats = RequestStats(use_response_times_cache=False)
        self.replay = replay


def replay_schedule(user: User) -> None:
    """The one task of the one user."""
    replay: Replay = user.environment.replay

    def ended(row: Row) -> None:
        tell_locust(user.environment, replay.path, row)

    try:
        replay.run(ended)
    except Exception as error:
        replay.fail(error)
        raise
    raise StopUser


class ScheduleUser(User):  # type: ignore[misc]  # locust is not checked here
    """Replays the whole shard once."""

    tasks = [replay_schedule]  # noqa: RUF012 - the attribute that Locust reads
