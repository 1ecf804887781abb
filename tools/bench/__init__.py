'''The benchmark harness: `make bench`, `make bench-NAME`, `python -m tools.bench NAME`.

Not for tests: nothing that is timed here may fail a test. It waits for an idle machine (a minute in all, then it goes
on and says how busy it was), runs subject and reference alternately, at least five times each, writes
build/bench/NAME.json and prints a table, bars missed last.

A benchmark is a module tools/bench/NAME.py with a constant ROWS (or a function rows() that returns it):

    """What `make bench-channels` measures: the links of one pod."""

    from tools.bench.harness import Reference, Row, command

    def messages_per_s() -> float:
        ...                                    # set up, measure, tear down; raise when it cannot be measured

    ROWS = [
        Row(name="channel_1kb", unit="msg/s", better="higher", bar=5000, subject=messages_per_s),
        Row(name="validate", unit="s", better="lower", bar=0.5,
            subject=command([".venv/bin/rljob", "validate", "examples/cartpole/rljob.yaml"])),
        Row(name="env_steps", unit="steps/s", better="higher", bar_ratio=1.2,
            subject=train, reference=Reference(name="SB3 2.9, rl-zoo settings", measure=train_with_sb3)),
    ]

What an author may rely on:

* `subject` and `reference.measure` are called without arguments, in this process, one at a time, each as often as there
  are runs; one call is one run. The row's value is the median of the runs.
* A subject that measures several things at once returns a mapping, row name -> value. Rows that share the same subject
  (the same object) are then measured by one call: `Row(name="a", subject=f)`, `Row(name="b", subject=f)`, and f returns
  {"a": ..., "b": ...}. They share its reference too, by the same rule.
* `bar` is in the row's unit. `bar_ratio` is a multiple of the reference, measured in the same alternation; the JSON
  holds the bar it came to.
* `Row(runs=1)` for what takes minutes; the JSON says how many runs a row is made of.
* `session(say)`, a context manager of the module, holds what all its rows need (a cluster) and is left in any case.
* `small_rows()` are the same rows at a size that is done in seconds (`--small`), in build/bench/NAME-small.json.
* The JSON is written after each subject. Rows that were measured before another one failed stay.
* An exception in a run ends the benchmark with the row's name.

The JSON is API.md's: {"machine": {...}, "rows": [{"row", "value", "unit", "min", "max", "runs", "better", "bar",
"reference": {"name", "value"} or null, "ratio" or null, "idle_before", "commit"}]}. idle_before is the smallest idle
share of the CPUs, 0 to 1, seen before the row's runs; a commit with uncommitted changes ends in "+changes".
'''
