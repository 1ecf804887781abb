"""Versions, endpoints and allotments between protobuf and the frozen types of driver and workers. Pure."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.slots import Allotment
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links.endpoint import Endpoint

_ENDPOINT: Final = tuple(field.name for field in fields(Endpoint))
_ALLOTMENT: Final = tuple(field.name for field in fields(Allotment))
MAX_CREDIT: Final = 2**31 - 1
"""Units: int32 in the messages that say it."""


@lru_cache(maxsize=64)
def version_to_pb(version: PolicyVersion) -> pb.PolicyVersion:
    """A message that is kept, and is to be copied into another, which its constructor does."""
    return pb.PolicyVersion(branch=version.branch, number=version.number)


def version_from_pb(message: pb.PolicyVersion) -> PolicyVersion:
    return _version(message.branch, message.number)


@lru_cache(maxsize=64)
def _version(branch: int, number: int) -> PolicyVersion:
    """One value for each version: of thousands of units few versions are at work at a time."""
    return PolicyVersion(branch, number)


def endpoint_to_pb(endpoint: Endpoint) -> pb.Endpoint:
    return pb.Endpoint(**{name: getattr(endpoint, name) for name in _ENDPOINT})


def endpoint_from_pb(message: pb.Endpoint) -> Endpoint:
    return Endpoint(**{name: getattr(message, name) for name in _ENDPOINT})


def allotment_to_pb(allotment: Allotment) -> pb.Allotment:
    return pb.Allotment(**{name: getattr(allotment, name) for name in _ALLOTMENT})


def allotment_from_pb(message: pb.Allotment) -> Allotment:
    return Allotment(**{name: getattr(message, name) for name in _ALLOTMENT})


def window(spec: pb.ChannelSpec) -> int:
    """Units (rounds, for a gang) that a consumer may have on the way or waiting."""
    return max(1, spec.depth if spec.rounds else credit(depth=spec.depth, micro_batch=spec.micro_batch))


def credit(*, depth: int, micro_batch: int) -> int:
    """A route's or a consumer's. The largest sizes of a plan make more than a message can say, and than anybody has."""
    return min(depth * micro_batch, MAX_CREDIT)
