"""Training that goes on while ranks die and others join: memberships, and a step that all ranks commit or none."""

from ppe_ddp.elastic.memberships import LighthouseMembership, Membership, MpiMembership, Quorum, StoreMembership
from ppe_ddp.elastic.training import ElasticTraining

__all__ = ["ElasticTraining", "LighthouseMembership", "Membership", "MpiMembership", "Quorum", "StoreMembership"]
