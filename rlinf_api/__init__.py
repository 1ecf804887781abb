"""The contract: what a user may write, what parts say to each other, and in which words.

Everything imports this package; it imports nothing of ours, and nothing heavier than pydantic and protobuf.
Modules are imported one by one (`from rlinf_api import names`), so that a worker which only needs names and
errors never pays for pydantic.
"""

__version__ = "0.1.0"
