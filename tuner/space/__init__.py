"""What may be tried: the space file, its conditions and rules, and the candidates that they make up."""

from tuner.space.check import EngineFacts, KnownSetting, Outside
from tuner.space.load import find_space, load_space, parse_space, shipped
from tuner.space.problems import Problem, SpaceProblems, nearest, unknown
from tuner.space.space import Listed, Parameter, Space, Workload, differences

__all__ = [
    "EngineFacts",
    "KnownSetting",
    "Listed",
    "Outside",
    "Parameter",
    "Problem",
    "Space",
    "SpaceProblems",
    "Workload",
    "differences",
    "find_space",
    "load_space",
    "nearest",
    "parse_space",
    "shipped",
    "unknown",
]
