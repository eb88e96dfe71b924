"""Define the command `remat` and its subcommands. Overrides are written as for `train.py`: recipe=NAME option=value."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import remat
from remat.config import command_line
from remat.config.command_line import check_picture, split_points, without_policy
from remat.config.options import ConfigError, RunConfig, StrategyChoice
from remat.config.redact import redact_text
from remat.launch import exit_codes
from remat.machine.start_up import share_cores, without_garbage

if TYPE_CHECKING:
    from rich.console import Console

    from remat.planning.plan import Recordings
    from remat.planning.settings.search import Setting
    from remat.saving.exports.export import ExportResult, Form

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
)
BEST_SHOWN = 4  # settings of `remat plan --best`
CLEAR_TO_END = "\x1b[K"  # terminal control sequence: clear to the end of the line
WITH_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
OVERRIDES = "[OPTIONS] recipe=NAME option=value ..."
RunDir = Annotated[
    Path, typer.Argument(help="A run directory: outputs/RECIPE/RUN_ID", exists=True, file_okay=False)
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"remat {remat.__version__}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Its number, and stop."),
    ] = False,
) -> None:
    """Know a run's memory before, during and after it."""


@app.command("ds-config", context_settings=WITH_OVERRIDES, options_metavar=OVERRIDES)
def ds_config_command(
    ctx: typer.Context,
    world_size: Annotated[
        int, typer.Option(help="Ranks of the run; default: those of hardware.", show_default=False)
    ] = 0,
) -> None:
    """Print the complete DeepSpeed config of a run, ready for --deepspeed_config."""
    from remat.config import compose

    run = compose.from_command_line(ctx.args).run
    ranks = world_size or run.hardware.ranks
    compose.check_deepspeed(run, ranks)
    with without_garbage():
        import torch

        from remat.planning import strategy
    can_pin = torch.cuda.is_available() or run.hardware.gpu is not None
    print(json.dumps(strategy.decide(run, world_size=ranks, can_pin=can_pin).ds, indent=2))


@app.command("recipes")
def recipes_command() -> None:
    """List the recipes with their machine, planned memory and planned speed."""
    from remat.report import recipes

    recipes.show(_console())


@app.command("plan", context_settings=WITH_OVERRIDES, options_metavar=OVERRIDES)
def plan_command(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data instead of tables.")] = False,
    swept: Annotated[
        bool,
        typer.Option("--sweep", help="Plan every combination of words with commas: train.seq_len=1024,2048"),
    ] = False,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="The fastest settings that fit: ZeRO stage, offload, checkpointing, micro-batch."
        ),
    ] = False,
    curve: Annotated[
        bool,
        typer.Option("--curve", help="Step time over GiB: checkpointing=budget from the least to keeping all."),
    ] = False,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder", help="The longest sequence: loss in chunks, offload, MLPs in slices, shared sequences."
        ),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw it too: a .png, .svg or .pdf file")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say every assumption in full.")] = False,
    advise: Annotated[
        bool,
        typer.Option(
            "--advice/--no-advice", help="Look for what makes it fit, or makes it faster, up to 20 s of a core."
        ),
    ] = True,
) -> None:
    """Say where every GiB and second of a run goes, without a GPU or weights.

    Where it is not sure to fit, the nearest changes that make it fit follow. Exit code 0: it fits or is tight, or one
    combination of a sweep does; 3: it does not fit.
    """
    if plot is not None:
        check_picture(plot)
    kinds = {"--best": best, "--ladder": ladder, "--sweep": swept, "--curve": curve}
    given = [name for name, wanted in kinds.items() if wanted]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if plot is not None and (best or ladder):
        raise ConfigError(f"{given[0]}: draws nothing; leave out --plot")
    if best:
        _plan_best(ctx.args, as_json)
        return
    if ladder:
        fits = _plan_ladder(ctx.args, as_json)
    elif swept or curve:
        fits = _plan_several(ctx.args, as_json, plot, curve=curve)
    else:
        fits = _plan_one(ctx.args, as_json, plot, explain=explain, advise=advise)
    if not fits:
        raise typer.Exit(exit_codes.NOT_ABLE)


def _run_to_plan(args: list[str]) -> RunConfig:
    """Compose a run and check what can be checked before torch is imported."""
    from remat.config import compose

    run = compose.from_command_line(args).run
    compose.check_plan(run)
    return run


def _plan_one(args: list[str], as_json: bool, plot: Path | None, *, explain: bool, advise: bool) -> bool:
    run = _run_to_plan(args)
    with without_garbage():
        from remat.planning.loading import plan_loading
        from remat.planning.plan import Recordings, Verdict, make_plan, plan_as_json, strategy_of_fullest
        from remat.planning.settings import search, sharding
        from remat.report import plan

    known, console = Recordings(), _console()
    is_fastest = run.strategy is StrategyChoice.auto
    if is_fastest:
        args, run = _with_best(args, run, known)
    planned = make_plan(run, recordings=known)
    loading = plan_loading(run, planned.strategy, world_size=planned.world_size, on_gpu=True)
    if not as_json:
        plan.show(planned, console, loading, title=plan.name_asked(args, run), explain=explain)
    ways = sharding.compare(planned.cfg, known)
    if not as_json:
        plan.show_ways(ways, console)
    looks = advise and not (planned.plan.fits and (is_fastest or search.explain_no_search(run)))
    found = search.Advice([], None)
    if looks:
        wanted = "faster settings that fit" if planned.plan.fits else "what makes it fit"
        print(
            f"looking up to {search.ADVICE_S:g} s for {wanted} (--no-advice: not) ...",
            file=sys.stderr,
            flush=True,
        )
        counted = _count("settings looked at")
        found = search.advise(args, planned, recordings=known, progress=counted, limit_s=search.ADVICE_S)
    if as_json:
        record = plan_as_json(planned) | {"loading": loading and loading.record()}
        record |= {"zero_of_nodes": sharding.as_json(ways)}
        print(json.dumps(record | search.advice_as_json(found), indent=2))
    elif looks:
        plan.show_advice(found, planned, console)
    if plot is not None:
        from remat.report import plan_charts

        plan_charts.draw_plan(planned, known.get(planned.cfg, strategy_of_fullest(planned)), plot)
    return planned.plan.verdict is not Verdict.too_large


def _with_best(args: list[str], run: RunConfig, known: Recordings) -> tuple[list[str], RunConfig]:
    """Return the command line with the settings that strategy=auto chooses, and its run."""
    from remat.config import compose
    from remat.planning.settings import search

    if reason := search.explain_no_search(run):
        print(f"strategy=auto: {reason}. Planned with the settings of the recipe", file=sys.stderr)
        return args, run
    (chosen,) = _settings(args, run, 1, known)
    print(f"strategy=auto: {' '.join(chosen.overrides) or 'the settings of the recipe'}", file=sys.stderr)
    args = [*args, *chosen.overrides]
    return args, compose.from_command_line(args).run


def _plan_best(args: list[str], as_json: bool) -> None:
    run = _run_to_plan(args)
    with without_garbage():
        from remat.planning.plan import Recordings
        from remat.planning.settings import search
        from remat.report import plan
    found = _settings(args, run, BEST_SHOWN, Recordings())
    if as_json:
        print(json.dumps([search.setting_as_json(setting) for setting in found], indent=2))
    else:
        plan.show_best(found, _console())


def _plan_ladder(args: list[str], as_json: bool) -> bool:
    run = _run_to_plan(args)
    with without_garbage():
        from remat.planning.plan import Recordings
        from remat.planning.settings import ladder
        from remat.report import plan
    found = ladder.climb(args, Recordings(), _count("rungs planned"))
    if as_json:
        print(json.dumps(ladder.as_json(found), indent=2))
    else:
        plan.show_ladder(found, _console(), title=plan.name_asked(args, run))
    return any(rung.seq_len for rung in found)


def _settings(args: list[str], run: RunConfig, limit: int, known: Recordings) -> list[Setting]:
    """Return the fastest settings that fit; exit with code 3 when none fits."""
    from remat.planning import preflight
    from remat.planning.settings import search

    try:
        return search.choose(args, run, limit, known, _count("settings looked at"))
    except preflight.DoesNotFit as error:
        raise typer.Exit(_tell(error, exit_codes.NOT_ABLE)) from error


def _tell(error: Exception, code: int) -> int:
    """Print why a command ends, and return its exit code."""
    from remat.launch.supervisor import show

    show(f"\nremat: {redact_text(str(error))}\n")
    return code


def _count(what: str) -> Callable[[int, int], None]:
    """Return a function that shows progress in one line of a terminal and clears the line at the end."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            line = f"{done}/{total} {what}" if done < total else ""
            print(f"\r{line}{CLEAR_TO_END}", end="", file=sys.stderr, flush=True)

    return show


def _plan_several(args: list[str], as_json: bool, plot: Path | None, *, curve: bool) -> bool:
    if curve:
        _run_to_plan(args)
    else:
        from remat.config import compose

        fixed, points = split_points(args)
        compose.refuse_if_none(([*fixed, *point] for point in points), "--sweep: every combination is refused")
    with without_garbage():
        from remat.planning import sweep
        from remat.report import plan

    planned = (sweep.curve if curve else sweep.run)(args, _count("planned"))
    if as_json:
        print(json.dumps(sweep.as_json(planned), indent=2))
    else:
        plan.show_sweep(planned, _console())
    if plot is not None:
        from remat.report import plan_charts

        plan_charts.draw_sweep(planned, plot)
    return any(point.may_run for point in planned)


@app.command("retune")
def retune_command(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data instead of a table.")] = False,
) -> None:
    """Choose the tables of a run with checkpointing=budget again, with the seconds that its phases really took."""
    with without_garbage():
        from remat.planning import retune
        from remat.report import plan

    found = retune.retune(run_dir)
    if as_json:
        print(json.dumps(retune.as_json(found), indent=2))
    else:
        plan.show_retuned(found, _console())


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 110, highlight=False)


@app.command("compare", context_settings=WITH_OVERRIDES, options_metavar=OVERRIDES)
def compare_command(
    ctx: typer.Context,
    repeats: Annotated[
        int, typer.Option(help="Launches of each point; default: the experiment's, or 2", show_default=False)
    ] = 0,
    ranks: Annotated[
        int, typer.Option(help="Ranks of each launch; default: the experiment's, or 1", show_default=False)
    ] = 0,
    baseline: Annotated[
        str, typer.Option(help="What times are set against: option=value, or a point's name")
    ] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Launch all, also what has a result.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Plain data instead of the table.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="The named experiments, and stop.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of all experiments")] = Path("outputs/lab"),
    publish: Annotated[
        Path | None, typer.Option(help="A folder: a row per point goes into its points.csv")
    ] = None,
) -> None:
    """Launch the same run under several choices and set them side by side.

    Words with commas list the choices: remat compare checkpointing=none,full recipe=NAME. A named experiment: remat
    compare lab=NAME. What has a result is not launched again.

    remat compare policies [recipe=NAME ...] launches nothing: bytes kept, FLOPs recomputed and ZeRO-3 gathers of every
    activation checkpointing policy, counted on tensors without memory.
    """
    if ctx.args[:1] == ["policies"]:
        _compare_policies(ctx.args[1:], as_json)
        return
    from remat.lab import experiment

    if show_list:
        print(experiment.describe_all(command_line.parse(ctx.args).config_dirs))
        return
    if repeats < 0 or ranks < 0:
        raise ConfigError("--repeats and --ranks: at least 1")
    experiment.check(ctx.args, baseline)
    with without_garbage():
        from remat.lab import command

    raise typer.Exit(
        command.run(ctx.args, command.Options(repeats, ranks, baseline, fresh, as_json, out, publish))
    )


def _compare_policies(args: list[str], as_json: bool) -> None:
    from dataclasses import asdict

    from remat.config import compose

    cfg = compose.from_command_line(without_policy(args)).run
    compose.check_deepspeed(cfg, None)
    with without_garbage():
        from remat.planning import policies

    found = policies.rows(args)
    if as_json:
        print(json.dumps([asdict(row) for row in found], indent=2))
        return
    print(policies.caption(cfg))
    for line in policies.lines(found):
        print(line, flush=True)


@app.command(
    context_settings=WITH_OVERRIDES | {"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [train.py] recipe=NAME option=value ...",
)
def launch(ctx: typer.Context) -> None:
    """Train under supervision.

    Stop signals reach every rank at once, exit codes are the ranks' own, nothing outlives the run, every rank has a
    log. Options: --log-dir DIR, --grace-s SECONDS between a stop and force (600), and those of the deepspeed runner,
    such as --num_gpus N. Any other script, --module NAME or --no_python PROGRAM works too.
    """
    from remat.launch import arguments, nodes, supervisor

    words = arguments.parse(ctx.args)
    if words.trains:  # what every rank would refuse is told before any starts
        from remat.config import compose

        compose.check_launch(compose.from_command_line(words.words), words.ranks)
    raise typer.Exit(nodes.launch(words) if words.of_all_nodes else supervisor.launch(words))


@app.command()
def report(run_dir: RunDir) -> None:
    """Draw a run: loss, step-time split, memory and throughput as PNG and one HTML page."""
    from remat.report import run_report as drawing

    for path in drawing.draw(run_dir):
        print(path)


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: RUN_DIR/export")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32; default: the precision of the run")] = "",
    max_shard_size: Annotated[str, typer.Option(help="Largest file")] = "5GB",
    merged: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Adapters in their base, a plain model; to RUN_DIR/merged. RUN_DIR/best works too.",
        ),
    ] = False,
) -> None:
    """Write the newest saved state of a run as Hugging Face safetensors. Needs no GPU."""
    from remat.saving import manifest
    from remat.saving.exports import export as exporting
    from remat.saving.exports import merge

    if dtype and dtype not in exporting.DTYPES:
        raise ConfigError(f"--dtype {dtype} is not a precision: choose bf16, fp16 or fp32")
    write = _merge if merged else _export
    form = exporting.Form(max_shard_size, exporting.DTYPES[dtype] if dtype else None)
    try:
        result = write(run_dir, out, form)
    except manifest.SaveError as error:
        raise typer.Exit(_tell(error, exit_codes.FAILED)) from error
    except merge.NoRoom as error:
        raise typer.Exit(_tell(error, exit_codes.NOT_ABLE)) from error
    print(f"{result.path}: {result.num_params:,} parameters in {len(result.files)} file(s)")


def _newest_state(run_dir: Path) -> Path:
    from remat.report.loading import CHECKING, LoadingProgress
    from remat.saving import load

    told = LoadingProgress(lambda text: print(text, file=sys.stderr, flush=True), lambda: None, CHECKING)
    found = load.find_newest(run_dir, told)
    for note in found.notes:
        print(f"passed over {note}", file=sys.stderr)
    if found.state is None:
        raise ConfigError(f"{run_dir} has no complete saved state: train with save.every or save.at_end=true")
    return found.state.path


def _export(run_dir: Path, out: Path | None, form: Form) -> ExportResult:
    from remat.saving.exports import export as exporting
    from remat.saving.exports import hf_files

    adapter = (run_dir / exporting.MODEL_FOLDER / hf_files.ADAPTER_CONFIG).is_file()
    return exporting.export_saved_state(
        _newest_state(run_dir),
        run_dir,
        out or run_dir / "export",
        replace(form, readme=_readme(run_dir, adapter=adapter)),
        verified=True,
    )


def _merge(place: Path, out: Path | None, form: Form) -> ExportResult:
    """Merge the newest state of a run, or the adapters it has exported to `place`."""
    from remat.config import compose
    from remat.saving.exports import hf_files, merge

    exported = (place / hf_files.ADAPTER_CONFIG).is_file()
    run_dir = place.absolute().parent if exported else place
    return merge.merge_folder(
        place if exported else _newest_state(run_dir),
        run_dir,
        out or run_dir / merge.FOLDER,
        replace(form, readme=_readme(run_dir, adapter=False)),
        compose.from_command_line([command_line.override("resume", str(run_dir))]).run,
    )


def _readme(run_dir: Path, *, adapter: bool) -> Callable[[], str] | None:
    """Return a function that composes the model card; None for a folder without a run's configuration."""
    from remat.config import resumed
    from remat.report import model_card

    if not (run_dir / resumed.FILE).is_file():
        return None
    records = resumed.find_config(run_dir).parent
    return lambda: model_card.compose(run_dir, records, adapter=adapter)


@app.command("sample")
def sample_command(
    place: Annotated[
        Path, typer.Argument(help="A run directory or an exported model", exists=True, file_okay=False)
    ],
    prompt: Annotated[
        str,
        typer.Option(help="What to ask; without it a chat, or all of standard input if that is no terminal"),
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token", min=0.0)] = 0.7,
    seed: Annotated[int, typer.Option(help="Of what is drawn")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without a chat template.")] = False,
) -> None:
    """Ask a trained model, through its chat template if it has one; adapters are put on their base."""
    with without_garbage():
        from remat.saving.exports import sample

    def show(text: str) -> None:
        print(text, end="", flush=True)

    given = prompt or ("" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n"))
    speaker = sample.load(place, sample.Settings(max_new_tokens, temperature, seed, raw))
    if given or not sys.stdin.isatty():
        speaker.answer(given, show)
        return
    print("end with Ctrl-D", file=sys.stderr)
    try:
        sample.converse(speaker, iter(lambda: input("> "), None), show)
    except (EOFError, KeyboardInterrupt):
        print()


@app.command("push")
def push_command(
    folder: Annotated[
        Path, typer.Argument(help="An exported model: RUN_DIR/export", exists=True, file_okay=False)
    ],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face hub")],
    public: Annotated[bool, typer.Option("--public", help="For everyone; without it private.")] = False,
    message: Annotated[str, typer.Option(help="Of the commit")] = "Upload the model",
) -> None:
    """Upload an exported model to the Hugging Face hub. Saved states and secrets are refused."""
    from remat.saving.exports import push

    print(push.push(folder, repo_id, public=public, message=message))


@app.command(context_settings=WITH_OVERRIDES, options_metavar="[OPTIONS] [recipe=NAME option=value ...]")
def doctor(
    ctx: typer.Context,
    build: Annotated[
        list[str] | None, typer.Option(help="Ops to build and run; default: all that can be")
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(help="With recipe=NAME: ranks on this machine; default: its GPUs", show_default=False),
    ] = 0,
) -> None:
    """Check what this machine has: versions, cores, memory, disk; build and run ops. Exit code 3: something is missing.

    With recipe=NAME option=value ...: can it hold that run? Needed against found.
    """
    from remat.config import compose
    from remat.machine import ops

    ops.use_environment_folder()
    unknown = set(build or []) - set(ops.BUILDERS)
    if unknown:
        raise ConfigError(
            f"--build {', '.join(sorted(unknown))}: no such op; choose from {', '.join(ops.BUILDERS)}"
        )

    run = compose.from_command_line(ctx.args).run if ctx.args else None
    if run is not None:
        compose.check_deepspeed(run, ranks or None)
    with without_garbage():
        from remat.machine import doctor as examining
        from remat.planning import launch_plan

    say, table = partial(print, flush=True), ""
    if run is not None:
        findings, table = launch_plan.examine_for(run, ranks, say)
    else:
        findings = examining.examine(build or examining.available_ops(), say)
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{'ok ' if finding.ok else 'NOT'}  {finding.what:{width}}  {finding.found}")
        if not finding.ok:
            print(f"     {'':{width}}  {finding.remedy}")
    if table:
        print(f"\n{table}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(exit_codes.NOT_ABLE)


@app.command()
def calibrate(
    out: Annotated[
        Path, typer.Option(help="DIR/hardware/NAME.yaml, to use it by --config-dir DIR hardware=NAME")
    ] = Path("hardware/mine.yaml"),
    nvme_path: Annotated[
        Path | None, typer.Option(help="A folder on the disk to measure; needs 2 GiB.")
    ] = None,
) -> None:
    """Measure this machine's rates in under a minute and write them as a hardware file for plans."""
    from remat.machine import calibrate as calibrating
    from remat.machine import ops

    calibrating.check_out(out)
    try:
        found = calibrating.measure(nvme_path=nvme_path, say=partial(print, flush=True))
    except ops.OpError as error:
        raise ConfigError(str(error)) from error
    options = calibrating.write(found, out, nvme_path)
    for line in calibrating.table(found):
        print(line)
    print(f"{out}: use it with {options}")


def main() -> None:
    """Run the console command. A ConfigError is one message and exit code 2, an OSError one message and exit code 1."""
    from remat.report import console

    if sys.argv[1:2] not in (["launch"], ["compare"]):  # their ranks would inherit the threads of one process
        share_cores()
    console.quiet_libraries(debug=False)
    try:
        app()
    except ConfigError as error:
        sys.exit(_tell(error, exit_codes.CONFIG))
    except OSError as error:
        sys.exit(_tell(error, 1))


if __name__ == "__main__":
    main()
