"""One per job: runs the flow, matches units with consumers, commits steps."""
