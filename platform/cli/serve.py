"""`loraplex serve`: the whole platform on this machine, in the foreground.

Its options are the common settings of the platform and all knobs of the engine, which it passes on
as they are; what they mean and may be is the engine's to know.
"""

from pathlib import Path
from typing import Annotated

import typer

from loraplex.platform.cli.client import fail

CANNOT_START = 2
INTERRUPTED = 130
SETTINGS = ("config", "model", "host", "port", "data_dir", "log_format", "log_level")
PLATFORM = (*SETTINGS, "name")  # options that are no knobs of the engine


def serve(
    model: Annotated[
        str | None, typer.Option(help="Hugging Face id, model directory or .gguf file.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the API calls the base; by default the model's name.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of everything that must survive a restart.")
    ] = None,
    *,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings; variables win over it.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Lines of the log: text for people, json for machines.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Least level logged: debug, info, warning, error.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt and its completion together (default: what fits)."),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.")] = None,
    memory_utilization: Annotated[
        float | None,
        typer.Option(
            "--memory-utilization",
            "--gpu-memory-utilization",
            help="Share of the memory left after loading that KV blocks and images may take.",
        ),
    ] = None,
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-bytes",
            "--kv-cache-memory-bytes",
            help="Bytes of that share for KV blocks alone (default: blocks and images share it by"
            " need).",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the KV cache; auto: the computation's, int8: about half of bf16's bytes."
        ),
    ] = None,
    swap_space: Annotated[
        float | None,
        typer.Option(
            help="GiB of host memory for preempted KV blocks; 0: none (default: at most 4)."
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep the KV blocks of prompts for the requests that begin alike.",
        ),
    ] = None,
    speculative_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens to look up in the prompt and try in a step, where a request does not say."
        ),
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="On a GPU: plan a step while the one before it runs.",
        ),
    ] = None,
    image_ttl_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which an idle image goes before younger ones (default: never)."
        ),
    ] = None,
    tenant_images: Annotated[
        int | None,
        typer.Option(help="Images of each tenant's latest use that go only when no other can."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the computation.")] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Int8: weights of the base as int8, int8-w8a8: its activations too."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: one a core).")] = None,
    cores: Annotated[
        str | None,
        typer.Option(help="Cores to pin the threads to, such as 0,2-5 (default: not pinned)."),
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait; more are refused as overloaded.")
    ] = None,
) -> None:
    """Start the whole platform and print its keys.

    What is not given here comes from LORAPLEX_… variables, then from the file; docs/settings.md
    lists all.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    knobs = {key: value for key, value in given.items() if key not in PLATFORM}
    chosen = {key: value for key, value in given.items() if key in SETTINGS}
    import asyncio

    from loraplex.platform.boot import StartError, read_settings
    from loraplex.platform.redaction import redact
    from loraplex.platform.serve import run

    try:
        run(read_settings(**chosen, engine=knobs), name)
    except StartError as error:
        fail(redact(str(error)), CANNOT_START)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED) from None
