"""What a third party needs to test its own plugs: a launcher of ranks."""

from ppe_ddp.testing.rank_error import Outcome, RankError, RankFailure
from ppe_ddp.testing.ranks import Ranks, run_ranks

__all__ = ["Outcome", "RankError", "RankFailure", "Ranks", "run_ranks"]
