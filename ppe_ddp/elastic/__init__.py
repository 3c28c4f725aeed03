"""Training that goes on while ranks die and others join: who takes part, and the step that all or none commit."""

from ppe_ddp.elastic.memberships import LighthouseMembership, Membership, MpiMembership, Quorum, StoreMembership
from ppe_ddp.elastic.training import ElasticTraining

__all__ = ["ElasticTraining", "LighthouseMembership", "Membership", "MpiMembership", "Quorum", "StoreMembership"]
