"""The commands of rljob, as typer sees them: arguments, help, exit codes. What a command does is in its own module.

Exit codes: 0 Complete, 1 Failed, 2 bad manifest or arguments, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rljob.losable import any_letters

if TYPE_CHECKING:
    from rljob.plan import Where

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Run and look at RLJobs: reinforcement-learning jobs, here or on a cluster.",
)  # fmt: skip


class OutputFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


@app.callback()
def _root() -> None:
    """Keeps `rljob validate` a sub-command even where it is the only one. What every command does first."""
    any_letters(sys.stdout)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What a user can repair is one sentence, and exit code 2."""
    from rlinf_api.errors import UserError

    try:
        yield
    except UserError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


RuntimeFiles = Annotated[
    list[Path] | None,
    typer.Option("--runtime", metavar="FILE", help="RLRuntimes (YAML) that spec.runtime may name, repeatable"),
]


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="manifest (YAML); - reads standard input")],
    runtime: RuntimeFiles = None,
) -> None:
    """Check a manifest: one sentence per problem, saying what, where, and what to write instead."""
    from rljob import manifest

    with _refused():
        given = manifest.given(file, beside=runtime or ())
        wrong = [f"RLRuntime {n}: {p}" for n, one in given.runtimes.items() for p in manifest.runtime_problems(one)]
    for sentence in wrong:
        typer.echo(sentence, err=True)
    if wrong:
        raise typer.Exit(2)
    if given.job is None:
        typer.echo(f"{file}: RLRuntime {', '.join(given.runtimes)} is valid")
        return
    with _refused():
        found = manifest.check(manifest.resolved(given.job, given.runtimes))
    for problem in found.problems:
        typer.echo(str(problem), err=True)
    if found.problems:
        raise typer.Exit(2)
    for line in manifest.advice(found.spec) if found.spec is not None else ():
        typer.echo(f"note: {line}", err=True)
    typer.echo(f"{file}: RLJob {found.name} is valid")


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="manifest (YAML); - reads standard input")],
    seed: Annotated[int | None, typer.Option(help="overrides spec.seed")] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="overrides a field: spec.flow.steps=10, repeatable"),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="metrics, logs, checkpoints, objects; a job goes on in it. Default: runs/<job>-<time>"),
    ] = None,
    output: Annotated[OutputFormat, typer.Option(help="json: the last line is one object")] = OutputFormat.TEXT,
    simulate_slots: Annotated[
        bool, typer.Option("--simulate-slots", help="run pools with accelerators on CPU where there are none")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="spec of an RLPlan (YAML): the first plan, in place of the scheduler's; - reads standard input"
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="work dir of an earlier run of this job: the first plan goes by what was measured there"),
    ] = None,
    runtime: RuntimeFiles = None,
) -> None:
    """Run a job on this machine: the manifest that a cluster runs, with processes for pods."""
    from rljob import run as command

    options = command.Options(
        file=file,
        seed=seed,
        assignments=tuple(assign or ()),
        work_dir=work_dir,
        json_output=output is OutputFormat.JSON,
        simulate_slots=simulate_slots,
        plan=plan,
        profile=profile,
        runtimes=tuple(runtime or ()),
    )
    raise typer.Exit(command.run(options))


@app.command()
def timeline(
    work_dir: Annotated[Path, typer.Argument(help="work dir of a run, which may still go on")],
    step: Annotated[str, typer.Option(metavar="A:B", help="these steps only; A or B may be left out")] = "",
    output: Annotated[
        Path | None,
        typer.Option(help="file for Perfetto or chrome://tracing, beside it FILE.svg. Default: WORKDIR/timeline.json"),
    ] = None,
) -> None:
    """Where the time went: a picture for a browser, a track per slot as a file for ui.perfetto.dev, and a table."""
    from rljob import picture
    from rljob import timeline as command

    with _refused():
        first, last = command.steps_of(step)
        path, drawn = command.pair(output if output is not None else work_dir / command.FILE)
        record = command.read(work_dir, first=first, last=last)
        size = command.write(record, path)
        picture.write(record, drawn)
    for line in command.summary(record):
        typer.echo(line)
    typer.echo(f"{drawn}: the picture of it, for a browser")
    typer.echo(f"{path}: {size / 1e6:.1f} MB, each span, for ui.perfetto.dev or chrome://tracing")


@app.command()
def graph(
    where: WhereArgument,
    svg: Annotated[Path | None, typer.Option(help="also a picture, into this file")] = None,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Who fed whom, with how much, and how long each role was at work."""
    from rljob import graph as command

    with _refused():
        place = _where(where, namespace, context)
        said = command.text(place)
        if svg is not None:
            command.write(place, svg)
    typer.echo(said)


@app.command()
def export(
    work_dir: Annotated[Path, typer.Argument(help="work dir of a run of flow grpo, which may still go on")],
    step: Annotated[int | None, typer.Option(min=0, help="whose checkpoint. Default: the newest")] = None,
    output: Annotated[Path | None, typer.Option(help="folder to make. Default: WORKDIR/export/bBRANCH-STEP")] = None,
) -> None:
    """A checkpoint as a folder that transformers and vLLM load."""
    from rlinf_worker.roles import loading

    with _refused():
        remedy = "install extras actor and reasoning"
        command = loading.module("rljob.export", what="the library of models", next=remedy, ours=True)
        version, folder = command.export(work_dir, step=step, into=output)
    typer.echo(f"{folder}: the model as of {version}")


plans = typer.Typer(no_args_is_help=True, help="Look at the plans of a job, and change the one in force.")
app.add_typer(plans, name="plan")
WhereArgument = Annotated[
    str, typer.Argument(metavar="WHERE", help="work dir of a run; with --namespace the name of a job of the cluster")
]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="of a job of the cluster that the kubeconfig ($KUBECONFIG) names")
]
Context = Annotated[str, typer.Option(help="of the kubeconfig; without it its current one")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, max=3600, help="how long to wait for it")]


def _where(where: str, namespace: str, context: str) -> Where:
    if not namespace:
        return Path(where)
    from rljob.cluster import Cluster

    return where, Cluster(namespace=namespace, context=context)


@plans.command("show")
def plan_show(
    where: WhereArgument,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="the plan in force, to be edited and set")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """The plans of the job: * is in force, + on its way."""
    from rljob import plan as command

    with _refused():
        typer.echo(command.show(_where(where, namespace, context), as_yaml=as_yaml))


@plans.command("explain")
def plan_explain(
    where: WhereArgument,
    name: Annotated[str, typer.Argument(help="which; without it the one in force")] = "",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Why a plan was written, what it promised and kept, and why others lost."""
    from rljob import reasons

    with _refused():
        typer.echo(reasons.explain(_where(where, namespace, context), name))


@plans.command("history")
def plan_history(where: WhereArgument, namespace: Namespace = "", context: Context = "") -> None:
    """Every plan of a run, in order: its reason, what it promised, what it took."""
    from rljob import reasons

    with _refused():
        typer.echo(reasons.history(_where(where, namespace, context)))


@plans.command("what-if")
def plan_what_if(
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE", help="work dir of a run; with --namespace a job of the cluster; with --profile a manifest"
        ),
    ],
    pods: Annotated[list[str], typer.Option(metavar="POOL=N", help="pods of a pool, instead of those there are")] = [],  # noqa: B006
    slots: Annotated[
        list[str], typer.Option(metavar="[POOL=]N", help="slots of each pod of a pool, or of every pool")
    ] = [],  # noqa: B006
    memory: Annotated[float, typer.Option(metavar="GIB", min=0, help="of each slot; 0: as it is")] = 0.0,
    more: Annotated[
        bool, typer.Option("--more", help="and what one slot more, or 10% more memory, would bring")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="of an earlier job with the manifest's key; needs no cluster")
    ] = None,
    runtime: RuntimeFiles = None,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """What the planner would do by what was measured, with these pools or with others. Changes nothing."""
    from rljob import reasons

    with _refused():
        instead = reasons.OtherPools(
            pods=reasons.numbers_of("--pods", pods),
            slots=reasons.numbers_of("--slots", slots, may_be_bare=True),
            memory_gib=memory,
        )
        if profile is None:
            typer.echo(reasons.what_if(_where(where, namespace, context), instead, more=more))
            return
        file, beside = Path(where), runtime or ()
        typer.echo(reasons.what_if_it_began(file, profile, instead, runtimes=beside, more=more))


@plans.command("approve")
def plan_approve(
    where: WhereArgument,
    name: Annotated[str, typer.Argument(help="of a plan that waits")],
    by: Annotated[str, typer.Option(metavar="NAME", help="who approves; without it the user of this machine")] = "",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Let a plan come into force that waits for approval (placement.apply: OnApproval)."""
    from rljob import plan as command

    with _refused():
        _said(*command.approve(_where(where, namespace, context), name, by=by))


@plans.command("set")
def plan_set(
    where: WhereArgument,
    file: Annotated[Path, typer.Argument(help="spec of an RLPlan (YAML); - reads standard input")],
    timeout: Timeout = 120.0,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Prepare another plan beside the one in force, and put it in force at a step boundary."""
    from rljob import plan as command

    with _refused():
        _said(*command.put(_where(where, namespace, context), file, timeout_s=timeout))


@plans.command("pin")
def plan_pin(
    where: WhereArgument,
    name: Annotated[str, typer.Argument(help="name of an RLPlan of the run, older ones too")],
    timeout: Timeout = 120.0,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Put a plan in force that is there already."""
    from rljob import plan as command

    with _refused():
        _said(*command.pin(_where(where, namespace, context), name, timeout_s=timeout))


@plans.command("unpin")
def plan_unpin(
    where: WhereArgument,
    mode: Annotated[str, typer.Option(help="spec.placement.mode then: Auto, Collocated, Disaggregated")] = "Auto",
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Let the scheduler go on from the plan in force: as set, pin and rollback keep theirs."""
    from rljob import plan as command

    with _refused():
        _said(*command.unpin(_where(where, namespace, context), mode=mode))


@plans.command("rollback")
def plan_rollback(
    where: WhereArgument, timeout: Timeout = 120.0, namespace: Namespace = "", context: Context = ""
) -> None:
    """Put the plan in force again that the one in force came from, and keep it there."""
    from rljob import plan as command

    with _refused():
        _said(*command.roll_back(_where(where, namespace, context), timeout_s=timeout))


def _said(is_in_force: bool, message: str) -> None:
    typer.echo(message, err=not is_in_force)
    if not is_in_force:
        raise typer.Exit(1)
