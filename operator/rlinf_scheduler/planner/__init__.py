"""Pure: from a job to a plan, or to the reasons why there is none. No clock, no sockets, no globals."""
