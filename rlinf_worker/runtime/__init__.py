"""The process of one worker: connections to driver, agent and peers, and the context a role is given."""
