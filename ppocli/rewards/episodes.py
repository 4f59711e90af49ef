"""What an environment's own rewards are worth: one more reward beside those of ``reward``."""

from ppocli.rewards.records import RewardRequest, Score


class EnvironmentReward:
    """The rewards of each episode's turns, on the last token of each; of episodes with one turn one
    number, as a reward function would give it.

    Args:
        dense: whether episodes may have several turns.
        drop: whether an episode whose environment failed has no score.
    """

    reward_style = "request"
    told_as = "env.fn"

    def __init__(self, dense: bool, drop: bool) -> None:
        self.dense, self.drop = dense, drop

    def __call__(self, request: RewardRequest) -> list[Score]:
        """[N] scores."""
        return [None if self.drop and one.error is not None else
                one.token_rewards if self.dense else one.score for one in request.episodes]
