"""The `engine` command. Whatever is slow to import is imported by the command that needs it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Annotated, Any

import typer

from engine.config import (
    ACCEPTANCE,
    ALLREDUCE,
    DEFAULT_STEPS,
    DEVICES,
    DTYPES,
    GRAPHS,
    POLICIES,
    SPECULATION,
    WEIGHTS,
    EngineConfig,
    SpecConfig,
    default_draft_tokens,
)
from engine.errors import EngineError
from engine.logs import FORMATS, LEVELS, configure_logging

app = typer.Typer(
    help="A small inference engine with speculative decoding, behind an OpenAI-compatible server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="engine")


def _print_version(wanted: bool) -> None:
    if wanted:
        from engine import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _option(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, **more)


def _settings(
    model: Annotated[str, _option("Known name, .gguf file, Hugging Face folder, or hub id.")] = EngineConfig.model,
    host: Annotated[str, _option("Address to listen on.")] = EngineConfig.host,
    port: Annotated[int, _option("Port to listen on; 0 picks a free one.")] = EngineConfig.port,
    served_model_name: Annotated[str | None, _option("What clients call the model; default: its own name.")] = None,
    api_key: Annotated[
        str | None, _option("Key that clients must send.", envvar="ENGINE_API_KEY", show_envvar=True)
    ] = None,
    dtype: Annotated[str, _option(f"Of weights and activations: {', '.join(DTYPES)}.")] = EngineConfig.dtype,
    weights: Annotated[
        str, _option(f"How the linear layers' weights are kept: {', '.join(WEIGHTS)}; auto: in dtype.")
    ] = EngineConfig.weights,
    context_length: Annotated[
        int | None, _option("Longest prompt + output, in tokens; default: what the model was trained for.")
    ] = None,
    kv_tokens: Annotated[int | None, _option("Size of the KV pool, in tokens; default: by the other settings.")] = None,
    page_size: Annotated[int, _option("Tokens per KV page.")] = EngineConfig.page_size,
    max_running_requests: Annotated[
        int, _option("Requests decoded together; more wait.")
    ] = EngineConfig.max_running_requests,
    max_waiting_requests: Annotated[
        int, _option("Requests that wait, at most; more are refused with status 429.")
    ] = EngineConfig.max_waiting_requests,
    prefill_tokens: Annotated[int, _option("Prompt tokens run per step, at most.")] = EngineConfig.prefill_tokens,
    threads: Annotated[
        int | None, _option("Threads of each rank's process; default: all cores, divided by tp.")
    ] = None,
    device: Annotated[str, _option(f"What computes: {' or '.join(DEVICES)}.")] = EngineConfig.device,
    cuda_graphs: Annotated[
        str, _option(f"Of decode and verify steps: {', '.join(GRAPHS)}; preferred: goes on without and says so.")
    ] = EngineConfig.cuda_graphs,
    tp: Annotated[int, _option("Ranks that share each layer, one process each.")] = EngineConfig.tp,
    allreduce: Annotated[
        str, _option(f"How the ranks exchange what they computed: {', '.join(ALLREDUCE)}.")
    ] = EngineConfig.allreduce,
    collective_timeout_s: Annotated[
        float, _option("A rank that is not heard of for so long in an exchange takes the server down.")
    ] = EngineConfig.collective_timeout_s,
    prefix_cache: Annotated[str, _option("on, or off: requests that begin alike share what was computed.")] = "on",
    seed: Annotated[int, _option("From which requests without a seed get theirs.")] = EngineConfig.seed,
    drain_s: Annotated[
        float, _option("After SIGTERM, requests in flight have this many seconds to finish.")
    ] = EngineConfig.drain_s,
    log_level: Annotated[str, _option(f"One of {', '.join(LEVELS)}.")] = EngineConfig.log_level,
    log_format: Annotated[str, _option(f"One of {', '.join(FORMATS)}.")] = EngineConfig.log_format,
    speculation: Annotated[str, _option(f"The drafter: {', '.join(SPECULATION)}.")] = SpecConfig.speculation,
    num_steps: Annotated[
        int | None, _option(f"Draft depth per round; default: {DEFAULT_STEPS} with speculation.")
    ] = None,
    topk: Annotated[int, _option("Branches per node; 1 is a chain.")] = SpecConfig.topk,
    num_draft_tokens: Annotated[
        int | None, _option("Rows verified per request and round; default: num-steps + 1, in a tree 16.")
    ] = None,
    spec_version: Annotated[str, _option("v1: synchronous, v2: overlap scheduling.")] = SpecConfig.spec_version,
    disable_batch_threshold: Annotated[
        str, _option("Speculate at up to this many running requests, or 'never' disable it.")
    ] = "never",
    steps_by_batch: Annotated[
        str | None, _option("Draft depth by running requests, as in 1:0,8:3,64:0 (from 8 on 3 deep).")
    ] = None,
    policy: Annotated[
        str, _option(f"{' or '.join(POLICIES)}: go below these depths where acceptance says so.")
    ] = SpecConfig.policy,
    acceptance: Annotated[
        str, _option(f"Of drafts at a temperature above 0: {' or '.join(ACCEPTANCE)}.")
    ] = SpecConfig.acceptance,
    draft_head: Annotated[str | None, _option("Head of the eagle3 drafter; default: the one that ships.")] = None,
    draft_model: Annotated[str | None, _option("Model of the draft_model drafter.")] = None,
    hybrid: Annotated[str, _option("The two drafters that hybrid composes.")] = ",".join(SpecConfig.hybrid),
    hybrid_steps: Annotated[
        int | None, _option("Draft depth of hybrid's second drafter; default: num-steps, as the first's.")
    ] = None,
    ngram_min: Annotated[int, _option("Shortest suffix that the ngram drafter looks up.")] = SpecConfig.ngram_min,
    ngram_max: Annotated[int, _option("Longest suffix that the ngram drafter looks up.")] = SpecConfig.ngram_max,
) -> EngineConfig:
    """The settings as given. Ends the command, with everything that is wrong with them."""
    problems = []
    steps = num_steps if num_steps is not None else (0 if speculation == "none" else DEFAULT_STEPS)
    threshold = None
    if disable_batch_threshold != "never":
        try:
            threshold = int(disable_batch_threshold)
        except ValueError:
            problems.append(f"disable_batch_threshold: '{disable_batch_threshold}' is neither an integer nor 'never'")
    table = None
    if steps_by_batch:
        try:
            table = tuple(
                (int(size), int(depth)) for size, _, depth in (p.partition(":") for p in steps_by_batch.split(","))
            )
        except ValueError:
            problems.append(f"steps_by_batch: '{steps_by_batch}' is not of the form 1:0,8:3,64:0")
    first, _, second = hybrid.partition(",")
    config = EngineConfig(
        model=model,
        served_model_name=served_model_name,
        host=host,
        port=port,
        api_key=api_key or None,
        dtype=dtype,
        weights=weights,
        context_length=context_length,
        kv_tokens=kv_tokens,
        page_size=page_size,
        max_running_requests=max_running_requests,
        max_waiting_requests=max_waiting_requests,
        prefill_tokens=prefill_tokens,
        threads=threads,
        device=device,
        cuda_graphs=cuda_graphs,
        tp=tp,
        allreduce=allreduce,
        collective_timeout_s=collective_timeout_s,
        prefix_cache=prefix_cache != "off",
        seed=seed,
        drain_s=drain_s,
        log_level=log_level,
        log_format=log_format,
        spec=SpecConfig(
            speculation=speculation,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=(num_draft_tokens if num_draft_tokens is not None else default_draft_tokens(steps, topk)),
            disable_batch_threshold=threshold,
            steps_by_batch=table,
            policy=policy,
            acceptance=acceptance,
            draft_head=draft_head,
            draft_model=draft_model,
            hybrid=(first, second),
            hybrid_steps=hybrid_steps,
            spec_version=spec_version,
            ngram_min=ngram_min,
            ngram_max=ngram_max,
        ),
    )
    if prefix_cache not in ("on", "off"):
        problems.append(f"prefix_cache: '{prefix_cache}' is neither 'on' nor 'off'")
    if log_level not in LEVELS:
        problems.append(f"log_level: '{log_level}' is unknown; valid: {', '.join(LEVELS)}")
    if log_format not in FORMATS:
        problems.append(f"log_format: '{log_format}' is unknown; valid: {', '.join(FORMATS)}")
    problems += config.problems()
    if problems:
        _refuse(problems)
    configure_logging(log_level, log_format)
    return config


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `config` the options of all settings instead, behind its own."""
    settings = inspect.signature(_settings, eval_str=True).parameters
    own = {name: p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "config"}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        config = _settings(**{name: given.pop(name) for name in settings})
        command(config=config, **given)

    run.__signature__ = inspect.Signature([*own.values(), *settings.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own.values(), *settings.values())}
    return run


@app.command()
@_with_settings
def serve(config: EngineConfig) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    from engine.server.launch import serve as run

    raise typer.Exit(run(config))


@app.command()
@_with_settings
def bench(
    config: EngineConfig,
    streams: Annotated[str, _option("Requests at once: one figure, or several as in 1,8,32.")] = "1",
    prompt_tokens: Annotated[int, _option("Random tokens of each prompt.")] = 64,
    output_tokens: Annotated[int, _option("Tokens of each answer; end tokens are ignored.")] = 128,
    repeats: Annotated[int, _option("Runs of each level; medians are printed.")] = 3,
    prompts: Annotated[str | None, _option('JSON lines with "prompt" or "text" instead of random tokens.')] = None,
) -> None:
    """Measure the engine alone, in one process without HTTP; prints JSON."""
    import json
    from pathlib import Path

    from engine.bench import run

    try:
        levels = [int(part) for part in streams.split(",")]
    except ValueError:
        levels = []
    problems = [] if levels and min(levels) > 0 else [f"streams: '{streams}' is not of the form 1,8,32"]
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "repeats": repeats}
    problems += [f"{name}: {value} is below 1" for name, value in lengths.items() if value < 1]
    if problems:
        _refuse(problems)
    try:
        result = run(config, levels, prompt_tokens, output_tokens, repeats, Path(prompts) if prompts else None)
    except EngineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    typer.echo(json.dumps(result, indent=2))


@app.command()
def fetch(model: Annotated[str, typer.Argument(help="A known model.")] = EngineConfig.model) -> None:
    """Download a known model into the user's cache, and print where its file is."""
    configure_logging("info")
    from engine.model.source import resolve

    try:
        typer.echo(resolve(model).path)
    except EngineError as error:
        logging.getLogger(__name__).error("%s", error)
        raise typer.Exit(error.exit_code) from error


@app.command("export-hf")
def export_hf(
    folder: Annotated[str, typer.Argument(help="A new or empty folder.")],
    model: Annotated[str, _option("Known name or .gguf file.")] = EngineConfig.model,
) -> None:
    """Write a GGUF model as a Hugging Face folder (bfloat16), for engines that read those."""
    from pathlib import Path

    configure_logging("info")
    from engine.export import export_folder
    from engine.model.source import resolve

    try:
        export_folder(resolve(model), Path(folder))
    except EngineError as error:
        logging.getLogger(__name__).error("%s", error)
        raise typer.Exit(error.exit_code) from error
    typer.echo(folder)


@app.command()
def export_head(
    folder: Annotated[str, typer.Argument(help="A new or empty folder.")],
    model: Annotated[str, _option("The head's target.")] = EngineConfig.model,
    head: Annotated[str | None, _option("Head to export; default: the one that ships for the target.")] = None,
) -> None:
    """Write a draft head as a Hugging Face folder, in the layout that vLLM and SGLang load."""
    from pathlib import Path

    configure_logging("info")
    from engine.build import build
    from engine.export_head import export_head as export
    from engine.model.head_file import load_head
    from engine.spec.eagle3 import find_head

    try:
        core = build(EngineConfig(model=model, max_running_requests=1, spec=SpecConfig(draft_head=head)))
        file = load_head(find_head(core.surroundings), core.model, core.source.name)
        export(file, core.model.config, Path(folder))
    except EngineError as error:
        logging.getLogger(__name__).error("%s", error)
        raise typer.Exit(error.exit_code) from error
    typer.echo(folder)


def _refuse(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(2)


@app.command()
def train_head(
    corpus: Annotated[
        list[str] | None, _option("Gzipped JSON lines of the target's own conversations; repeatable.")
    ] = None,
    generate: Annotated[
        int, _option("Response tokens of corpus to have the target write first, about 650 a second on two cores.")
    ] = 0,
    model: Annotated[str, _option("The target.")] = EngineConfig.model,
    folder: Annotated[
        str | None, _option("Where checkpoints and the curve are kept; training goes on there. Default: the cache.")
    ] = None,
    held_out: Annotated[
        str | None, _option('JSON lines with "text": prompts that acceptance is measured on. Default: of the corpus.')
    ] = None,
    begin_with: Annotated[
        str | None, _option("A head for this target to go on from, with its draft vocabulary; default: a linear start.")
    ] = None,
    draft_vocab: Annotated[int, _option("Size of the reduced draft vocabulary.")] = 16384,
    tokens: Annotated[int, _option("Response tokens to train on in all.")] = 1_500_000,
    threads: Annotated[int | None, _option("CPU threads; default: all.")] = None,
    seed: Annotated[int, _option("Of the start and the order of the data.")] = 0,
) -> None:
    """Train an EAGLE-3 draft head on the target's own answers; killed or interrupted, the same command goes on."""
    from pathlib import Path

    from engine.train.command import train_head as train
    from engine.train.loop import Recipe

    configure_logging("info")
    try:
        done = train(
            model,
            [Path(file) for file in corpus or ()],
            Path(folder) if folder else None,
            Path(held_out) if held_out else None,
            draft_vocab,
            1536,
            Recipe(tokens=tokens, seed=seed),
            threads,
            generate,
            Path(begin_with) if begin_with else None,
        )
    except EngineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    typer.echo(done)
